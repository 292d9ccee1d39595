//! Signs that a command tries to leave its sandbox: collected while it runs, with what the
//! processes of the sandbox are at the first one, and recorded with its result.
//!
//! Nearly everything that is a sign was blocked already. The response is the operator's choice.

use std::time::Duration;

use codelia_backends::{Drift, ListedProcess};
use codelia_policy::{EscapeOptions, EscapeResponse, RunSpec, Severity};
use codelia_store::{EventBody, EventKind};
use codelia_telemetry::metrics;
use codelia_types::{CountedViolation, NetworkMode, NetworkUsage, Outcome, Violation, Violations};
use parking_lot::Mutex;
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::{task::spawn_blocking, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::run::active::{ActiveRun, Phase};

/// Indicators that are kept of a run, and calls and connections in its trace.
const MAX_INDICATORS: usize = 20;
/// Names of variables, and bytes of each.
const MAX_NAMES: usize = 100;
const MAX_NAME: usize = 100;
/// Bytes of the last output.
pub(crate) const MAX_TAIL: usize = 2048;
/// Processes in the trace.
const MAX_PROCESSES: usize = 100;
/// How long the processes may take to be listed, before the run is ended.
const LIST_TIMEOUT: Duration = Duration::from_millis(500);
/// The word of the outcome.
const ESCAPE_ATTEMPT: &str = "ESCAPE_ATTEMPT";

/// A sign of an attempt to escape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Indicator {
    kind: &'static str,
    severity: Severity,
    description: String,
}

impl Indicator {
    /// A system call was blocked.
    pub(crate) fn of_call(violation: &Violation) -> Self {
        let call = &violation.syscall;
        let arguments = violation.display_args();
        let severity = Severity::of_call(call);
        let (kind, what) = match (call.as_str(), severity) {
            ("execve" | "execveat", _) => ("PROCESS", "unauthorized exec"),
            (_, Severity::Low) => ("SYSCALL", "blocked system call"),
            _ => ("SYSCALL", "dangerous system call"),
        };
        let path = violation.path.as_ref().map(|path| format!(" of {path}")).unwrap_or_default();
        Self { kind, severity, description: format!("{what}{path}: {call}({arguments})") }
    }

    /// A decoy was opened.
    pub(crate) fn of_canary(path: &str) -> Self {
        let description = format!("canary file opened: {path}");
        Self { kind: "CANARY", severity: Severity::Hostile, description }
    }

    /// A process is not where it must be.
    pub(crate) fn of_drift(drift: &Drift) -> Self {
        let Drift { host_pid, program, left } = drift;
        let description = format!("process {host_pid} ({program}) is outside its sandbox: {left}");
        Self { kind: "ISOLATION_DRIFT", severity: Severity::Hostile, description }
    }

    fn of_network(attempts: u64) -> Self {
        let description = format!("{attempts} connection attempts past the proxy");
        Self { kind: "NETWORK", severity: Severity::High, description }
    }

    fn to_json(&self, seen_at: OffsetDateTime) -> Value {
        let Self { kind, severity, description } = self;
        // The store takes no null characters.
        let description = description.replace('\0', "\u{fffd}");
        let timestamp = seen_at.unix_timestamp_nanos() / 1_000_000;
        json!({
            "type": kind,
            "severity": severity.as_str(),
            "description": description,
            "timestamp": i64::try_from(timestamp).unwrap_or(i64::MAX),
        })
    }
}

#[derive(Debug, Default)]
struct Seen {
    indicators: Vec<(Indicator, OffsetDateTime)>,
    response: EscapeResponse,
    /// The processes at the first indicator. `None` if they cannot be listed.
    processes: Option<Option<Vec<ListedProcess>>>,
}

/// Signs of one run, and what is to be done about them.
#[derive(Debug, Default)]
pub(crate) struct EscapeLog {
    seen: Mutex<Seen>,
    /// Cancelled when the run must end at once.
    pub(crate) terminate: CancellationToken,
}

/// Facts about a run when its result is stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TraceParts<'a> {
    pub(crate) spec: &'a RunSpec,
    pub(crate) network: &'a [EventBody],
    pub(crate) violations: &'a Violations,
    /// The end of its output.
    pub(crate) output: &'a [u8],
}

