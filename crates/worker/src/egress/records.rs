//! Records of a sandbox's connections: a bounded number of events, and totals.

use codelia_egress::{
    control::{Connection, Totals, Via},
    known_reason, reason_codes,
};
use codelia_store::{EventBody, EventKind};
use codelia_telemetry::metrics;
use codelia_types::NetworkUsage;
use serde_json::json;

/// Events of connections, and as many of refusals: neither can push the other out.
const MAX_EVENTS: usize = 100;
const MAX_TEXT: usize = 255;

/// Attempts to reach an address without the proxy: the way in, and why they failed.
const DIRECT: &str = "direct";
const NO_ROUTE: &str = "no_route";

/// The network part of a run's result.
#[derive(Debug, Default)]
pub(crate) struct NetworkRecord {
    /// `None` in other network modes, unless the run tried to reach something.
    pub(crate) usage: Option<NetworkUsage>,
    pub(crate) events: Vec<EventBody>,
}

impl NetworkRecord {
    /// Adds what the sandbox did without the proxy.
    pub(crate) fn with_direct_attempts(mut self, usage: Option<NetworkUsage>) -> Self {
        let count = usage.map_or(0, |usage| usage.unreachable_attempts);
        if count > 0 {
            metrics().egress.attempts(DIRECT, NO_ROUTE, count, 0, 0);
            self.usage.get_or_insert_default().unreachable_attempts = count;
            let detail = json!({ "via": DIRECT, "reason": NO_ROUTE, "count": count });
            self.events.push(EventBody { kind: EventKind::NetworkRefused, field: None, detail });
        }
        self
    }
}

/// Connections and refusals of a sandbox so far.
#[derive(Debug, Default)]
pub(super) struct Records {
    connections: Vec<EventBody>,
    refusals: Vec<EventBody>,
    /// The traffic under proxies that have died.
    earlier: Totals,
    /// The traffic under the present proxy that has ended.
    counted: Totals,
}

impl Records {
    pub(super) fn add(&mut self, connection: Connection) {
        let Connection { refused, sent, received, count, .. } = &connection;
        let outcome = refused.as_deref().map_or(ALLOWED, label);
        metrics().egress.attempts(via(connection.via), outcome, *count, *sent, *received);
        let totals = &mut self.counted;
        let (number, events) = match refused {
            Some(_) => (&mut totals.refused, &mut self.refusals),
            None => (&mut totals.connections, &mut self.connections),
        };
        *number = number.saturating_add(*count);
        totals.sent = totals.sent.saturating_add(*sent);
        totals.received = totals.received.saturating_add(*received);
        if events.len() < MAX_EVENTS {
            events.push(event(connection));
        }
    }

    /// The proxy has closed the sandbox, and knows its traffic best.
    pub(super) fn closed(&mut self, totals: Totals) {
        self.counted = totals;
    }

    pub(super) fn proxy_ended(&mut self) {
        self.earlier = sum(self.earlier, std::mem::take(&mut self.counted));
    }

    pub(super) fn finish(mut self) -> NetworkRecord {
        let Totals { connections, refused, sent, received } = sum(self.earlier, self.counted);
        let usage = NetworkUsage {
            connections,
            refused,
            sent_bytes: sent,
            received_bytes: received,
            unreachable_attempts: 0,
        };
        self.connections.append(&mut self.refusals);
        NetworkRecord { usage: Some(usage), events: self.connections }
    }
}

fn sum(one: Totals, other: Totals) -> Totals {
    Totals {
        connections: one.connections.saturating_add(other.connections),
        refused: one.refused.saturating_add(other.refused),
        sent: one.sent.saturating_add(other.sent),
        received: one.received.saturating_add(other.received),
    }
}

