//! The environment that `codelia-init` must find in a container.

use std::path::PathBuf;

use bollard::models::ContainerCreateBody;
use codelia_init::{ExpectedEnvironment, ExpectedMount, ExpectedNamespace};
use codelia_policy::{Mount, Plan};

use super::{engine::EngineKind, spec::SETTINGS};
use crate::{Error, isolation};

/// Mounts that engines and runtimes make by themselves. Their files tell about the container only.
/// Podman also mounts an empty tmpfs at `/run` and `/var/tmp`.
const ENGINE_MOUNTS: [&str; 12] = [
    "/dev/mqueue",
    "/dev/pts",
    "/etc/group",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/passwd",
    "/etc/resolv.conf",
    "/run",
    "/run/.containerenv",
    "/run/secrets",
    "/sys",
    "/var/tmp",
];

/// Adapts what a plan expects: the engine creates no user namespace, and its user has no capability
/// with which `codelia-init` could lock the secure bits. The kernel of some runtimes is not the
/// host's.
pub(super) fn adapt(
    expected: &mut ExpectedEnvironment,
    plan: &Plan,
    kind: EngineKind,
    body: &ContainerCreateBody,
) -> Result<(), Error> {
    let ids = isolation::ids(plan)?;
    (expected.uid, expected.gid) = (ids.uid, ids.gid);
    expected.locks_secure_bits = false;
    expected.namespaces.insert("user".to_owned(), ExpectedNamespace::Shared);
    if kind.lacks_cgroup_namespaces() {
        expected.namespaces.insert("cgroup".to_owned(), ExpectedNamespace::Shared);
    }
    // All of it is masked.
    expected.covered = Some("/sys".into());
    expected.mounts.insert("/".into(), ExpectedMount::read_only(None));
    expected.mounts.insert(SETTINGS.into(), ExpectedMount::read_only(None));
    for mount in &plan.mounts {
        // The mask replaces what the plan has there.
        if let Mount::Hidden { target, .. } = mount {
            expected.mounts.remove(target);
        }
    }
    for file in plan.mounts.iter().filter(|mount| matches!(mount, Mount::File { .. })) {
        // The image may have a link there, which the engine follows.
        expected
            .mounts
            .entry(file.target().to_owned())
            .and_modify(|mount| mount.follows_link = true);
    }
    for target in engine_mounts(body) {
        expected
            .mounts
            .entry(target)
            .or_insert(ExpectedMount { is_optional: true, ..Default::default() });
    }
    if plan.has_own_kernel() {
        adapt_to_other_kernel(expected);
    }
    Ok(())
}

/// The targets of the mounts that the engine was asked for, and of its own.
fn engine_mounts(body: &ContainerCreateBody) -> Vec<PathBuf> {
    let host = body.host_config.clone().unwrap_or_default();
    let mounts = host.mounts.unwrap_or_default().into_iter().filter_map(|mount| mount.target);
    let own = ENGINE_MOUNTS.map(str::to_owned);
    let all = mounts.chain(host.tmpfs.unwrap_or_default().into_keys());
    all.chain(host.masked_paths.unwrap_or_default()).chain(own).map(PathBuf::from).collect()
}

/// Nothing of the host can be compared with what such a kernel reports. It does not mask paths, and
/// it has no settings to protect.
fn adapt_to_other_kernel(expected: &mut ExpectedEnvironment) {
    expected
        .namespaces
        .values_mut()
        .for_each(|namespace| *namespace = ExpectedNamespace::OtherKernel);
    for mount in expected.mounts.values_mut() {
        (mount.identity, mount.file_system) = (None, None);
    }
    expected.mounts.remove(&PathBuf::from(SETTINGS));
    expected.shown_in_proc = None;
    expected.reports_restrictions = false;
}
