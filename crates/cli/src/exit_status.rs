//! How a run's end is told: the exit code, the word, the sentence.

use codelia_proto::v1::{Outcome, ViolationEvent, outcome::Kind};

/// The exit code of `codelia run` when it was refused or we failed.
pub(crate) const OUR_FAILURE: u8 = 125;
/// … when the run was canceled.
pub(crate) const CANCELED: u8 = 130;
const TIMED_OUT: u8 = 124;
const KILLED: u8 = 137;

/// What `codelia run` exits with.
pub(crate) fn exit_code(outcome: &Outcome) -> u8 {
    match &outcome.kind {
        // A code is one byte, as wait(2) tells it.
        Some(Kind::Exited(code)) => u8::try_from(code & 0xff).unwrap_or(OUR_FAILURE),
        Some(Kind::Signaled(signal)) => u8::try_from(128 + signal).unwrap_or(OUR_FAILURE),
        Some(Kind::TimedOut(_)) => TIMED_OUT,
        Some(Kind::Canceled(_)) => CANCELED,
        Some(Kind::Oom(_) | Kind::Limit(_) | Kind::Violation(_)) => KILLED,
        Some(Kind::Refused(_) | Kind::Lost(_)) | None => OUR_FAILURE,
    }
}

/// The word for an outcome.
pub(crate) fn word(outcome: &Outcome) -> &'static str {
    match &outcome.kind {
        Some(Kind::Exited(_)) => "exited",
        Some(Kind::Signaled(_)) => "signaled",
        Some(Kind::TimedOut(_)) => "timed_out",
        Some(Kind::Canceled(_)) => "canceled",
        Some(Kind::Oom(_)) => "oom",
        Some(Kind::Limit(_)) => "limit",
        Some(Kind::Violation(_)) => "violation",
        Some(Kind::Refused(_)) => "refused",
        Some(Kind::Lost(_)) => "lost",
        None => "unknown",
    }
}

/// What belongs to the word: the signal, the resource, the rule or the reason.
pub(crate) fn detail(outcome: &Outcome) -> Option<String> {
    match &outcome.kind {
        Some(Kind::Signaled(signal)) => Some(signal.to_string()),
        Some(Kind::Limit(what) | Kind::Violation(what)) => Some(what.clone()),
        Some(Kind::Refused(refused)) => Some(format!("{}: {}", refused.reason, refused.message)),
        _ => None,
    }
}

/// What people should know beside the exit code; nothing if the command ended by itself.
pub(crate) fn note(outcome: &Outcome) -> Option<String> {
    match &outcome.kind {
        Some(Kind::Exited(_) | Kind::Signaled(_)) => None,
        Some(Kind::TimedOut(_)) => Some("its time was over".to_owned()),
        Some(Kind::Canceled(_)) => Some("it was canceled".to_owned()),
        Some(Kind::Oom(_)) => Some("it used up its memory".to_owned()),
        Some(Kind::Limit(resource)) => Some(format!("it used up its {resource}")),
        Some(Kind::Violation(rule)) => Some(format!("it broke the rule {rule}")),
        Some(Kind::Refused(refused)) => Some(format!("{} ({})", refused.message, refused.reason)),
        Some(Kind::Lost(_)) => Some("its worker died after it had started".to_owned()),
        None => Some("it ended without an outcome".to_owned()),
    }
}

/// What a command tried against its policy.
pub(crate) fn attempt(violation: &ViolationEvent) -> String {
    let args: Vec<String> = violation.args.iter().map(|arg| format!("{arg:#x}")).collect();
    format!("{}: {}({})", violation.kind, violation.syscall, args.join(", "))
}

#[cfg(test)]
mod tests {
    use codelia_proto::v1;

    use super::*;

    #[test]
    fn every_outcome_has_the_exit_code_of_the_design() {
        let refused =
            v1::Refused { reason: "EXECUTABLE_NOT_FOUND".into(), message: "no such program".into() };
        for (kind, code) in [
            (Kind::Exited(0), 0),
            (Kind::Exited(7), 7),
            (Kind::Exited(255), 255),
            (Kind::Signaled(9), 137),
            (Kind::Signaled(15), 143),
            (Kind::TimedOut(v1::TimedOut {}), 124),
            (Kind::Canceled(v1::Canceled {}), 130),
            (Kind::Oom(v1::OutOfMemory {}), 137),
            (Kind::Limit("disk".into()), 137),
            (Kind::Violation("syscall".into()), 137),
            (Kind::Refused(refused), 125),
            (Kind::Lost(v1::Lost {}), 125),
        ] {
            assert_eq!(exit_code(&Outcome { kind: Some(kind.clone()) }), code, "{kind:?}");
        }
        assert_eq!(exit_code(&Outcome { kind: None }), 125);
    }

    #[test]
    fn an_attempt_is_told_with_the_call_and_its_arguments() {
        let violation = ViolationEvent {
            kind: "SYSCALL_BLOCKED".into(),
            syscall: "socket".into(),
            number: 41,
            args: vec![38, 5],
            count: 1,
        };
        assert_eq!(attempt(&violation), "SYSCALL_BLOCKED: socket(0x26, 0x5)");
    }
}
