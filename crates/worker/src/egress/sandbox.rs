//! A sandbox that the egress proxy serves: its sockets, its rules and what it did.

use std::{collections::BTreeMap, sync::Arc};

use codelia_backends::EgressSockets;
use codelia_egress::control::{
    Assigned, Connection, Decision, Open, Request, TARGET_SOCKETS, Totals,
};
use codelia_policy::EgressRules;
use codelia_types::{RunId, SessionId, TenantId};
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::{
    records::{NetworkRecord, Records},
    rules::BaseRules,
};

/// Decisions for one sandbox.
const MAX_DECISIONS: usize = 1024;

/// The run that a sandbox belongs to.
#[derive(Debug, Clone)]
pub(crate) struct Subject {
    pub(crate) run: RunId,
    pub(crate) session: SessionId,
    pub(crate) tenant: TenantId,
}

/// A sandbox that is open, or closing.
#[derive(Debug)]
pub(super) struct Sandbox {
    pub(super) subject: Subject,
    pub(super) base: BaseRules,
    /// Copies, for the next proxy if this one dies.
    sockets: Arc<EgressSockets>,
    state: Mutex<State>,
    /// Cancelled when the proxy has closed it.
    pub(super) closed: CancellationToken,
    _descriptors: OwnedSemaphorePermit,
}

#[derive(Debug)]
struct State {
    rules: EgressRules,
    /// How often the rules have changed.
    version: u64,
    assigned: BTreeMap<usize, Assigned>,
    /// Decisions that count as long as the sandbox lives, for each proxy that serves it.
    lasting: BTreeMap<(String, u16), Decision>,
    /// Decisions that the present proxy was not sent yet.
    decisions: Vec<(String, u16, Decision)>,
    is_closing: bool,
    records: Records,
}

/// The state of a sandbox that the present proxy was sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sent {
    version: u64,
    close: bool,
}

impl Sent {
    pub(super) fn is_closed(self) -> bool {
        self.close
    }
}

/// A message to send, with the sockets that go with it.
pub(super) type Message = (Request, Option<Arc<EgressSockets>>);

impl State {
    fn lasting(&self) -> impl Iterator<Item = (String, u16, Decision)> {
        let lasting = self.lasting.clone().into_iter();
        lasting.map(|((host, port), decision)| (host, port, decision))
    }
}

impl Sandbox {
    pub(super) fn new(
        subject: Subject,
        base: BaseRules,
        rules: EgressRules,
        sockets: EgressSockets,
        descriptors: OwnedSemaphorePermit,
    ) -> Self {
        let state = State {
            rules,
            version: 0,
            assigned: BTreeMap::new(),
            lasting: BTreeMap::new(),
            decisions: Vec::new(),
            is_closing: false,
            records: Records::default(),
        };
        Self {
            subject,
            base,
            sockets: Arc::new(sockets),
            state: Mutex::new(state),
            closed: CancellationToken::new(),
            _descriptors: descriptors,
        }
    }

    /// The messages that bring the proxy up to date, and what it was sent then; `None` if it does
    /// not know the sandbox and need not.
    pub(super) fn messages(&self, sent: Option<Sent>) -> (Vec<Message>, Option<Sent>) {
        let sandbox = self.subject.run;
        let mut state = self.state.lock();
        let mut messages = Vec::new();
        let mut now = match sent {
            Some(sent) => sent,
            // No proxy serves it, so there is nothing to close.
            None if state.is_closing => {
                self.closed.cancel();
                return (messages, None);
            }
            None => {
                let assigned = state.assigned.values().cloned().collect();
                let tenant = self.subject.tenant.to_string();
                let open = Open { sandbox, tenant, rules: state.rules.clone(), assigned };
                messages.push((Request::Open(Box::new(open)), Some(self.sockets.clone())));
                state.decisions = state.lasting().collect();
                Sent { version: state.version, close: false }
            }
        };
        if now.version != state.version {
            now.version = state.version;
            messages
                .push((Request::Update { sandbox, rules: Box::new(state.rules.clone()) }, None));
        }
        for (host, port, decision) in state.decisions.drain(..) {
            messages.push((Request::Decide { sandbox, host, port, decision }, None));
        }
        if state.is_closing && !now.close {
            now.close = true;
            messages.push((Request::Close { sandbox }, None));
        }
        (messages, Some(now))
    }

    /// Replaces the rules. Returns whether they changed.
    pub(super) fn set_rules(&self, rules: EgressRules) -> bool {
        let mut state = self.state.lock();
        let is_new = state.rules != rules;
        if is_new {
            state.rules = rules;
            state.version += 1;
        }
        is_new
    }

    pub(super) fn decide(&self, host: String, port: u16, decision: Decision) {
        let mut state = self.state.lock();
        if state.decisions.len().max(state.lasting.len()) >= MAX_DECISIONS {
            return tracing::warn!(run = %self.subject.run, "too many decisions about hosts, one is dropped");
        }
        if decision != Decision::Once {
            state.lasting.insert((host.clone(), port), decision);
        }
        state.decisions.push((host, port, decision));
    }

