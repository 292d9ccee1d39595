//! Reaping children: their exit status and resource usage.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use rustix::{
    io::Errno,
    process::{Pid, WaitOptions, WaitStatus},
};
use serde::{Deserialize, Serialize};

use crate::call::from_nix;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// The process exited with this code.
    Exited(i32),
    /// This signal killed it.
    Signaled(i32),
}

/// The result of a wait for children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaped {
    /// This child ended and was reaped.
    Ended(Pid, ExitStatus),
    /// There are children, but none ended.
    StillRunning,
    /// There are no children.
    NoChildren,
}

/// Reaps a child that has ended, without blocking.
///
/// # Errors
/// As `waitpid(2)`.
pub fn try_reap() -> Result<Reaped, Errno> {
    reap_with(WaitOptions::NOHANG)
}

/// Waits until a child ends and reaps it.
///
/// # Errors
/// As `waitpid(2)`.
pub fn reap_next() -> Result<Reaped, Errno> {
    reap_with(WaitOptions::empty())
}

fn reap_with(options: WaitOptions) -> Result<Reaped, Errno> {
    loop {
        match rustix::process::wait(options) {
            Ok(Some((pid, status))) => return Ok(Reaped::Ended(pid, exit_status(status))),
            Ok(None) => return Ok(Reaped::StillRunning),
            Err(Errno::CHILD) => return Ok(Reaped::NoChildren),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// The wait never requests stopped children, so a status is an exit code or a signal.
fn exit_status(status: WaitStatus) -> ExitStatus {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => ExitStatus::Exited(code),
        (None, signal) => ExitStatus::Signaled(signal.unwrap_or_default()),
    }
}

/// The resources used by reaped children, including the descendants that they reaped themselves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildrenUsage {
    /// User and system time.
    pub cpu_time: Duration,
    /// The largest resident memory of a single process.
    pub peak_memory_bytes: u64,
    /// Bytes read from devices.
    pub read_bytes: u64,
    /// Bytes written to files.
    pub written_bytes: u64,
}

/// The unit of the kernel's I/O counters.
const BLOCK_BYTES: u64 = 512;

/// Returns the resource usage of the children reaped so far.
///
/// # Errors
/// As `getrusage(2)`.
pub fn children_usage() -> Result<ChildrenUsage, Errno> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).map_err(from_nix)?;
    let micros = |time: nix::sys::time::TimeVal| {
        u64::try_from(time.tv_sec() * 1_000_000 + time.tv_usec()).unwrap_or_default()
    };
    Ok(ChildrenUsage {
        cpu_time: Duration::from_micros(micros(usage.user_time()) + micros(usage.system_time())),
        peak_memory_bytes: u64::try_from(usage.max_rss()).unwrap_or_default() * 1024,
        read_bytes: u64::try_from(usage.block_reads()).unwrap_or_default() * BLOCK_BYTES,
        written_bytes: u64::try_from(usage.block_writes()).unwrap_or_default() * BLOCK_BYTES,
    })
}