fn event(connection: Connection) -> EventBody {
    let Connection {
        via: how,
        host,
        port,
        address,
        refused,
        rule,
        sent,
        received,
        millis,
        count,
        ..
    } = connection;
    let refused = refused.map(bounded);
    let remedy = refused.as_deref().and_then(known_reason).map(|(_, remedy)| remedy);
    EventBody {
        kind: if refused.is_some() {
            EventKind::NetworkRefused
        } else {
            EventKind::NetworkConnected
        },
        field: refused.as_deref().and_then(field).map(str::to_owned),
        detail: json!({
            "via": via(how),
            "host": bounded(host),
            "port": port,
            "address": address,
            "reason": refused,
            "remedy": remedy,
            "rule": rule.map(bounded),
            "sent_bytes": sent,
            "received_bytes": received,
            "duration_ms": millis,
            "count": count,
        }),
    }
}

/// The field of the policy behind a refusal.
fn field(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "host_not_allowed" => "network.allowed_hosts",
        "host_blocked" => "network.blocked_hosts",
        "port_not_allowed" => "network.allowed_ports",
        _ => return None,
    })
}

const ALLOWED: &str = "allowed";
/// A refusal for a reason that the worker does not know.
const REFUSED: &str = "refused";
/// The labels of all attempts: how, and the outcome.
pub(crate) fn attempts() -> impl Iterator<Item = (&'static str, &'static str)> {
    let ways = [Via::Connect, Via::Http, Via::Socks, Via::Transparent, Via::Dns].map(via);
    let outcomes = || [ALLOWED, REFUSED].into_iter().chain(reason_codes());
    ways.into_iter()
        .flat_map(move |way| outcomes().map(move |outcome| (way, outcome)))
        .chain([(DIRECT, NO_ROUTE)])
}

/// A reason as the label of a metric: a proxy that misbehaves must not create labels without end.
fn label(reason: &str) -> &'static str {
    known_reason(reason).map_or(REFUSED, |(code, _)| code)
}

fn via(via: Via) -> &'static str {
    match via {
        Via::Connect => "connect",
        Via::Http => "http",
        Via::Socks => "socks",
        Via::Transparent => "transparent",
        Via::Dns => "dns",
    }
}

/// Texts come from programs: at most [`MAX_TEXT`] bytes, without control characters, which the
/// database or a terminal would not accept.
fn bounded(text: String) -> String {
    let mut text: String = text.chars().filter(|c| !c.is_control()).collect();
    text.truncate(text.floor_char_boundary(MAX_TEXT));
    text
}

#[cfg(test)]
mod tests {
    use codelia_types::RunId;

    use super::*;

    fn connection(refused: Option<&str>) -> Connection {
        Connection {
            sandbox: RunId::generate(),
            via: Via::Connect,
            host: "example.com".into(),
            port: 443,
            address: None,
            refused: refused.map(str::to_owned),
            rule: None,
            sent: 10,
            received: 20,
            millis: 5,
            count: 2,
        }
    }

    #[test]
    fn records_are_bounded_and_all_are_counted() {
        let mut records = Records::default();
        for _ in 0..MAX_EVENTS * 3 {
            records.add(connection(Some("host_not_allowed")));
        }
        records.add(connection(None));
        let NetworkRecord { usage, events } = records.finish();
        assert_eq!(events.len(), MAX_EVENTS + 1, "refusals leave room for the connection");
        assert_eq!(events[0].kind, EventKind::NetworkConnected);
        assert_eq!(events[1].field.as_deref(), Some("network.allowed_hosts"));
        let usage = usage.unwrap();
        assert_eq!((usage.connections, usage.refused), (2, MAX_EVENTS as u64 * 6));
        assert_eq!(usage.sent_bytes, (MAX_EVENTS as u64 * 3 + 1) * 10);
    }

    #[test]
    fn totals_survive_the_death_of_a_proxy() {
        let mut records = Records::default();
        records.add(connection(None));
        records.proxy_ended();
        records.add(connection(None));
        let totals = Totals { connections: 5, refused: 1, sent: 100, received: 200 };
        records.closed(totals);
        let usage = records.finish().usage.unwrap();
        assert_eq!((usage.connections, usage.refused, usage.sent_bytes), (7, 1, 110));
    }

    #[test]
    fn text_of_a_program_is_cleaned_and_cut() {
        assert_eq!(bounded("a\u{1b}[31m\0b".into()), "a[31mb");
        assert_eq!(bounded("ä".repeat(300)).len(), 254);
    }
}
