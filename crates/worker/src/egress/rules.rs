//! The rules of a sandbox: the policy of its run under the present lists of its session and tenant.

use std::sync::Arc;

use codelia_policy::{EgressRules, NetworkPolicy, Policy};
use codelia_types::NetworkMode;

/// The largest rules that fit into a message to the proxy.
const MAX_BYTES: usize = 128 * 1024;

/// The rules do not fit into a message to the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lists of hosts and ports are too long (max {MAX_BYTES} bytes)")]
pub(crate) struct RulesTooLarge;

/// The lists that hold for a session now.
#[derive(Debug, Clone, Default)]
pub(super) struct Lists {
    /// The lists of the session, if they were changed since it was created.
    pub(super) session: Option<NetworkPolicy>,
    /// The lists of its tenant, if it has a policy.
    pub(super) tenant: Option<Arc<NetworkPolicy>>,
}

/// The source of a sandbox's rules.
#[derive(Debug, Clone)]
pub(super) struct BaseRules {
    /// The network policy of the run.
    run: NetworkPolicy,
    /// Whether the run has the lists of its session. They change with those; lists of its own can
    /// only be tightened.
    follows_session: bool,
}

impl BaseRules {
    /// `session` is the network policy that the session was created with, if it is known, and
    /// `tenant` that of its tenant.
    pub(super) fn new(
        run: &NetworkPolicy,
        session: Option<&NetworkPolicy>,
        tenant: Option<&NetworkPolicy>,
    ) -> Self {
        let has_lists_of = |session: &NetworkPolicy| {
            session == run || tenant.is_some_and(|tenant| merge(tenant, session) == *run)
        };
        Self { run: run.clone(), follows_session: session.is_some_and(has_lists_of) }
    }

    /// The rules under the present lists.
    pub(super) fn under(&self, lists: &Lists) -> Result<EgressRules, RulesTooLarge> {
        let policy = match &lists.session {
            None => self.run.clone(),
            Some(changed) if self.follows_session => changed.clone(),
            Some(changed) => merge(changed, &self.run),
        };
        let policy = match lists.tenant.as_deref() {
            Some(tenant) if tenant.mode == Some(NetworkMode::None) => return Ok(Self::nothing()),
            Some(tenant) => merge(tenant, &policy),
            None => policy,
        };
        let rules = EgressRules::from_policy(&policy);
        // A text that cannot be written is too large for any message.
        let fits = serde_json::to_vec(&rules).is_ok_and(|text| text.len() <= MAX_BYTES);
        if fits { Ok(rules) } else { Err(RulesTooLarge) }
    }

    /// Rules that allow nothing.
    pub(super) fn nothing() -> EgressRules {
        EgressRules::from_policy(&NetworkPolicy::default())
    }
}

fn merge(upper: &NetworkPolicy, lower: &NetworkPolicy) -> NetworkPolicy {
    of_network(upper).merge(&of_network(lower)).network
}

fn of_network(network: &NetworkPolicy) -> Policy {
    Policy { network: network.clone(), ..Policy::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(hosts: &[&str]) -> NetworkPolicy {
        let hosts = hosts.iter().map(|&host| host.to_owned()).collect();
        NetworkPolicy { allowed_hosts: Some(hosts), ..NetworkPolicy::default() }
    }

    fn hosts(
        base: &BaseRules,
        session: Option<&NetworkPolicy>,
        tenant: Option<&[&str]>,
    ) -> Vec<String> {
        let tenant = tenant.map(|hosts| Arc::new(network(hosts)));
        base.under(&Lists { session: session.cloned(), tenant }).unwrap().allowed_hosts
    }

    #[test]
    fn run_without_own_lists_follows_its_session() {
        let created = network(&["a.example"]);
        let base = BaseRules::new(&created, Some(&created), None);
        assert_eq!(hosts(&base, None, None), ["a.example"]);
        assert_eq!(hosts(&base, Some(&network(&["b.example"])), None), ["b.example"]);
    }

    #[test]
    fn run_with_own_lists_is_only_tightened() {
        let base = BaseRules::new(&network(&["a.example"]), Some(&network(&["*.example"])), None);
        assert_eq!(hosts(&base, Some(&network(&["a.example", "b.example"])), None), ["a.example"]);
        assert!(hosts(&base, Some(&network(&["b.example"])), None).is_empty());
    }

    #[test]
    fn tenant_tightens_session_and_run() {
        let created = network(&["a.example", "b.example"]);
        let base = BaseRules::new(&created, Some(&created), None);
        assert_eq!(hosts(&base, None, Some(&["b.example", "c.example"])), ["b.example"]);
        let changed = network(&["b.example", "c.example"]);
        assert_eq!(hosts(&base, Some(&changed), Some(&["a.example", "c.example"])), ["c.example"]);
        assert_eq!(hosts(&base, None, None), ["a.example", "b.example"], "the policy was cleared");
        // Admitted under the policy of its tenant, the run still has the lists of its session.
        let tenant = network(&["b.example", "c.example"]);
        let base = BaseRules::new(&network(&["b.example"]), Some(&created), Some(&tenant));
        assert_eq!(
            hosts(&base, Some(&network(&["c.example"])), Some(&["c.example"])),
            ["c.example"]
        );
    }

    #[test]
    fn tenant_without_network_has_no_hosts() {
        let created = network(&["a.example"]);
        let base = BaseRules::new(&created, Some(&created), None);
        let none = NetworkPolicy { mode: Some(NetworkMode::None), ..NetworkPolicy::default() };
        let rules = base.under(&Lists { session: None, tenant: Some(Arc::new(none)) }).unwrap();
        assert_eq!(rules, BaseRules::nothing());
    }

    #[test]
    fn rules_that_fit_no_message_are_refused() {
        let many: Vec<String> = (0..20_000).map(|n| format!("host-{n}.example")).collect();
        let policy = NetworkPolicy { allowed_hosts: Some(many), ..NetworkPolicy::default() };
        assert_eq!(
            BaseRules::new(&policy, None, None).under(&Lists::default()),
            Err(RulesTooLarge)
        );
    }
}
