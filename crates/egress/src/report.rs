//! The queue of reports to the worker. Producers never wait: when the worker is slow, records of
//! connections are merged.

use std::collections::{HashMap, VecDeque};

use codelia_types::RunId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::control::{Connection, Report, Via};

/// Records that wait before further ones are merged.
const MAX_QUEUED: usize = 2048;
/// Merged records. Further ones lose their host.
const MAX_MERGED: usize = 1024;

/// Reports in the order in which they are sent.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Report>,
    /// Records in the queue.
    records: usize,
    merged: HashMap<Key, Connection>,
    /// The number of open connections, if it is to be sent.
    open: Option<usize>,
}

/// The fields that merged records have in common.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    sandbox: RunId,
    via: Via,
    host: String,
    port: u16,
    refused: Option<String>,
}

impl From<&Connection> for Key {
    fn from(record: &Connection) -> Self {
        Self {
            sandbox: record.sandbox,
            via: record.via,
            host: record.host.clone(),
            port: record.port,
            refused: record.refused.clone(),
        }
    }
}

impl Reports {
    /// Adds the record of a connection.
    pub(crate) fn record(&self, mut record: Connection) {
        let mut state = self.state.lock();
        if state.records < MAX_QUEUED && state.merged.is_empty() {
            state.records += 1;
            state.queue.push_back(Report::Connection(record));
        } else {
            if state.merged.len() >= MAX_MERGED && !state.merged.contains_key(&Key::from(&record)) {
                record.host = String::new();
                record.port = 0;
                record.rule = None;
            }
            match state.merged.get_mut(&Key::from(&record)) {
                Some(merged) => merge(merged, &record),
                None => drop(state.merged.insert(Key::from(&record), record)),
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Adds another report. Their number is bounded by that of sandboxes, sockets and connections.
    pub(crate) fn send(&self, report: Report) {
        let mut state = self.state.lock();
        if let Report::Closed { sandbox, .. } = report {
            // The last report of a sandbox: nothing of it may follow.
            let merged =
                state.merged.extract_if(|key, _| key.sandbox == sandbox).map(|(_, record)| record);
            let merged: Vec<_> = merged.collect();
            state.records += merged.len();
            state.queue.extend(merged.into_iter().map(Report::Connection));
        }
        state.queue.push_back(report);
        drop(state);
        self.changed.notify_one();
    }

    /// Sends the number of open connections, in the place of one that was not sent yet.
    pub(crate) fn set_open(&self, count: usize) {
        self.state.lock().open = Some(count);
        self.changed.notify_one();
    }

    /// Waits for the next report.
    pub(crate) async fn next(&self) -> Report {
        loop {
            if let Some(report) = self.pop() {
                return report;
            }
            self.changed.notified().await;
        }
    }

    fn pop(&self) -> Option<Report> {
        let mut state = self.state.lock();
        if state.queue.is_empty() {
            let merged = std::mem::take(&mut state.merged);
            state.records += merged.len();
            state.queue.extend(merged.into_values().map(Report::Connection));
        }
        let Some(report) = state.queue.pop_front() else {
            return state.open.take().map(|count| Report::OpenConnections { count });
        };
        state.records -= usize::from(matches!(report, Report::Connection(_)));
        Some(report)
    }
}

fn merge(into: &mut Connection, record: &Connection) {
    into.count += record.count;
    into.sent += record.sent;
    into.received += record.received;
    into.millis = into.millis.max(record.millis);
    if into.address != record.address {
        into.address = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Totals;

    fn refused(sandbox: RunId, host: &str) -> Connection {
        Connection {
            sandbox,
            via: Via::Connect,
            host: host.to_owned(),
            port: 443,
            address: None,
            refused: Some("host_not_allowed".to_owned()),
            rule: None,
            sent: 1,
            received: 2,
            millis: 3,
            count: 1,
        }
    }

    fn records(reports: &Reports) -> Vec<Connection> {
        let all = std::iter::from_fn(|| reports.pop());
        all.filter_map(
            |report| if let Report::Connection(record) = report { Some(record) } else { None },
        )
        .collect()
    }

    #[test]
    fn flood_is_merged_and_counted() {
        let (reports, sandbox) = (Reports::default(), RunId::generate());
        let attempts = 100_000;
        for number in 0..attempts {
            reports.record(refused(sandbox, &format!("{number}.example.com")));
        }
        let records = records(&reports);
        assert!(records.len() <= MAX_QUEUED + MAX_MERGED + 1, "{}", records.len());
        assert_eq!(records.iter().map(|record| record.count).sum::<u64>(), attempts);
        assert_eq!(records.iter().map(|record| record.sent).sum::<u64>(), attempts);
    }

    #[test]
    fn only_the_last_number_of_connections_is_sent() {
        let reports = Reports::default();
        reports.set_open(3);
        reports.set_open(2);
        assert_eq!(reports.pop(), Some(Report::OpenConnections { count: 2 }));
        assert_eq!(reports.pop(), None);
    }

    #[test]
    fn closed_is_the_last_report_of_a_sandbox() {
        let (reports, sandbox, other) = (Reports::default(), RunId::generate(), RunId::generate());
        for _ in 0..=MAX_QUEUED {
            reports.record(refused(sandbox, "a.example.com"));
        }
        reports.record(refused(other, "b.example.com"));
        reports.send(Report::Closed { sandbox, totals: Totals::default() });
        let all: Vec<_> = std::iter::from_fn(|| reports.pop()).collect();
        let closed = all.iter().position(|report| matches!(report, Report::Closed { .. })).unwrap();
        let of_sandbox = |report: &Report| matches!(report, Report::Connection(record) if record.sandbox == sandbox);
        assert_eq!(all.iter().rposition(of_sandbox), Some(closed - 1));
        assert!(all.len() > closed + 1, "the other sandbox's record follows");
    }
}
