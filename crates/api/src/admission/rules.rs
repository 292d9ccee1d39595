//! What the requests of a caller are checked against, and the limits of runs that request none.

use std::borrow::Cow;

use codelia_policy::{Ceilings, IsolationLevel, Limits, LimitsRequest, Policy, SessionScopes};
use codelia_store::{Caller, SessionSpec};
use codelia_types::CommandSpec;

use crate::{
    options::Options,
    policy::{
        cache::TenantRules,
        effective::{ScopePolicies, ScopeRules},
    },
};

/// What the requests of a caller are checked against.
#[derive(Debug)]
pub(crate) struct Rules<'a> {
    pub(crate) options: &'a Options,
    pub(crate) ceilings: Ceilings,
    pub(crate) floor: IsolationLevel,
    /// The lowest isolation that a run may have with an approval.
    pub(crate) ask_floor: Option<IsolationLevel>,
    /// The tenant's own policy, if it has one.
    pub(crate) tenant: Option<&'a TenantRules>,
    /// The policies of the session's project and user, if it has one of them.
    pub(crate) scopes: Option<ScopeRules>,
}

/// How a run is started, which decides about its default timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// With a terminal: a person uses it.
    Interactive,
    /// By a caller that does not wait for its end.
    Detached,
    /// By a caller that waits for its end.
    Attached,
}

impl Start {
    pub(crate) fn from_command(command: &CommandSpec, ends_with_caller: bool) -> Self {
        match (&command.terminal, ends_with_caller) {
            (Some(_), _) => Self::Interactive,
            (None, false) => Self::Detached,
            (None, true) => Self::Attached,
        }
    }
}

impl<'a> Rules<'a> {
    pub(crate) fn new(
        caller: &Caller,
        options: &'a Options,
        tenant: Option<&'a TenantRules>,
    ) -> Self {
        let ceilings = options.limits.ceilings.of_tenant(&caller.max_limits);
        Self {
            options,
            ceilings,
            floor: caller.floor,
            ask_floor: caller.ask_floor,
            tenant,
            scopes: None,
        }
    }

    /// These rules with the policies of a session's scopes.
    pub(crate) fn under(&self, own: ScopePolicies) -> Rules<'a> {
        let scopes = (!own.is_empty()).then(|| {
            let effective = own.scopes(self.organisation()).effective(&self.options.policy);
            ScopeRules { own, effective }
        });
        Rules {
            options: self.options,
            ceilings: self.ceilings.clone(),
            floor: self.floor,
            ask_floor: self.ask_floor,
            tenant: self.tenant,
            scopes,
        }
    }

    /// What the scopes decided about a session with this policy.
    pub(crate) fn decided(&self, session: &Policy, project: Option<String>) -> SessionScopes {
        let Some(scopes) = &self.scopes else { return SessionScopes::default() };
        scopes.own.scopes(self.organisation()).decided(&self.options.policy, session, project)
    }

    pub(crate) fn organisation(&self) -> Option<&'a Policy> {
        self.tenant.map(|tenant| &tenant.own)
    }

    /// The policy that sessions start from: the installation's, tightened by those of the scopes.
    pub(crate) fn policy(&self) -> &Policy {
        match (&self.scopes, self.tenant) {
            (Some(scopes), _) => &scopes.effective,
            (None, Some(tenant)) => &tenant.effective,
            (None, None) => &self.options.policy,
        }
    }

    /// The own policy of the tenant for a session: without what it delegated when the session was
    /// created, if it still does.
    pub(crate) fn tenant_policy(&self, session: &SessionSpec) -> Option<Cow<'a, Policy>> {
        self.tenant.map(|tenant| tenant.own.without(&session.scopes.delegated))
    }

    /// The ceilings under a policy with these caps.
    pub(crate) fn ceilings_under(&self, caps: &LimitsRequest) -> Ceilings {
        Ceilings(self.ceilings.0.within(caps))
    }

    /// The limits of a run that requests none. Without a timeout of the session, the start of the
    /// run decides.
    pub(crate) fn run_defaults(
        &self,
        session: &SessionSpec,
        start: Start,
        caps: &LimitsRequest,
    ) -> Limits {
        let mut limits = session.limits.clone();
        // A cap of the session's policy is in `requested_limits` too, but is not its timeout.
        let is_requested = session.requested_limits.timeout == Some(limits.timeout);
        limits.timeout = match start {
            Start::Interactive if !is_requested => self.options.limits.timeouts.interactive,
            Start::Detached if !is_requested => self.options.limits.timeouts.detached,
            _ => limits.timeout,
        };
        limits.lowered_to(&self.ceilings_under(caps).0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::admission::tests::{options, rules, session};

    fn timeout(session: &SessionSpec, start: Start, caps: &LimitsRequest) -> u64 {
        let options = options();
        let rules = Rules { ceilings: options.limits.ceilings.clone(), ..rules(&options) };
        rules.run_defaults(session, start, caps).timeout.as_secs()
    }

    fn seconds(timeout: u64) -> LimitsRequest {
        LimitsRequest { timeout: Some(Duration::from_secs(timeout)), ..LimitsRequest::default() }
    }

    #[test]
    fn start_of_run_decides_default_timeout() {
        let none = LimitsRequest::default();
        assert_eq!(timeout(&session(), Start::Attached, &none), 120);
        assert_eq!(timeout(&session(), Start::Interactive, &none), 4 * 3600);
        assert_eq!(timeout(&session(), Start::Detached, &none), 4 * 3600);
        assert_eq!(
            timeout(&session(), Start::Detached, &seconds(3600)),
            3600,
            "capped by the policy"
        );
    }

    #[test]
    fn timeout_of_session_wins_over_start() {
        let with = |limit: u64, requested| {
            let limits = Limits { timeout: Duration::from_secs(limit), ..Limits::default() };
            SessionSpec { limits, requested_limits: seconds(requested), ..session() }
        };
        let none = LimitsRequest::default();
        assert_eq!(timeout(&with(30, 30), Start::Interactive, &none), 30);
        // Only the policy of the session has a cap.
        assert_eq!(timeout(&with(120, 3600), Start::Interactive, &seconds(3600)), 3600);
    }

    #[test]
    fn tenant_ceiling_lowers_defaults() {
        let options = options();
        let ceilings = options.limits.ceilings.of_tenant(&seconds(60));
        let rules = Rules { ceilings, ..rules(&options) };
        let limits = rules.run_defaults(&session(), Start::Detached, &LimitsRequest::default());
        assert_eq!(limits.timeout.as_secs(), 60);
    }
}
