//! Signs that a command tries to leave its sandbox: how severe each is, and what is done about it.
//!
//! Everything that is a sign was blocked already. The response is the operator's choice.

use std::{
    str::FromStr,
    sync::{Mutex, MutexGuard, PoisonError},
};

use codelia_policy::RunSpec;
use codelia_store::{EventBody, EventKind, OutputChunk};
use codelia_telemetry::metrics;
use codelia_types::{NetworkUsage, Outcome, Violation};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// Indicators that are kept of a run.
const MAX_INDICATORS: usize = 20;
/// Names of variables, and bytes of each.
const MAX_NAMES: usize = 100;
const MAX_NAME: usize = 100;
/// Bytes of the last output.
const MAX_TAIL: usize = 2048;
/// The word of the outcome.
const ESCAPE_ATTEMPT: &str = "ESCAPE_ATTEMPT";

/// Calls that no sandboxed program needs, and that an escape does.
const DANGEROUS: [&str; 24] = [
    "ptrace",
    "kexec_load",
    "kexec_file_load",
    "open_by_handle_at",
    "perf_event_open",
    "bpf",
    "userfaultfd",
    "io_uring_setup",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "unshare",
    "setns",
    "clone",
    "clone3",
    "init_module",
    "finit_module",
    "delete_module",
    "move_mount",
    "open_tree",
    "fsopen",
    "fsmount",
    "keyctl",
];

/// How severe an indicator is, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    /// An unusual call that was blocked.
    Low,
    /// A connection attempt that does not go through the proxy.
    High,
    /// A dangerous call, or a program that may not be executed.
    Critical,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::High => "high",
            Self::Critical => "critical",
        }
    }
}

/// What is done about an indicator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EscapeResponse {
    /// End the run at once.
    pub terminate: bool,
    /// Quarantine the tool that the run names.
    pub quarantine_tool: bool,
    /// Record an event, and tell the webhook if there is one.
    pub alert: bool,
}

/// A word that is not a response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown response {0:?} (expected none, or some of terminate, quarantine_tool, alert, with commas)")]
pub struct UnknownResponse(String);

impl FromStr for EscapeResponse {
    type Err = UnknownResponse;

    fn from_str(text: &str) -> Result<Self, UnknownResponse> {
        let mut response = Self::default();
        for word in text.split(',').map(str::trim) {
            match word {
                "none" | "" => {}
                "terminate" => response.terminate = true,
                "quarantine_tool" => response.quarantine_tool = true,
                "alert" => response.alert = true,
                other => return Err(UnknownResponse(other.to_owned())),
            }
        }
        Ok(response)
    }
}

/// The responses by severity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EscapeOptions {
    /// To an unusual call that was blocked.
    pub low: EscapeResponse,
    /// To connection attempts that do not go through the proxy.
    pub high: EscapeResponse,
    /// To a dangerous call, or an exec that is not allowed.
    pub critical: EscapeResponse,
    /// Whether the installation has a webhook.
    pub webhook: bool,
}

impl EscapeOptions {
    fn response(&self, severity: Severity) -> EscapeResponse {
        match severity {
            Severity::Low => self.low,
            Severity::High => self.high,
            Severity::Critical => self.critical,
        }
    }
}

/// A sign of an attempt to escape.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Indicator {
    kind: &'static str,
    severity: Severity,
    description: String,
}

impl Indicator {
    fn of_call(violation: &Violation) -> Self {
        let (call, arguments) = (&violation.syscall, violation.display_args());
        let (kind, severity, what) = match call.as_str() {
            "execve" | "execveat" => ("PROCESS", Severity::Critical, "unauthorized exec"),
            call if DANGEROUS.contains(&call) => ("SYSCALL", Severity::Critical, "dangerous system call"),
            _ => ("SYSCALL", Severity::Low, "blocked system call"),
        };
        Self { kind, severity, description: format!("{what}: {call}({arguments})") }
    }

    fn of_network(attempts: u64) -> Self {
        let description = format!("{attempts} connection attempts past the proxy");
        Self { kind: "NETWORK", severity: Severity::High, description }
    }
}

#[derive(Debug, Default)]
struct Seen {
    indicators: Vec<Indicator>,
    response: EscapeResponse,
}

/// What one run did, and what is to be done about it.
#[derive(Debug, Default)]
pub(crate) struct EscapeLog {
    seen: Mutex<Seen>,
    /// Cancelled when the run must end at once.
    pub(crate) terminate: CancellationToken,
}

impl EscapeLog {
    /// A system call was blocked.
    pub(crate) fn call(&self, options: &EscapeOptions, violation: &Violation) {
        self.add(options, Indicator::of_call(violation));
    }

    /// What the run did in the network, at its end.
    pub(crate) fn network(&self, options: &EscapeOptions, usage: Option<&NetworkUsage>) {
        if let Some(usage) = usage.filter(|usage| usage.unreachable_attempts > 0) {
            self.add(options, Indicator::of_network(usage.unreachable_attempts));
        }
    }

