//! Flags of a container's mounts that engines have no option for: `nosuid` and `nodev` on binds,
//! and the layout of its workspace.
//! They change in the container's own mount namespace, so nothing is left when it is gone. The
//! sockets of its network are made in the same way.

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

use crate::{EgressSockets, Error, init_binary, mounts::layout, sandbox::egress};

/// How long `codelia-init` may take outside the container.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Whether this process may enter the namespaces of a container.
pub(super) fn is_possible() -> bool {
    process::own_uid() == 0
}

/// Opens a namespace of a container's process, by its name in `/proc`.
pub(super) fn open_namespace(process: Pid, name: &str) -> Result<OwnedFd, Error> {
    let namespace = File::open(format!("/proc/{process}/ns/{name}"))?;
    let own = proc_self::namespace_id(name).map_err(io::Error::from)?;
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
    let without_devices = std::iter::once("/".into()).chain(binds).collect();
    let request = RestrictRequest { without_devices, layout: layout::for_init(plan) };
    let namespaces = [namespace.as_fd()];
    let call = init_binary::call(init, "--restrict-mounts", &request, &namespaces);
    timeout(TIMEOUT, call).await.map_err(|_| Error::InitTimeout)?.map(drop)
}

/// Sets up the network of the container for the egress proxy, and opens the sockets for it.
pub(super) async fn open_egress(init: &Path, namespace: OwnedFd) -> Result<EgressSockets, Error> {
    let request = egress::request();
    let namespaces = [namespace.as_fd()];
    let call = init_binary::call(init, "--egress", &request, &namespaces);
    timeout(TIMEOUT, call).await.map_err(|_| Error::InitTimeout)?.and_then(egress::sort)
}
