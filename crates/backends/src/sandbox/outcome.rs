//! From how the command's process ended, and what was counted, to the outcome.

use codelia_init::ExitStatus;
use codelia_types::Outcome;

const SIGKILL: i32 = 9;
const SIGXCPU: i32 = 24;
const SIGXFSZ: i32 = 25;

/// What a shell adds to the signal that ended its command.
const IN_SHELL: i32 = 128;

/// The status of a command of which nobody can tell more.
pub(crate) const KILLED: ExitStatus = ExitStatus::Signaled(SIGKILL);

/// Why a backend killed a command by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It made too many calls that it may not.
    Violations,
    /// Its CPU time was used up.
    CpuTime,
    /// Nobody said in time that it may go on.
    Silence,
}

/// What was counted while it ran.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Signs {
    pub(crate) cause: Option<Cause>,
    pub(crate) oom_kills: u64,
    pub(crate) pids_refused: u64,
    pub(crate) cpu_time_used_up: bool,
}

/// A limit is the outcome only if it is what ended the command: one that lived on, whatever became of
/// its children, ended as it says.
pub(crate) fn outcome(status: ExitStatus, signs: Signs) -> Outcome {
    match signs.cause {
        Some(Cause::Violations) => return Outcome::Violation("SYSCALL_BLOCKED".to_owned()),
        Some(Cause::CpuTime) => return Outcome::Limit("cpu_time".to_owned()),
        Some(Cause::Silence) => return Outcome::Lost,
        None => {}
    }
    let ended_by =
        |signal| status == ExitStatus::Signaled(signal) || status == ExitStatus::Exited(IN_SHELL + signal);
    if ended_by(SIGKILL) && signs.oom_kills > 0 {
        return Outcome::Oom;
    }
    let limits = [
        ("cpu_time", signs.cpu_time_used_up && (ended_by(SIGXCPU) || ended_by(SIGKILL))),
        ("file_bytes", ended_by(SIGXFSZ)),
        ("pids", signs.pids_refused > 0 && status != ExitStatus::Exited(0)),
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
    fn only_a_command_that_was_killed_is_out_of_memory() {
        let signs = Signs { oom_kills: 1, ..Signs::default() };
        assert_eq!(outcome(ExitStatus::Signaled(SIGKILL), signs), Outcome::Oom);
        assert_eq!(outcome(ExitStatus::Exited(137), signs), Outcome::Oom);
        assert_eq!(outcome(ExitStatus::Signaled(SIGKILL), Signs::default()), Outcome::Signaled(9));
        assert_eq!(outcome(ExitStatus::Exited(0), signs), Outcome::Exited(0));
        assert_eq!(outcome(ExitStatus::Signaled(15), signs), Outcome::Signaled(15));
    }

    #[test]
    fn a_refused_fork_counts_only_if_the_command_failed() {
        let signs = Signs { pids_refused: 3, ..Signs::default() };
        assert_eq!(outcome(ExitStatus::Exited(2), signs), Outcome::Limit("pids".into()));
        assert_eq!(outcome(ExitStatus::Exited(0), signs), Outcome::Exited(0));
        assert_eq!(outcome(ExitStatus::Exited(2), Signs::default()), Outcome::Exited(2));
    }

    #[test]
    fn the_signal_of_the_cpu_limit_counts_only_if_the_time_is_used_up() {
        let signs = Signs { cpu_time_used_up: true, ..Signs::default() };
        assert_eq!(outcome(ExitStatus::Signaled(SIGXCPU), signs), Outcome::Limit("cpu_time".into()));
        assert_eq!(outcome(ExitStatus::Exited(152), signs), Outcome::Limit("cpu_time".into()));
        assert_eq!(outcome(ExitStatus::Signaled(SIGXCPU), Signs::default()), Outcome::Signaled(24));
        assert_eq!(outcome(ExitStatus::Exited(1), signs), Outcome::Exited(1));
    }

    #[test]
    fn what_the_command_was_killed_for_is_the_outcome_whatever_its_status() {
        for status in [ExitStatus::Signaled(SIGKILL), ExitStatus::Exited(0)] {
            let killed = |cause| Signs { cause: Some(cause), oom_kills: 1, ..Signs::default() };
            assert_eq!(outcome(status, killed(Cause::CpuTime)), Outcome::Limit("cpu_time".into()));
            let violation = Outcome::Violation("SYSCALL_BLOCKED".into());
            assert_eq!(outcome(status, killed(Cause::Violations)), violation);
        }
    }
}