    fn add(&self, options: &EscapeOptions, indicator: Indicator) {
        let response = options.response(indicator.severity);
        metrics().escape_indicator(indicator.kind, indicator.severity.as_str());
        if response == EscapeResponse::default() {
            return;
        }
        let mut seen = self.lock();
        if seen.indicators.len() < MAX_INDICATORS && !seen.indicators.contains(&indicator) {
            seen.indicators.push(indicator);
        }
        seen.response.terminate |= response.terminate;
        seen.response.quarantine_tool |= response.quarantine_tool;
        seen.response.alert |= response.alert;
        drop(seen);
        if response.terminate {
            self.terminate.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome of a run that must end, even if its command was faster; else `outcome`.
    pub(crate) fn outcome(&self, outcome: Outcome) -> Outcome {
        if self.terminate.is_cancelled() { Self::violation() } else { outcome }
    }

    /// The outcome of a run that was ended because of an attempt to escape.
    pub(crate) fn violation() -> Outcome {
        Outcome::Violation(ESCAPE_ATTEMPT.to_owned())
    }

    /// The events that record the attempt, with the trace. The store quarantines the tool and queues the
    /// alert with the first one.
    pub(crate) fn events(
        &self,
        options: &EscapeOptions,
        spec: &RunSpec,
        network: &[EventBody],
        tail: &[OutputChunk],
    ) -> Vec<EventBody> {
        let seen = self.lock();
        let Some(worst) = seen.indicators.iter().max_by_key(|indicator| indicator.severity) else {
            return Vec::new();
        };
        let EscapeResponse { terminate, quarantine_tool, alert } = seen.response;
        let reason = format!("{} ({})", worst.description, worst.severity.as_str());
        let tool = spec.tool.as_ref().map(|tool| tool.id.as_str());
        let body = |kind, detail| EventBody { kind, field: None, detail };
        let attempt = body(
            EventKind::EscapeAttempt,
            json!({
                "severity": worst.severity.as_str(),
                "reason": reason,
                "indicators": seen.indicators.iter().map(to_json).collect::<Vec<_>>(),
                "response": { "terminate": terminate, "quarantine_tool": quarantine_tool, "alert": alert },
                "tool": tool,
                "webhook": alert && options.webhook,
                "trace": trace(spec, network, tail),
            }),
        );
        let quarantined = tool
            .filter(|_| quarantine_tool)
            .map(|tool| body(EventKind::ToolQuarantined, json!({ "tool": tool, "reason": reason })));
        [Some(attempt), quarantined].into_iter().flatten().collect()
    }
}

fn to_json(indicator: &Indicator) -> Value {
    let Indicator { kind, severity, description } = indicator;
    json!({ "type": kind, "severity": severity.as_str(), "description": description })
}

/// What is known of the run, bounded: it is written by a command that may be hostile.
fn trace(spec: &RunSpec, network: &[EventBody], tail: &[OutputChunk]) -> Value {
    let command = &spec.command;
    let short = |text: &String| text[..text.floor_char_boundary(MAX_NAME)].to_owned();
    let names = command.env.keys().chain(&command.secret_env_names).take(MAX_NAMES).map(short);
    let connections = network.iter().take(MAX_INDICATORS).map(|event| &event.detail);
    let output: Vec<u8> = tail.iter().flat_map(|chunk| chunk.data.iter().copied()).collect();
    let output = &output[output.len().saturating_sub(MAX_TAIL)..];
    json!({
        "program": command.argv.first().map(short),
        "working_directory": short(&command.working_directory),
        "environment_names": names.collect::<Vec<_>>(),
        "connections": connections.collect::<Vec<_>>(),
        // The store takes no null characters.
        "last_output": String::from_utf8_lossy(output).replace('\0', "\u{fffd}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked(syscall: &str) -> Violation {
        Violation { kind: "SYSCALL_BLOCKED".into(), syscall: syscall.into(), nr: 1, args: [7; 6] }
    }

    fn options(critical: &str) -> EscapeOptions {
        EscapeOptions { critical: critical.parse().unwrap(), webhook: true, ..EscapeOptions::default() }
    }

    #[test]
    fn responses_are_words_with_commas() {
        let all = EscapeResponse { terminate: true, quarantine_tool: true, alert: true };
        assert_eq!("terminate, quarantine_tool,alert".parse(), Ok(all));
        assert_eq!("none".parse(), Ok(EscapeResponse::default()));
        assert!("terminate,ignore".parse::<EscapeResponse>().is_err());
    }

    #[test]
    fn severity_decides_the_response() {
        let (log, options) = (EscapeLog::default(), options("terminate,alert"));
        log.call(&options, &blocked("sysfs"));
        assert!(
            log.lock().indicators.is_empty() && !log.terminate.is_cancelled(),
            "nothing configured for low"
        );
        for call in ["mount", "execve"] {
            let log = EscapeLog::default();
            log.call(&options, &blocked(call));
            assert!(log.terminate.is_cancelled(), "{call}");
            assert_eq!(log.outcome(Outcome::Exited(0)), EscapeLog::violation());
        }
        log.network(&options, Some(&NetworkUsage { unreachable_attempts: 3, ..NetworkUsage::default() }));
        assert_eq!(log.outcome(Outcome::Exited(0)), Outcome::Exited(0));
    }

    #[test]
    fn indicators_of_a_flood_are_bounded() {
        let (log, options) = (EscapeLog::default(), options("alert"));
        for number in 0..1000 {
            log.call(&options, &Violation { args: [number; 6], ..blocked("mount") });
        }
        assert_eq!(log.lock().indicators.len(), MAX_INDICATORS);
    }
}
