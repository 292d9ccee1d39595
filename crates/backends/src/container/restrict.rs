//! Flags of a container's mounts that engines have no option for: `nosuid` and `nodev` on binds.
//! They change in the container's own mount namespace, so nothing is left when it is gone.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    time::Duration,
};

use codelia_init::RestrictRequest;
use codelia_policy::{Mount, Plan};
use codelia_sys::{Pid, proc_self, process};
use tokio::time::timeout;

use crate::{Error, init_binary};

/// How long `codelia-init` may take to set the flags.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Whether this process may enter the namespaces of a container.
pub(super) fn is_possible() -> bool {
    process::own_uid() == 0
}

/// Opens the mount namespace of a container's process.
pub(super) fn open_namespace(process: Pid) -> Result<OwnedFd, Error> {
    let namespace = File::open(format!("/proc/{process}/ns/mnt"))?;
    let own = proc_self::namespace_id("mnt").map_err(io::Error::from)?;
    if namespace.metadata()?.ino() == own {
        return Err(Error::UnknownPeer);
    }
    Ok(namespace.into())
}

/// Sets `nosuid` on every mount of the container, and `nodev` on its root and on the binds of the
/// plan. Its `/dev` has devices.
pub(super) async fn restrict(init: &Path, namespace: OwnedFd, plan: &Plan) -> Result<(), Error> {
    let bind = |mount: &Mount| match mount {
        Mount::Bind { target, .. } => Some(target.clone()),
        _ => None,
    };
    let binds = plan.mounts.iter().filter_map(bind);
    let request = RestrictRequest { without_devices: std::iter::once("/".into()).chain(binds).collect() };
    let namespaces = [namespace.as_fd()];
    let call = init_binary::call(init, "--restrict-mounts", &request, &namespaces);
    timeout(TIMEOUT, call).await.map_err(|_| Error::InitTimeout)?.map(drop)
}
