//! The machine and user that this process runs on and as.

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

/// Leaves room for a suffix: ids have at most 63 characters.
const MAX_HOST_ID_CHARS: usize = 48;
/// Fewer descriptors leave too few for the process's own work: sandboxes, files and the database.
const MIN_OPEN_FILES: u64 = 256;
/// More descriptors help no one, and some programs look at each of them.
const MAX_OPEN_FILES: u64 = 1024 * 1024;

/// Raises the soft limit of open files to the hard limit. Commands get the limit of their plan.
pub(crate) fn raise_open_files() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(u64::MAX).min(MAX_OPEN_FILES).max(open_files());
    ensure!(
        wanted >= MIN_OPEN_FILES,
        "the process may open only {wanted} files: raise the limit (ulimit -n) to at least {MIN_OPEN_FILES}"
    );
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit })
        .with_context(|| format!("cannot raise the limit of open files to {wanted}"))
}

/// How many files the process may open.
pub(crate) fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Whether the worker may give sessions their own users. Only root can change file owners.
pub(crate) fn separates_users() -> bool {
    geteuid().is_root()
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
