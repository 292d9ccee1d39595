//! Teardown of a sandbox: end the process, remove the control group, count what is left.

use std::{os::fd::OwnedFd, thread, time::Duration};

use codelia_sys::{cgroup::Group, fd};
use codelia_types::Receipt;
use tokio::time::timeout;

use crate::sandbox::{
    descriptors,
    process::{SandboxProcess, count},
};

/// How long the sandbox's process may take to end, on request and again after it was killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Attempts to remove a group, and the delay between them: its last process may still be exiting.
const MAX_REMOVALS: u32 = 300;
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// As [`MAX_REMOVALS`] without a runtime, where the thread blocks.
const MAX_BLOCKING_REMOVALS: u32 = 200;
const BLOCKING_RETRY_DELAY: Duration = Duration::from_millis(1);

/// Checks of a socket before it counts as left open.
const MAX_SOCKET_CHECKS: u32 = 50;

/// Things that must be removed when a sandbox ends.
#[derive(Debug)]
pub(super) struct Cleanup {
    pub(super) process: Box<dyn SandboxProcess>,
    pub(super) group: Option<Group>,
}

impl Cleanup {
    /// Waits for the end that the shutdown of the control socket has ordered, kills what does not
    /// end, removes everything. `socket` is our end of the control socket.
    pub(super) async fn run(mut self, socket: Option<OwnedFd>) -> Receipt {
        descriptors::available().await;
        let exited = match timeout(EXIT_TIMEOUT, self.process.wait()).await {
            Ok(exited) => exited,
            Err(_) => {
                self.kill().await;
                false
            }
        };
        descriptors::available().await;
        let mut receipt = match self.group.take() {
            Some(group) => remove_group(group).await,
            // Init exits only once it has no descendants. If it was killed, nothing is known.
            None => Receipt { processes: u32::from(!exited), ..Receipt::default() },
        };
        // Last, because killed processes may have needed until now to die.
        let left = self.process.remove().await;
        receipt.processes += left.processes;
        receipt.mounts += left.mounts;
        receipt.cgroups += left.cgroups;
        receipt.directories += left.directories;
        let is_closed = match socket {
            Some(socket) => is_peer_closed_soon(&socket).await,
            None => false,
        };
        receipt.sockets += left.sockets + u32::from(!is_closed);
        if !receipt.is_clean() {
            tracing::error!(%receipt, "sandbox left something behind");
        }
        receipt
    }

    pub(super) async fn kill(&mut self) {
        self.process.kill().await;
        if let Some(group) = &self.group {
            log_failure(group.lift_cpu_limit());
            log_failure(group.kill_all());
        }
        if timeout(EXIT_TIMEOUT, self.process.wait()).await.is_err() {
            tracing::error!("codelia-init survived SIGKILL");
        }
    }
}

/// Blocking cleanup for when the runtime is gone or shutting down.
impl Drop for Cleanup {
    fn drop(&mut self) {
        let Some(mut group) = self.group.take() else { return };
        for _ in 0..MAX_BLOCKING_REMOVALS {
            log_failure(group.kill_all());
            if group.remove().is_ok() {
                return;
            }
            thread::sleep(BLOCKING_RETRY_DELAY);
        }
        let directories = group.directories().map(|directory| directory.to_string_lossy());
        tracing::error!(
            directories = directories.collect::<Vec<_>>().join(" "),
            "control group not removed"
        );
    }
}

/// Whether every copy of the other end gets closed. A program that is being started holds copies of
/// all our descriptors until its `execve`. A socket that cannot be checked counts as open.
async fn is_peer_closed_soon(socket: &OwnedFd) -> bool {
    for _ in 0..MAX_SOCKET_CHECKS {
        if fd::is_peer_closed(socket).unwrap_or(false) {
            return true;
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
    false
}

/// Kills what is left in a group and removes it.
pub(crate) async fn remove_group(mut group: Group) -> Receipt {
    for _ in 0..MAX_REMOVALS {
        match group.remove() {
            Ok(()) => return Receipt::default(),
            Err(error) => tracing::debug!(%error, "control group not removed yet"),
        }
        log_failure(group.lift_cpu_limit());
        log_failure(group.kill_all());
        tokio::time::sleep(RETRY_DELAY).await;
    }
    Receipt {
        // If the list cannot be read, assume that a process is left.
        processes: group.processes().map_or(1, |processes| count(processes.len())),
        cgroups: count(group.directories().count()),
        ..Receipt::default()
    }
}

fn log_failure(result: Result<(), codelia_sys::Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, "control group not killed");
    }
}