/// Keeps the processes of a run as they are at its first indicator, then responds.
pub(crate) async fn respond(run: &ActiveRun, options: &EscapeOptions, indicator: Indicator) {
    if run.escape.needs_processes(options, &indicator) {
        let processes = processes(run).await;
        run.escape.seen.lock().processes.get_or_insert(processes);
    }
    run.escape.add(options, indicator);
}

/// The processes of a run; `None` if they cannot be listed, or not soon enough.
async fn processes(run: &ActiveRun) -> Option<Vec<ListedProcess>> {
    let listing = async {
        // A command may be faster than the answer to its launch.
        run.phase
            .subscribe()
            .wait_for(|phase| !matches!(phase, Phase::Assigned))
            .await
            .ok()
            .map(drop)?;
        let reader = run.meter.get()?.reader.clone()?;
        spawn_blocking(move || reader.processes(MAX_PROCESSES)).await.ok()?.ok()?
    };
    timeout(LIST_TIMEOUT, listing).await.ok()?
}

impl EscapeLog {
    /// Takes what the run did in the network, at its end. Without a proxy there is none to go past.
    pub(crate) fn network(
        &self,
        options: &EscapeOptions,
        mode: Option<NetworkMode>,
        usage: Option<&NetworkUsage>,
    ) {
        let attempts = usage.map_or(0, |usage| usage.unreachable_attempts);
        if attempts > 0 && mode == Some(NetworkMode::Proxy) {
            self.add(options, Indicator::of_network(attempts));
        }
    }

    fn needs_processes(&self, options: &EscapeOptions, indicator: &Indicator) -> bool {
        !options.response(indicator.severity).is_none() && self.seen.lock().processes.is_none()
    }

    fn add(&self, options: &EscapeOptions, indicator: Indicator) {
        let response = options.response(indicator.severity);
        metrics().escape.indicator(indicator.kind, indicator.severity.as_str());
        if response.is_none() {
            return;
        }
        let mut seen = self.seen.lock();
        let is_new = seen.indicators.iter().all(|(known, _)| *known != indicator);
        if seen.indicators.len() < MAX_INDICATORS && is_new {
            seen.indicators.push((indicator, OffsetDateTime::now_utc()));
        }
        seen.response = seen.response.or(response);
        drop(seen);
        if response.terminate {
            self.terminate.cancel();
        }
    }

    /// The outcome of a run that must end, even if its command was faster; else `outcome`.
    pub(crate) fn outcome(&self, outcome: Outcome) -> Outcome {
        if self.terminate.is_cancelled() { Self::violation() } else { outcome }
    }

    /// The outcome of a run that was ended because of an attempt to escape.
    pub(crate) fn violation() -> Outcome {
        Outcome::Violation(ESCAPE_ATTEMPT.to_owned())
    }

    /// Whether the session of the run is quarantined.
    pub(crate) fn quarantines_session(&self) -> bool {
        self.seen.lock().response.quarantine_session
    }

    /// Whether there is something to record.
    pub(crate) fn is_empty(&self) -> bool {
        self.seen.lock().indicators.is_empty()
    }

    /// The events that record the attempt, with the trace. The store quarantines the tool and the
    /// session and queues the alert with the first one.
    pub(crate) fn events(&self, options: &EscapeOptions, parts: TraceParts<'_>) -> Vec<EventBody> {
        let seen = self.seen.lock();
        let Some((worst, _)) =
            seen.indicators.iter().max_by_key(|(indicator, _)| indicator.severity)
        else {
            return Vec::new();
        };
        let EscapeResponse { terminate, quarantine_tool, quarantine_session, alert } =
            seen.response;
        let reason = format!("{} ({})", worst.description, worst.severity.as_str())
            .replace('\0', "\u{fffd}");
        let tool = parts.spec.tool.as_ref().map(|tool| tool.id.as_str());
        let body = |kind, detail| EventBody { kind, field: None, detail };
        let attempt = body(
            EventKind::EscapeAttempt,
            json!({
                "severity": worst.severity.as_str(),
                "reason": reason,
                "indicators": seen.indicators.iter().map(|(it, at)| it.to_json(*at)).collect::<Vec<_>>(),
                "response": {
                    "terminate": terminate,
                    "quarantine_tool": quarantine_tool,
                    "quarantine_session": quarantine_session,
                    "alert": alert,
                },
                "tool": tool,
                "webhook": alert && options.webhook_url().is_some(),
                "trace": trace(parts, seen.processes.as_ref().and_then(Option::as_deref)),
            }),
        );
        let tool = tool.filter(|_| quarantine_tool).map(|tool| {
            body(EventKind::ToolQuarantined, json!({ "tool": tool, "reason": reason }))
        });
        let session = quarantine_session
            .then(|| body(EventKind::SessionQuarantined, json!({ "reason": reason })));
        [Some(attempt), tool, session].into_iter().flatten().collect()
    }
}