    /// A socket stands for a name now.
    pub(super) fn assign(&self, assigned: Assigned) {
        if assigned.socket < TARGET_SOCKETS {
            self.state.lock().assigned.insert(assigned.socket, assigned);
        }
    }

    pub(super) fn record(&self, connection: Connection) {
        self.state.lock().records.add(connection);
    }

    /// The proxy has closed it.
    pub(super) fn closed(&self, totals: Totals) {
        self.state.lock().records.closed(totals);
        self.closed.cancel();
    }

    /// The proxy has died.
    pub(super) fn proxy_ended(&self) {
        let mut state = self.state.lock();
        state.records.proxy_ended();
        if state.is_closing {
            self.closed.cancel();
        }
    }

    pub(super) fn begin_close(&self) {
        self.state.lock().is_closing = true;
    }

    pub(super) fn take_record(&self) -> NetworkRecord {
        std::mem::take(&mut self.state.lock().records).finish()
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::NetworkPolicy;
    use codelia_sys::fd::dev_null;
    use tokio::sync::Semaphore;

    use super::{super::rules::Lists, *};

    async fn sandbox() -> Sandbox {
        let null = || dev_null().unwrap();
        let sockets = EgressSockets {
            proxy: null(),
            resolver_udp: null(),
            resolver_tcp: null(),
            targets: vec![null()],
        };
        let subject = Subject {
            run: RunId::generate(),
            session: SessionId::generate(),
            tenant: "team".parse().unwrap(),
        };
        let base = BaseRules::new(&NetworkPolicy::default(), None, None);
        let rules = base.under(&Lists::default()).unwrap();
        let permit = Arc::new(Semaphore::new(1)).acquire_owned().await.unwrap();
        Sandbox::new(subject, base, rules, sockets, permit)
    }

    /// The kinds of the messages, and what the proxy was sent then.
    fn kinds(sandbox: &Sandbox, sent: Option<Sent>) -> (Vec<&'static str>, Option<Sent>) {
        let (messages, sent) = sandbox.messages(sent);
        let kind = |(request, sockets): &Message| match request {
            Request::Configure(_) => "configure",
            Request::Open(open) => {
                assert!(sockets.is_some());
                if open.assigned.is_empty() { "open" } else { "open with names" }
            }
            Request::Update { .. } => "update",
            Request::Decide { .. } => "decide",
            Request::Close { .. } => "close",
        };
        (messages.iter().map(kind).collect(), sent)
    }

    #[tokio::test]
    async fn proxy_is_sent_each_change_once() {
        let sandbox = sandbox().await;
        let (first, sent) = kinds(&sandbox, None);
        assert_eq!(first, ["open"]);
        assert_eq!(kinds(&sandbox, sent).0, [""; 0]);
        let rules = EgressRules {
            allowed_ports: vec![1],
            ..sandbox.base.under(&Lists::default()).unwrap()
        };
        assert!(sandbox.set_rules(rules.clone()) && !sandbox.set_rules(rules));
        sandbox.decide("a".into(), 1, Decision::Once);
        let (changed, sent) = kinds(&sandbox, sent);
        assert_eq!(changed, ["update", "decide"]);
        sandbox.begin_close();
        let (closing, sent) = kinds(&sandbox, sent);
        assert_eq!(closing, ["close"]);
        assert!(kinds(&sandbox, sent).0.is_empty() && !sandbox.closed.is_cancelled());
        sandbox.closed(Totals::default());
        assert!(sandbox.closed.is_cancelled());
    }

    #[tokio::test]
    async fn next_proxy_gets_names_and_lasting_decisions() {
        let sandbox = sandbox().await;
        let assigned = |socket| Assigned {
            socket,
            host: "a".into(),
            address: [198, 18, 0, 1].into(),
            port: 443,
        };
        sandbox.assign(assigned(0));
        sandbox.assign(assigned(TARGET_SOCKETS));
        sandbox.decide("a".into(), 1, Decision::Once);
        sandbox.decide("b".into(), 1, Decision::Always);
        assert_eq!(
            kinds(&sandbox, None).0,
            ["open with names", "decide"],
            "what was for once is over"
        );
        sandbox.proxy_ended();
        assert_eq!(kinds(&sandbox, None).0, ["open with names", "decide"]);
        assert_eq!(
            sandbox.state.lock().assigned.len(),
            1,
            "a socket that does not exist is ignored"
        );
    }

    #[tokio::test]
    async fn sandbox_without_proxy_is_closed_at_once() {
        let dead = sandbox().await;
        dead.begin_close();
        dead.proxy_ended();
        assert!(dead.closed.is_cancelled());
        let unknown = sandbox().await;
        unknown.begin_close();
        assert_eq!(kinds(&unknown, None), (Vec::new(), None));
        assert!(unknown.closed.is_cancelled());
    }
}
