//! The rules of a sandbox: the policy of its run under the present lists of its session.

use codelia_policy::{EgressRules, NetworkPolicy, Policy};

/// The largest rules that fit into a message to the proxy.
const MAX_BYTES: usize = 128 * 1024;

/// The rules do not fit into a message to the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lists of hosts and ports are too long (max {MAX_BYTES} bytes)")]
pub(crate) struct RulesTooLarge;

/// What the rules of a sandbox are made from.
#[derive(Debug, Clone)]
pub(super) struct BaseRules {
    /// The network policy of the run.
    run: NetworkPolicy,
    /// Whether the run has the lists of its session. They change with those; lists of its own can only
    /// be tightened.
    follows_session: bool,
}

impl BaseRules {
    /// `session` is the network policy that the session was created with, if it is known.
    pub(super) fn new(run: &NetworkPolicy, session: Option<&NetworkPolicy>) -> Self {
        Self { run: run.clone(), follows_session: session == Some(run) }
    }

    /// The rules under the present lists of the session; `None` if they were never changed.
    pub(super) fn under(&self, changed: Option<&NetworkPolicy>) -> Result<EgressRules, RulesTooLarge> {
        let policy = match changed {
            None => self.run.clone(),
            Some(changed) if self.follows_session => changed.clone(),
            Some(changed) => of_network(changed).merge(&of_network(&self.run)).network,
        };
        let rules = EgressRules::from_policy(&policy);
        // A text that cannot be written is too large for any message.
        let fits = serde_json::to_vec(&rules).is_ok_and(|text| text.len() <= MAX_BYTES);
        if fits { Ok(rules) } else { Err(RulesTooLarge) }
    }
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

    fn hosts(base: &BaseRules, changed: Option<&NetworkPolicy>) -> Vec<String> {
        base.under(changed).unwrap().allowed_hosts
    }

    #[test]
    fn run_without_own_lists_follows_its_session() {
        let created = network(&["a.example"]);
        let base = BaseRules::new(&created, Some(&created));
        assert_eq!(hosts(&base, None), ["a.example"]);
        assert_eq!(hosts(&base, Some(&network(&["b.example"]))), ["b.example"]);
    }

    #[test]
    fn run_with_own_lists_is_only_tightened() {
        let base = BaseRules::new(&network(&["a.example"]), Some(&network(&["*.example"])));
        assert_eq!(hosts(&base, Some(&network(&["a.example", "b.example"]))), ["a.example"]);
        assert!(hosts(&base, Some(&network(&["b.example"]))).is_empty());
    }

    #[test]
    fn rules_that_fit_no_message_are_refused() {
        let many: Vec<String> = (0..20_000).map(|n| format!("host-{n}.example")).collect();
        let policy = NetworkPolicy { allowed_hosts: Some(many), ..NetworkPolicy::default() };
        assert_eq!(BaseRules::new(&policy, None).under(None), Err(RulesTooLarge));
    }
}