/// Text of a command or a caller, bounded. The store takes no null characters.
fn short(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_NAME)].replace('\0', "\u{fffd}")
}

/// Describes the run, bounded: the text is written by a command that may be hostile.
fn trace(parts: TraceParts<'_>, processes: Option<&[ListedProcess]>) -> Value {
    let command = &parts.spec.command;
    let names = command.env.keys().chain(&command.secret_env_names).take(MAX_NAMES);
    let connections = parts.network.iter().take(MAX_INDICATORS).map(|event| &event.detail);
    let calls = parts.violations.seen.iter().take(MAX_INDICATORS).map(call);
    let output = &parts.output[parts.output.len().saturating_sub(MAX_TAIL)..];
    json!({
        "program": command.argv.first().map(|program| short(program)),
        "working_directory": short(&command.working_directory),
        "environment_names": names.map(|name| short(name)).collect::<Vec<_>>(),
        "calls": calls.collect::<Vec<_>>(),
        "processes": processes.map(|listed| listed.iter().map(process).collect::<Vec<_>>()),
        "connections": connections.collect::<Vec<_>>(),
        "last_output": String::from_utf8_lossy(output).replace('\0', "\u{fffd}"),
    })
}

fn call(CountedViolation { violation, count }: &CountedViolation) -> Value {
    json!({
        "kind": violation.kind,
        "call": format!("{}({})", violation.syscall, violation.display_args()),
        "path": violation.path.as_deref().map(short),
        "count": count,
    })
}

/// A process without its command line, which may have secrets.
fn process(process: &ListedProcess) -> Value {
    json!({ "pid": process.pid, "parent_pid": process.parent_pid, "program": short(&process.name) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked(syscall: &str) -> Violation {
        let kind = Violation::SYSCALL_BLOCKED.to_owned();
        Violation { kind, syscall: syscall.into(), nr: 1, args: [7; 6], path: None }
    }

    fn options(critical: &str) -> EscapeOptions {
        EscapeOptions {
            critical: critical.parse().unwrap(),
            webhook_url: Some("https://alerts.test".into()),
            ..EscapeOptions::default()
        }
    }

    #[test]
    fn severity_decides_the_response() {
        let (log, options) = (EscapeLog::default(), options("terminate,alert"));
        log.add(&options, Indicator::of_call(&blocked("sysfs")));
        assert!(log.is_empty() && !log.terminate.is_cancelled(), "nothing configured for low");
        for call in ["mount", "unshare", "execve"] {
            let log = EscapeLog::default();
            log.add(&options, Indicator::of_call(&blocked(call)));
            assert!(log.terminate.is_cancelled(), "{call}");
            assert_eq!(log.outcome(Outcome::Exited(0)), EscapeLog::violation());
        }
        let usage = NetworkUsage { unreachable_attempts: 3, ..NetworkUsage::default() };
        log.network(&options, Some(NetworkMode::Proxy), Some(&usage));
        assert_eq!(log.outcome(Outcome::Exited(0)), Outcome::Exited(0));
    }

    #[test]
    fn only_with_a_proxy_is_an_attempt_past_it() {
        let options = EscapeOptions { high: "alert".parse().unwrap(), ..EscapeOptions::default() };
        let usage = NetworkUsage { unreachable_attempts: 3, ..NetworkUsage::default() };
        for (mode, is_empty) in [(NetworkMode::None, true), (NetworkMode::Proxy, false)] {
            let log = EscapeLog::default();
            log.network(&options, Some(mode), Some(&usage));
            assert_eq!(log.is_empty(), is_empty, "{mode}");
        }
    }

    #[test]
    fn indicators_of_a_flood_are_bounded() {
        let (log, options) = (EscapeLog::default(), options("alert"));
        for number in 0..1000 {
            let violation = Violation { args: [number; 6], ..blocked("mount") };
            log.add(&options, Indicator::of_call(&violation));
        }
        assert_eq!(log.seen.lock().indicators.len(), MAX_INDICATORS);
    }
}
