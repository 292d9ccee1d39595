//! One sandbox: its rules, limits, decisions, names and totals. Decides about each connection.

use std::{collections::HashMap, sync::Arc};

use codelia_policy::{EgressDecision, EgressLimits, EgressRules};
use codelia_types::RunId;
use parking_lot::{Mutex, RwLock};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    ask::Asks,
    control::{Decision, Report, Totals},
    limits::{Full, Permit, Rate, Share},
    names::Names,
    proxy::Proxy,
    refusal::{Reason, Refusal},
    suspicious::WildcardNames,
    target::Target,
};

/// A sandbox that is served.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: RunId,
    pub(crate) tenant: String,
    pub(crate) proxy: Arc<Proxy>,
    rules: RwLock<Arc<EgressRules>>,
    asks: Asks,
    wildcard_names: WildcardNames,
    pub(crate) names: Mutex<Names>,
    share: Arc<Share>,
    pub(crate) connection_rate: Rate,
    pub(crate) query_rate: Rate,
    live: Mutex<Live>,
    totals: Mutex<Totals>,
    /// Cancelled when the sandbox is closed.
    pub(crate) closed: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

/// Connections that are allowed now.
#[derive(Debug, Default)]
struct Live {
    next: u64,
    connections: HashMap<u64, (Target, CancellationToken)>,
}

/// The direction of traffic, as the sandbox sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Sent,
    Received,
}

impl Sandbox {
    pub(crate) fn new(
        id: RunId,
        tenant: String,
        rules: EgressRules,
        names: Names,
        proxy: Arc<Proxy>,
    ) -> Self {
        let share = Arc::new(proxy.capacity.join());
        Self {
            id,
            tenant,
            rules: RwLock::new(Arc::new(rules)),
            asks: Asks::default(),
            wildcard_names: WildcardNames::default(),
            names: Mutex::new(names),
            share,
            connection_rate: Rate::new(),
            query_rate: Rate::new(),
            live: Mutex::default(),
            totals: Mutex::default(),
            closed: CancellationToken::new(),
            tasks: TaskTracker::new(),
            proxy,
        }
    }

    pub(crate) fn rules(&self) -> Arc<EgressRules> {
        self.rules.read().clone()
    }

    pub(crate) fn limits(&self) -> EgressLimits {
        self.rules().limits
    }

    /// Replaces the rules and ends the connections that they do not allow.
    pub(crate) fn update(&self, rules: EgressRules) {
        *self.rules.write() = Arc::new(rules);
        let rules = self.rules();
        for (target, ended) in self.live.lock().connections.values() {
            // A host that needs a decision has got one.
            let decision = rules.decide(&target.host, target.port);
            if !matches!(decision, EgressDecision::Allow(_) | EgressDecision::Ask(_)) {
                ended.cancel();
            }
        }
    }

    pub(crate) fn decide(&self, host: &str, port: u16, decision: Decision) {
        self.asks.decide(host, port, decision);
    }

    /// Takes a connection of the sandbox's share.
    pub(crate) fn permit(&self) -> Result<Permit, Reason> {
        self.share.take(self.limits().connections).map_err(|full| match full {
            Full::Sandbox => Reason::ConnectionLimit,
            Full::Process => Reason::Capacity,
        })
    }

    /// Decides about a connection, after a person did if the rules say so.
    pub(crate) async fn authorize(
        self: &Arc<Self>,
        target: &Target,
    ) -> Result<Authorized, Refusal> {
        // Before the decision, so that no change of the rules is missed.
        let live = self.add_live(target);
        let rules = self.rules();
        let decision = rules.decide(&target.host, target.port);
        let rule = permitting_rule(decision)?;
        if matches!(decision, EgressDecision::Ask(_)) {
            let ask =
                Report::Ask { sandbox: self.id, host: target.host.clone(), port: target.port };
            let limit = self.proxy.config.options.ask_timeout;
            let decided = tokio::select! {
                decided = self.asks.wait(target, limit, || self.proxy.reports.send(ask)) => decided,
                () = live.ended.cancelled() => Err(Reason::RulesChanged),
            };
            decided.map_err(|reason| Refusal::by(reason, rule))?;
        }
        // A pattern for names must not open an address.
        if target.address.is_some() && rule != target.host {
            return Err(Reason::HostNotAllowed.into());
        }
        self.check_wildcard(&rules, &target.host, rule)?;
        self.check_bytes(&rules.limits)?;
        if live.ended.is_cancelled() {
            return Err(Refusal::by(Reason::RulesChanged, rule));
        }
        Ok(Authorized { rule: rule.to_owned(), live })
    }

