//! How a run ended: exit code, outcome name and message.

use std::time::Duration;

use codelia_proto::{
    duration_from_proto,
    json::to_dynamic,
    v1::{Limits, NearLimitEvent, NetworkMode, Outcome, Run, ViolationEvent, outcome::Kind},
};
use codelia_types::{LostReason, Reason};

use crate::units;

/// Exit code of `codelia run` if the command succeeded and output that was redirected is
/// incomplete.
pub const INCOMPLETE: u8 = 123;
/// Exit code of `codelia run` if the run was refused or codelia failed.
pub const FAILURE: u8 = 125;
/// The program was found but cannot be executed, as in shells.
const NOT_EXECUTABLE: u8 = 126;
/// The program was not found, as in shells.
const NOT_FOUND: u8 = 127;
/// Exit code of `codelia run` if the run was canceled.
pub const CANCELED: u8 = 130;
const TIMED_OUT: u8 = 124;
const KILLED: u8 = 137;

/// Returns the exit code of `codelia run` for an outcome.
pub fn exit_code(outcome: &Outcome) -> u8 {
    match &outcome.kind {
        // wait(2) reports one byte.
        Some(Kind::Exited(code)) => u8::try_from(code & 0xff).unwrap_or(FAILURE),
        Some(Kind::Signaled(signal)) => u8::try_from(128 + signal).unwrap_or(FAILURE),
        Some(Kind::TimedOut(_)) => TIMED_OUT,
        Some(Kind::Canceled(_)) => CANCELED,
        Some(Kind::Oom(_) | Kind::Limit(_) | Kind::Violation(_)) => KILLED,
        Some(Kind::Refused(refused)) if refused.reason == Reason::ExecutableNotFound.as_str() => {
            NOT_FOUND
        }
        Some(Kind::Refused(refused))
            if refused.reason == Reason::ExecutableNotPermitted.as_str() =>
        {
            NOT_EXECUTABLE
        }
        Some(Kind::Refused(_) | Kind::Lost(_)) | None => FAILURE,
    }
}

/// Whether an exit code says that the command was not executed.
pub fn is_failure(code: u8) -> bool {
    matches!(code, FAILURE | NOT_EXECUTABLE | NOT_FOUND)
}

/// Returns the name of an outcome, such as `timed_out`.
pub fn name(outcome: &Outcome) -> String {
    let outcome = to_dynamic(outcome).ok();
    let kind = outcome.as_ref().and_then(|outcome| outcome.fields().next());
    kind.map_or_else(|| "unknown".to_owned(), |(kind, _)| kind.name().to_owned())
}

/// How to get a network, if the command failed without one and looks as if it needed one. It is a
/// guess for the reader, and changes nothing else.
pub fn network_hint(run: &Run) -> Option<&'static str> {
    let failed = matches!(run.outcome.as_ref()?.kind, Some(Kind::Exited(code)) if code != 0);
    let argv = &run.command.as_ref()?.argv;
    (failed && run.network() == NetworkMode::None && codelia_policy::predicts_network(argv)).then_some(
        "the command seems to need the network, and had none; use --allow-host HOST, or --allow-host \
         set:registries",
    )
}

/// Explains why a run ended; `None` if the command exited or a signal killed it.
pub fn message(run: &Run) -> Option<String> {
    let limits = run.limits.unwrap_or_default();
    let text = match run.outcome.as_ref().and_then(|outcome| outcome.kind.as_ref()) {
        Some(Kind::Exited(_) | Kind::Signaled(_)) => return None,
        Some(Kind::TimedOut(_)) => timed_out(&limits),
        Some(Kind::Canceled(canceled)) if !canceled.reason.is_empty() => {
            format!("canceled: {}", canceled.reason)
        }
        Some(Kind::Canceled(_)) => "canceled".to_owned(),
        Some(Kind::Oom(_)) => format!("killed: out of memory{}", limit(size(limits.memory_bytes))),
        Some(Kind::Limit(limit)) => limit_exceeded(&limit.resource, &limits),
        Some(Kind::Violation(violation)) => format!("killed: policy violation {}", violation.rule),
        Some(Kind::Refused(refused)) => format!("{} ({})", refused.message, refused.reason),
        Some(Kind::Lost(lost)) if lost.reason == LostReason::DrainDeadline.as_str() => {
            "worker shut down before the command ended (allow restarts with --retries)".to_owned()
        }
        Some(Kind::Lost(_)) => {
            "worker died while the command was running (allow restarts with --retries)".to_owned()
        }
        None => "run ended without an outcome".to_owned(),
    };
    Some(text)
}

