//! Derives the outcome from the exit status of the command and what was counted while it ran.

use codelia_init::ExitStatus;
use codelia_types::{LostReason, Outcome};

const SIGKILL: i32 = 9;
const SIGXCPU: i32 = 24;
const SIGXFSZ: i32 = 25;

/// A shell adds this to the signal that ended its command.
const SHELL_SIGNAL_BASE: i32 = 128;

/// The status of a command whose real status is unknown.
pub(crate) const KILLED: ExitStatus = ExitStatus::Signaled(SIGKILL);

/// Why the sandbox killed a command by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KillReason {
    /// Too many blocked system calls.
    Violations,
    /// The CPU time limit was exceeded.
    CpuTime,
    /// The memory limit was exceeded, and the kernel did not end the command for it.
    Memory,
    /// The limit of processes was exceeded, and the kernel did not prevent it.
    Pids,
    /// The worker did not call `keep_alive` in time.
    KeepAliveExpired,
}

/// Observations that were made while the command ran.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Observations {
    pub(crate) kill_reason: Option<KillReason>,
    pub(crate) oom_kills: u64,
    pub(crate) pids_refused: u64,
    pub(crate) cpu_time_exceeded: bool,
}

/// A limit is the outcome only if it ended the command. A command that continued, whatever happened
/// to its children, has the outcome of its own exit status.
pub(crate) fn outcome(status: ExitStatus, observed: Observations) -> Outcome {
    match observed.kill_reason {
        Some(KillReason::Violations) => return Outcome::Violation("SYSCALL_BLOCKED".to_owned()),
        Some(KillReason::CpuTime) => return Outcome::Limit("cpu_time".to_owned()),
        Some(KillReason::Memory) => return Outcome::Oom,
        Some(KillReason::Pids) => return Outcome::Limit("pids".to_owned()),
        Some(KillReason::KeepAliveExpired) => return Outcome::Lost(LostReason::WorkerLost),
        None => {}
    }
    let ended_by = |signal| {
        status == ExitStatus::Signaled(signal)
            || status == ExitStatus::Exited(SHELL_SIGNAL_BASE + signal)
    };
    if ended_by(SIGKILL) && observed.oom_kills > 0 {
        return Outcome::Oom;
    }
    let limits = [
        ("cpu_time", observed.cpu_time_exceeded && (ended_by(SIGXCPU) || ended_by(SIGKILL))),
        ("file_bytes", ended_by(SIGXFSZ)),
        ("pids", observed.pids_refused > 0 && status != ExitStatus::Exited(0)),
    ];
    match (limits.into_iter().find(|(_, ended)| *ended), status) {
        (Some((resource, _)), _) => Outcome::Limit(resource.to_owned()),
        (None, ExitStatus::Signaled(signal)) => Outcome::Signaled(signal),
        (None, ExitStatus::Exited(code)) => Outcome::Exited(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_killed_command_is_oom() {
        let observed = Observations { oom_kills: 1, ..Observations::default() };
        assert_eq!(outcome(ExitStatus::Signaled(SIGKILL), observed), Outcome::Oom);
        assert_eq!(outcome(ExitStatus::Exited(137), observed), Outcome::Oom);
        assert_eq!(
            outcome(ExitStatus::Signaled(SIGKILL), Observations::default()),
            Outcome::Signaled(9)
        );
        assert_eq!(outcome(ExitStatus::Exited(0), observed), Outcome::Exited(0));
        assert_eq!(outcome(ExitStatus::Signaled(15), observed), Outcome::Signaled(15));
    }

    #[test]
    fn refused_fork_counts_only_if_the_command_failed() {
        let observed = Observations { pids_refused: 3, ..Observations::default() };
        assert_eq!(outcome(ExitStatus::Exited(2), observed), Outcome::Limit("pids".into()));
        assert_eq!(outcome(ExitStatus::Exited(0), observed), Outcome::Exited(0));
        assert_eq!(outcome(ExitStatus::Exited(2), Observations::default()), Outcome::Exited(2));
    }

    #[test]
    fn sigxcpu_counts_only_if_cpu_time_was_exceeded() {
        let observed = Observations { cpu_time_exceeded: true, ..Observations::default() };
        let limit = Outcome::Limit("cpu_time".into());
        assert_eq!(outcome(ExitStatus::Signaled(SIGXCPU), observed), limit);
        assert_eq!(outcome(ExitStatus::Exited(152), observed), limit);
        assert_eq!(
            outcome(ExitStatus::Signaled(SIGXCPU), Observations::default()),
            Outcome::Signaled(24)
        );
        assert_eq!(outcome(ExitStatus::Exited(1), observed), Outcome::Exited(1));
    }

    #[test]
    fn kill_reason_overrides_the_exit_status() {
        for status in [ExitStatus::Signaled(SIGKILL), ExitStatus::Exited(0)] {
            let killed = |reason| Observations {
                kill_reason: Some(reason),
                oom_kills: 1,
                ..Observations::default()
            };
            assert_eq!(
                outcome(status, killed(KillReason::CpuTime)),
                Outcome::Limit("cpu_time".into())
            );
            let violation = Outcome::Violation("SYSCALL_BLOCKED".into());
            assert_eq!(outcome(status, killed(KillReason::Violations)), violation);
        }
    }
}
