//! Options of the worker.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use codelia_types::WorkerId;
use codelia_worker::{Listen, UidOptions, UidRange};

use super::{
    MIB, ServiceDefaults, connections, egress::egress, escape, retention::retention, secrets::secret_key,
    shutdown_grace, tls,
};
use crate::{backends, config::Config};

/// Time from SIGTERM to SIGKILL.
const KILL_GRACE: Duration = Duration::from_secs(2);
const SLOTS_PER_CORE: usize = 4;
/// Leaves room for a suffix: ids have at most 63 characters.
const MAX_HOST_ID_CHARS: usize = 48;

/// Options of the worker. `id` and `socket` apply if none is configured; `uids` are reserved.
pub(crate) fn worker(
    config: &Config,
    id: &str,
    socket: &Path,
    uids: Option<UidRange>,
    defaults: ServiceDefaults,
) -> Result<codelia_worker::Options> {
    let worker = &config.worker;
    let lease_ttl = Duration::from_secs(worker.lease_ttl_seconds.get());
    Ok(codelia_worker::Options {
        id: worker_id(worker.id.as_deref().unwrap_or(id))?,
        root: std::path::absolute(config.sandbox_root())?,
        listen: worker.listen.as_deref().map_or_else(|| Ok(Listen::Unix(socket.to_owned())), listen)?,
        advertise: worker.advertise.clone(),
        internal_tls: tls::internal(config)?,
        slots: worker.slots.map_or_else(default_slots, NonZeroUsize::get),
        lease_ttl,
        lease_margin: lease_ttl * worker.lease_margin_percent / 100,
        poll_interval: Duration::from_millis(worker.poll_interval_ms.get()),
        drain_grace: shutdown_grace(config, defaults),
        kill_grace: KILL_GRACE,
        read_timeout: config.sandbox.read_timeout,
        escape: escape::responses(config)?,
        canary_files: config.escape.canary_files,
        retention: retention(config)?,
        file_call_timeout: Duration::from_secs(worker.file_call_timeout_seconds.get()),
        min_free_memory_bytes: worker.min_free_memory_mb.saturating_mul(MIB),
        disk_reserve_bytes: worker.disk_reserve_mb.map(|reserve| reserve.saturating_mul(MIB)),
        required_mode: config.sandbox.mode,
        uids,
        secret_key: secret_key(config)?,
        connections: connections::worker(config),
        open_files: connections::open_files(),
        cgroup_parent: backends::cgroup_parent(config),
        egress: egress(config)?,
        disk: worker.disk,
    })
}

/// Whether the worker may give sessions their own users. Only root can change file owners.
pub(crate) fn separates_users() -> bool {
    rustix::process::geteuid().is_root()
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

/// Returns the host name as a valid id: `[a-z0-9-]`.
pub(crate) fn host_id() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let id: String = name
        .trim()
        .chars()
        .map(|c| c.to_ascii_lowercase())
        .map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' })
        .take(MAX_HOST_ID_CHARS)
        .collect();
    if id.is_empty() { "worker".to_owned() } else { id }
}

fn default_slots() -> usize {
    SLOTS_PER_CORE * std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

fn worker_id(id: &str) -> Result<WorkerId> {
    id.parse().with_context(|| format!("worker.id: {id:?} is not [a-z0-9-]{{1,63}}"))
}

fn listen(text: &str) -> Result<Listen> {
    match text.strip_prefix("unix:") {
        Some(path) if path.starts_with('/') => Ok(Listen::Unix(PathBuf::from(path))),
        Some(_) => bail!("worker.listen: the path in {text:?} is not absolute"),
        None => text
            .parse()
            .map(Listen::Tcp)
            .with_context(|| format!("worker.listen: {text:?} is neither IP:PORT nor unix:/PATH")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_call_timeout_is_configured() {
        let timeout = |variables: &[(&str, &str)]| {
            let loaded = crate::config::tests::loaded(None, &[], variables).unwrap();
            let options = worker(&loaded.config, "w", Path::new("/s"), None, super::super::SEPARATE);
            options.unwrap().file_call_timeout
        };
        assert_eq!(timeout(&[]), Duration::from_secs(60));
        let variable = ("CODELIA_WORKER_FILE_CALL_TIMEOUT_SECONDS", "7");
        assert_eq!(timeout(&[variable]), Duration::from_secs(7));
    }

    #[test]
    fn worker_listens_on_socket_or_address() {
        assert!(matches!(listen("unix:/run/w.sock"), Ok(Listen::Unix(_))));
        assert!(matches!(listen("0.0.0.0:7400"), Ok(Listen::Tcp(_))));
        assert!(listen("unix:w.sock").unwrap_err().to_string().contains("worker.listen"));
        assert!(listen("somewhere").unwrap_err().to_string().contains("worker.listen"));
    }
}
