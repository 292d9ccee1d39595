//! Options of the worker.

use std::{num::NonZeroU32, path::Path, time::Duration};

use anyhow::Result;
use codelia_worker::{Listen, UidOptions, UidRange};

use crate::{
    backends,
    config::Config,
    host::{open_files, separates_users},
};

/// Time from SIGTERM to SIGKILL.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// Options of the worker. `id` and `socket` apply if none is configured; `uids` are reserved.
pub(crate) fn worker(
    config: &Config,
    id: &str,
    socket: &Path,
    uids: Option<UidRange>,
) -> Result<codelia_worker::Options> {
    config.retention.check()?;
    let worker = config.worker.clone();
    Ok(codelia_worker::Options {
        id: worker.id.clone().map_or_else(|| id.parse(), Ok)?,
        root: std::path::absolute(config.sandbox_root())?,
        listen: worker.listen.clone().unwrap_or_else(|| Listen::Unix(socket.to_owned())),
        internal_tls: config.internal.clone().files()?,
        worker,
        kill_grace: KILL_GRACE,
        escape: config.escape.clone(),
        retention: config.retention,
        required_mode: config.sandbox.mode,
        uids,
        secret_key: config.secrets.key()?,
        open_files: open_files(),
        egress: config.egress.clone().in_data_dir(&config.data_dir)?,
        read_timeout: config.sandbox.read_timeout,
        cgroup_parent: backends::cgroup_parent(config),
    })
}

/// Reserves the user ids of sessions on this host.
pub(crate) fn reserve_uids(config: &Config) -> Result<Option<UidRange>> {
    if !separates_users() {
        return Ok(None);
    }
    let sandbox = &config.sandbox;
    Ok(codelia_worker::reserve_uids(&UidOptions {
        root: std::path::absolute(config.sandbox_root())?,
        registry: sandbox.uid_registry.clone(),
        base: sandbox.uid_base.map(NonZeroU32::get),
        count: sandbox.uid_count.get(),
    })?)
}
