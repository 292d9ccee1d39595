//! A request for a session: what it says, and the specification that it becomes.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use codelia_policy::{
    FlagChoice, FlagRef, LimitsRequest, Policy, Profile, SessionFlags, SessionProfile,
};
use codelia_proto::v1;
use codelia_store::SessionSpec;
use codelia_types::{Mode, NetworkMode, Reason};
use serde::Serialize;

use super::{
    mode::check_allowed,
    network::{admit_network, default_network},
    policy::admit_policy,
    rules::Rules,
};
use crate::{error::ApiError, wire::validate};

/// A validated request for a session. The serialized fields are its fingerprint.
#[derive(Debug, Default, Serialize)]
pub(crate) struct SessionRequest {
    #[serde(skip)]
    pub(crate) idempotency_key: Option<String>,
    pub(crate) alias: Option<String>,
    pub(crate) mode: Option<Mode>,
    pub(crate) limits: LimitsRequest,
    pub(crate) network: Option<NetworkMode>,
    pub(crate) policy: Policy,
    pub(crate) ttl: Option<Duration>,
    pub(crate) idle_ttl: Option<Duration>,
    pub(crate) allow_data_loss: bool,
    pub(crate) labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) project: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) profile: Option<String>,
    /// What that profile is, once it was looked up.
    #[serde(skip)]
    pub(crate) applied: Option<Arc<Profile>>,
}

impl SessionRequest {
    /// Validates a request without looking anything up.
    pub(crate) fn parse(
        wire: v1::CreateSessionRequest,
        rules: &Rules<'_>,
    ) -> Result<Self, ApiError> {
        let max_ttl = rules.options.max_session_ttl;
        Ok(Self {
            idempotency_key: validate::idempotency_key(wire.idempotency_key)?,
            alias: validate::alias(wire.alias)?,
            mode: validate::mode(wire.mode)?,
            limits: validate::limits(wire.limits)?,
            network: validate::network(wire.network)?,
            policy: validate::policy(wire.policy, &rules.ceilings)?,
            ttl: validate::ttl("ttl", wire.ttl, max_ttl)?,
            idle_ttl: validate::ttl("idle_ttl", wire.idle_ttl, max_ttl)?,
            allow_data_loss: wire.allow_data_loss,
            labels: validate::labels(wire.labels)?,
            project: validate::project("project", wire.project)?,
            applied: validate::profile(&wire.profile, &rules.options.profiles)?,
            profile: Some(wire.profile).filter(|name| !name.is_empty()),
        })
    }

    /// The specification that the session's runs start from, without mode flags.
    pub(crate) fn to_spec(&self, rules: &Rules<'_>) -> Result<SessionSpec, ApiError> {
        self.to_flagged_spec(rules, &FlagChoice::default())
    }

    /// The specification that the session's runs start from: what flags decide is between the
    /// request and the installation's default.
    pub(crate) fn to_flagged_spec(
        &self,
        rules: &Rules<'_>,
        choice: &FlagChoice,
    ) -> Result<SessionSpec, ApiError> {
        let options = rules.options;
        let (mode, flag) = match (self.mode, &choice.mode) {
            (Some(mode), _) => (mode, None),
            (None, Some((mode, flag))) => (*mode, Some(flag.clone())),
            (None, None) => (options.default_mode, None),
        };
        let floor = choice.floor.as_ref().map(|(floor, _)| *floor);
        check_allowed(mode, rules, floor, None)?;
        let mut policy = self.admit_profiled_policy(rules, mode)?.with_defaults();
        let default = default_network(mode, options);
        admit_network(self.network, default, &policy, mode, options)?;
        if mode != Mode::Logical && self.network.is_some() {
            // Runs cannot have more than what the session requested.
            policy.network.mode = self.network;
        }
        let caps = policy.caps();
        let ceilings = rules.ceilings_under(&caps);
        let limits = match &self.applied {
            Some(profile) => self.limits.over(&profile.limits_under(&ceilings)),
            None => self.limits.clone(),
        };
        Ok(SessionSpec {
            mode,
            limits: limits.resolve(&options.limits.defaults.lowered_to(&ceilings.0), &ceilings)?,
            requested_limits: limits.over(&caps),
            network: self.network.or(default),
            scopes: rules.decided(&policy, self.project.clone()),
            policy,
            flags: SessionFlags { mode: flag, floor },
            profile: self.session_profile(),
        })
    }

    /// The policy of the session: its own and that of its profile, under the policies above.
    fn admit_profiled_policy(&self, rules: &Rules<'_>, mode: Mode) -> Result<Policy, ApiError> {
        let Some(profile) = &self.applied else {
            return admit_policy(&self.policy, rules.policy(), mode);
        };
        let upper = admit_policy(&profile.policy, rules.policy(), mode);
        let upper = upper.map_err(|error| error.within("profile"))?;
        admit_policy(&self.policy, &upper, mode)
    }

    fn session_profile(&self) -> Option<SessionProfile> {
        let name = self.profile.as_ref()?;
        let profile = self.applied.as_ref()?;
        Some(SessionProfile { name: name.clone(), env: profile.env.clone() })
    }

    /// The flag that refuses the session, if it would be admitted without flags.
    pub(crate) fn refused_by(
        &self,
        rules: &Rules<'_>,
        choice: &FlagChoice,
        error: &ApiError,
    ) -> Option<FlagRef> {
        self.to_spec(rules).ok()?;
        match (error.reason(), &choice.floor, &choice.mode) {
            (Reason::IsolationFloor, Some((_, flag)), _) => Some(flag.clone()),
            (_, _, Some((_, flag))) => Some(flag.clone()),
            (_, _, None) => None,
        }
    }
}