/// Explains that output is missing.
pub fn incomplete_message(run: &Run) -> String {
    let stored = size(Some(run.output_bytes)).unwrap_or_default();
    format!(
        "output incomplete: only the first {stored} were stored (store more with --output-limit)"
    )
}

fn timed_out(limits: &Limits) -> String {
    let after =
        time(limits.timeout.as_ref()).map(|timeout| format!(" after {}", units::duration(timeout)));
    format!(
        "timed out{} (raise with --timeout; an operator raises the maximum, limits.max_timeout)",
        after.unwrap_or_default()
    )
}

fn limit_exceeded(resource: &str, limits: &Limits) -> String {
    let (problem, value) = match resource {
        "pids" => ("too many processes", limits.pids.map(|count| count.to_string())),
        "cpu_time" => ("out of CPU time", time(limits.cpu_time.as_ref()).map(units::duration)),
        "file_bytes" => ("file too large", size(limits.file_bytes)),
        "disk_bytes" => ("session directory is full", size(limits.disk_bytes)),
        "inodes" => ("too many files in the session", limits.inodes.map(|count| count.to_string())),
        "volume_bytes" => {
            return "killed: a volume is full (`codelia volume ls` shows its maximum)".to_owned();
        }
        other => return format!("killed: limit {other} exceeded"),
    };
    format!("killed: {problem}{}", limit(value))
}

fn limit(value: Option<String>) -> String {
    value.map(|value| format!(" (limit {value})")).unwrap_or_default()
}

fn size(bytes: Option<i64>) -> Option<String> {
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).map(units::bytes)
}

fn time(duration: Option<&prost_types::Duration>) -> Option<Duration> {
    duration.and_then(|duration| duration_from_proto(duration).ok())
}

/// Describes a system call that the policy blocked.
pub fn blocked_call(violation: &ViolationEvent) -> String {
    let args: Vec<String> = violation.args.iter().map(|arg| format!("{arg:#x}")).collect();
    let path =
        if violation.path.is_empty() { String::new() } else { format!(" {}", violation.path) };
    format!("{}: {}({}){path}", violation.kind, violation.syscall, args.join(", "))
}

/// Says that a run is near a limit. `None` for output: its caller gets all of it.
pub fn near_limit(near: &NearLimitEvent) -> Option<String> {
    let (resource, show): (&str, fn(u64) -> String) = match near.resource.as_str() {
        "memory_bytes" => ("memory", units::bytes),
        "pids" => ("the number of processes", |count| count.to_string()),
        "cpu_time" => ("CPU time", |millis| units::duration(Duration::from_millis(millis))),
        _ => return None,
    };
    let used = show(near.used.unsigned_abs());
    let limit = show(near.limit.unsigned_abs());
    Some(format!("{resource} is near the limit: {used} of {limit}"))
}

#[cfg(test)]
mod tests {
    use codelia_proto::{duration_to_proto, v1};

    use super::*;

    fn exceeded(resource: &str) -> Kind {
        Kind::Limit(v1::LimitExceeded { resource: resource.to_owned() })
    }

    fn message_of(kind: Kind, limits: Limits) -> Option<String> {
        let outcome = Some(Outcome { kind: Some(kind) });
        message(&Run { outcome, limits: Some(limits), ..Run::default() })
    }

    #[test]
    fn outcomes_map_to_documented_exit_codes() {
        let refused = |reason: &str| {
            Kind::Refused(v1::Refused { reason: reason.into(), message: String::new() })
        };
        for (kind, code) in [
            (Kind::Exited(0), 0),
            (Kind::Exited(7), 7),
            (Kind::Exited(255), 255),
            (Kind::Signaled(9), 137),
            (Kind::Signaled(15), 143),
            (Kind::TimedOut(v1::TimedOut {}), 124),
            (Kind::Canceled(v1::Canceled::default()), 130),
            (Kind::Oom(v1::OutOfMemory {}), 137),
            (exceeded("disk"), 137),
            (Kind::Violation(v1::PolicyViolation { rule: "SYSCALL_BLOCKED".into() }), 137),
            (refused("EXECUTABLE_NOT_FOUND"), 127),
            (refused("EXECUTABLE_NOT_PERMITTED"), 126),
            (refused("WORKING_DIRECTORY_INVALID"), 125),
            (Kind::Lost(v1::Lost::default()), 125),
        ] {
            assert_eq!(exit_code(&Outcome { kind: Some(kind.clone()) }), code, "{kind:?}");
        }
        assert_eq!(exit_code(&Outcome { kind: None }), 125);
    }

