//! The events that record the signals and file operations of a run, where its policy logs them.

use std::time::Duration;

use codelia_backends::{Operation, Operations};
use codelia_store::{EventBody, EventKind};
use codelia_telemetry::metrics;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::run::io::pacing::OutputPacing;

/// The most of one event, so that a page of events stays small.
const MAX_IN_EVENT: usize = 100;
const MAX_TEXT_IN_EVENT: usize = 8 * 1024;

/// The events: what was kept, then one for each suspicious pattern. `webhook` has the store queue
/// an alert for these.
pub(crate) fn events(
    operations: &Operations,
    started_at: Instant,
    pacing: &OutputPacing,
    webhook: bool,
) -> Vec<EventBody> {
    let body = |kind, detail| EventBody { kind, field: Some("policy.logging".to_owned()), detail };
    let time = |operation: &Operation| {
        pacing.round_up(operation.at.saturating_duration_since(started_at.into_std()))
    };
    let parts = parts(&operations.kept);
    let count = parts.len();
    let logged = parts.into_iter().enumerate().map(|(index, part)| {
        let listed: Vec<_> =
            part.iter().map(|operation| to_json(operation, time(operation))).collect();
        let mut detail = json!({ "part": index + 1, "parts": count, "operations": listed });
        if index == 0 {
            detail["totals"] = json!(operations.totals);
            detail["dropped"] = json!(operations.dropped);
        }
        body(EventKind::OperationsLogged, detail)
    });
    let suspicious = operations.suspicious.iter().map(|(pattern, count)| {
        metrics().escape.suspicious(pattern);
        let detail = json!({ "pattern": pattern, "count": count, "webhook": webhook });
        body(EventKind::SuspiciousOperations, detail)
    });
    logged.chain(suspicious).collect()
}

/// At least one part, so that a run that did nothing has its event too.
fn parts(operations: &[Operation]) -> Vec<&[Operation]> {
    let mut parts = Vec::new();
    let mut rest = operations;
    loop {
        let mut text = 0;
        let fits = |operation: &&Operation| {
            text += [&operation.path, &operation.to]
                .into_iter()
                .flatten()
                .map(String::len)
                .sum::<usize>();
            text <= MAX_TEXT_IN_EVENT
        };
        let length = rest.iter().take(MAX_IN_EVENT).take_while(fits).count().max(1).min(rest.len());
        let (part, others) = rest.split_at(length);
        parts.push(part);
        rest = others;
        if rest.is_empty() {
            return parts;
        }
    }
}

/// An operation without what it does not have.
fn to_json(operation: &Operation, time: Duration) -> Value {
    let Operation { pid, call, path, to, mode, target, signal, count, .. } = operation;
    let fields = [
        ("ms", json!(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))),
        ("pid", json!(pid)),
        ("call", json!(call)),
        ("path", json!(path)),
        ("to", json!(to)),
        ("mode", json!(mode.map(|mode| format!("{mode:04o}")))),
        ("target", json!(target)),
        ("signal", json!(signal)),
        ("count", json!((*count > 1).then_some(count))),
    ];
    let present = fields.into_iter().filter(|(_, value)| !value.is_null());
    Value::Object(present.map(|(name, value)| (name.to_owned(), value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(path: &str) -> Operation {
        Operation {
            at: std::time::Instant::now(),
            pid: Some(3),
            call: "unlink",
            path: Some(path.to_owned()),
            to: None,
            mode: None,
            target: None,
            signal: None,
            count: 1,
        }
    }

    #[test]
    fn parts_are_bounded_and_complete() {
        assert_eq!(parts(&[]).len(), 1);
        let many = vec![operation("/a"); 2 * MAX_IN_EVENT + 1];
        assert_eq!(parts(&many).iter().map(|part| part.len()).collect::<Vec<_>>(), [100, 100, 1]);
        let long = vec![operation(&"a".repeat(512)); 20];
        let lengths: Vec<_> = parts(&long).iter().map(|part| part.len()).collect();
        assert_eq!(lengths, [16, 4], "8 KiB of names");
    }

    #[test]
    fn absent_fields_are_left_out() {
        let value = to_json(&operation("/a"), Duration::from_millis(7));
        assert_eq!(value, json!({ "ms": 7, "pid": 3, "call": "unlink", "path": "/a" }));
    }
}