    /// Decides about a query for a name, without asking anybody.
    pub(crate) fn check_name(&self, name: &str) -> Result<Arc<EgressRules>, Refusal> {
        let rules = self.rules();
        let port = rules.allowed_ports.first().copied().ok_or(Reason::PortNotAllowed)?;
        let rule = permitting_rule(rules.decide(name, port))?;
        self.check_wildcard(&rules, name, rule)?;
        Ok(rules)
    }

    /// A name that is listed by itself is not checked, even if a wildcard matched first.
    fn check_wildcard(&self, rules: &EgressRules, name: &str, rule: &str) -> Result<(), Refusal> {
        if rules.allowed_hosts.iter().chain(&rules.ask_hosts).any(|listed| listed == name) {
            return Ok(());
        }
        self.wildcard_names.check(name, rule).map_err(|reason| Refusal::by(reason, rule))
    }

    fn check_bytes(&self, limits: &EgressLimits) -> Result<(), Reason> {
        let totals = self.totals();
        let is_below = |total, max: Option<u64>| max.is_none_or(|max| total < max);
        if is_below(totals.sent, limits.sent_bytes)
            && is_below(totals.received, limits.received_bytes)
        {
            Ok(())
        } else {
            Err(Reason::ByteLimit)
        }
    }

    /// Counts bytes. Fails once the sandbox has transferred all that it may.
    pub(crate) fn count_bytes(
        &self,
        direction: Direction,
        bytes: u64,
        limits: &EgressLimits,
    ) -> Result<(), Reason> {
        let mut totals = self.totals.lock();
        let (total, max) = match direction {
            Direction::Sent => (&mut totals.sent, limits.sent_bytes),
            Direction::Received => (&mut totals.received, limits.received_bytes),
        };
        *total = total.saturating_add(bytes);
        if max.is_some_and(|max| *total > max) { Err(Reason::ByteLimit) } else { Ok(()) }
    }

    pub(crate) fn count_connection(&self, refused: bool) {
        let mut totals = self.totals.lock();
        let count = if refused { &mut totals.refused } else { &mut totals.connections };
        *count += 1;
    }

    pub(crate) fn totals(&self) -> Totals {
        *self.totals.lock()
    }

    fn add_live(self: &Arc<Self>, target: &Target) -> LiveConnection {
        let ended = CancellationToken::new();
        let mut live = self.live.lock();
        live.next += 1;
        let id = live.next;
        live.connections.insert(id, (target.clone(), ended.clone()));
        LiveConnection { id, ended, sandbox: self.clone() }
    }
}

/// The rule that permits a connection, perhaps after a decision, or the refusal of the rules.
fn permitting_rule(decision: EgressDecision<'_>) -> Result<&str, Refusal> {
    match decision {
        EgressDecision::Allow(rule) | EgressDecision::Ask(rule) => Ok(rule),
        EgressDecision::Blocked(rule) => Err(Refusal::by(Reason::HostBlocked, rule)),
        EgressDecision::HostNotAllowed => Err(Reason::HostNotAllowed.into()),
        EgressDecision::PortNotAllowed => Err(Reason::PortNotAllowed.into()),
    }
}

/// A connection that may be made.
#[derive(Debug)]
pub(crate) struct Authorized {
    /// The pattern that allowed it.
    pub(crate) rule: String,
    live: LiveConnection,
}

impl Authorized {
    /// Waits until the rules do not allow the connection any more.
    pub(crate) async fn revoked(&self) -> Reason {
        self.live.ended.cancelled().await;
        Reason::RulesChanged
    }
}

#[derive(Debug)]
struct LiveConnection {
    id: u64,
    ended: CancellationToken,
    sandbox: Arc<Sandbox>,
}

impl Drop for LiveConnection {
    fn drop(&mut self) {
        self.sandbox.live.lock().connections.remove(&self.id);
    }
}