    #[test]
    fn outcomes_have_names() {
        let named = |kind| name(&Outcome { kind });
        assert_eq!(named(Some(Kind::Exited(0))), "exited");
        assert_eq!(named(Some(Kind::TimedOut(v1::TimedOut {}))), "timed_out");
        assert_eq!(named(Some(Kind::Lost(v1::Lost::default()))), "lost");
        assert_eq!(named(None), "unknown");
    }

    #[test]
    fn failed_command_without_network_gets_a_hint() {
        let run = |argv: &[&str], code, network: NetworkMode| Run {
            outcome: Some(Outcome { kind: Some(Kind::Exited(code)) }),
            command: Some(v1::CommandSpec {
                argv: argv.iter().map(|&word| word.to_owned()).collect(),
                ..Default::default()
            }),
            network: network.into(),
            ..Run::default()
        };
        let pip = &["pip", "install", "requests"][..];
        assert!(
            network_hint(&run(pip, 1, NetworkMode::None))
                .is_some_and(|hint| hint.contains("--allow-host"))
        );
        for (argv, code, network) in [
            (pip, 0, NetworkMode::None),
            (pip, 1, NetworkMode::Proxy),
            (pip, 1, NetworkMode::Unspecified),
            (&["false"], 1, NetworkMode::None),
        ] {
            let other = run(argv, code, network);
            assert_eq!(network_hint(&other), None, "{argv:?} {code} {network:?}");
        }
        // The hint changes neither the exit code nor the message.
        let hinted = run(pip, 7, NetworkMode::None);
        assert_eq!(exit_code(&hinted.outcome.clone().unwrap()), 7);
        assert_eq!(message(&hinted), None);
    }

    #[test]
    fn messages_include_the_limit() {
        let seconds = |seconds| Some(duration_to_proto(Duration::from_secs(seconds)));
        let limits = Limits {
            timeout: seconds(120),
            memory_bytes: Some(50 << 20),
            pids: Some(3),
            cpu_time: seconds(5),
            file_bytes: Some(1 << 30),
            ..Limits::default()
        };
        for (kind, expected) in [
            (
                Kind::TimedOut(v1::TimedOut {}),
                "timed out after 2m (raise with --timeout; an operator raises the maximum, \
                 limits.max_timeout)",
            ),
            (Kind::Oom(v1::OutOfMemory {}), "killed: out of memory (limit 50 MiB)"),
            (exceeded("pids"), "killed: too many processes (limit 3)"),
            (exceeded("cpu_time"), "killed: out of CPU time (limit 5s)"),
            (exceeded("file_bytes"), "killed: file too large (limit 1 GiB)"),
        ] {
            assert_eq!(message_of(kind, limits).as_deref(), Some(expected));
        }
        assert_eq!(message_of(Kind::Exited(1), limits), None);
    }

    #[test]
    fn message_without_limits_omits_them() {
        let outcome = Some(Outcome { kind: Some(Kind::Oom(v1::OutOfMemory {})) });
        let run = Run { outcome, ..Run::default() };
        assert_eq!(message(&run).as_deref(), Some("killed: out of memory"));
    }

    #[test]
    fn incomplete_message_has_the_stored_size() {
        let run = Run { output_bytes: 10 << 20, ..Run::default() };
        let expected =
            "output incomplete: only the first 10 MiB were stored (store more with --output-limit)";
        assert_eq!(incomplete_message(&run), expected);
    }

    #[test]
    fn near_limit_names_use_and_limit() {
        for (resource, used, limit, message) in [
            (
                "memory_bytes",
                50 << 20,
                60 << 20,
                Some("memory is near the limit: 50 MiB of 60 MiB"),
            ),
            ("pids", 80, 100, Some("the number of processes is near the limit: 80 of 100")),
            ("cpu_time", 96_500, 120_000, Some("CPU time is near the limit: 1m 36s 500ms of 2m")),
            ("output_bytes", 8, 10, None),
            ("later_word", 8, 10, None),
        ] {
            let near = NearLimitEvent { resource: resource.into(), used, limit };
            assert_eq!(near_limit(&near).as_deref(), message);
        }
    }

    #[test]
    fn blocked_call_shows_its_arguments() {
        let violation = ViolationEvent {
            kind: "SYSCALL_BLOCKED".into(),
            syscall: "socket".into(),
            number: 41,
            args: vec![38, 5],
            count: 1,
            path: String::new(),
        };
        assert_eq!(blocked_call(&violation), "SYSCALL_BLOCKED: socket(0x26, 0x5)");
        let exec =
            ViolationEvent { syscall: "execve".into(), path: "/usr/bin/id".into(), ..violation };
        assert_eq!(blocked_call(&exec), "SYSCALL_BLOCKED: execve(0x26, 0x5) /usr/bin/id");
    }
}
