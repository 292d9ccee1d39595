//! The policy of a request under the policies above it.

use std::borrow::Cow;

use codelia_policy::{Plan, Policy, PolicyError};
use codelia_store::SessionSpec;
use codelia_types::Mode;

use super::rules::Rules;
use crate::error::ApiError;

/// Merges a requested policy with the one above it. Fails if no host can enforce it in this mode.
pub(crate) fn admit_policy(
    requested: &Policy,
    upper: &Policy,
    mode: Mode,
) -> Result<Policy, ApiError> {
    requested.check_within(upper)?;
    let policy = upper.merge(requested);
    policy.network.check_size().map_err(PolicyError::from)?;
    policy.check_mode(mode)?;
    Plan::check(mode, None, &policy)?;
    Ok(policy)
}

/// The policy of a session under that of its tenant, which may have changed since.
pub(super) fn under_tenant<'a>(
    spec: &'a SessionSpec,
    rules: &Rules<'_>,
) -> Result<Cow<'a, Policy>, ApiError> {
    let session = &spec.policy;
    let Some(own) = rules.tenant_policy(spec) else { return Ok(Cow::Borrowed(session)) };
    match (&own.container.profile, &session.container.profile) {
        (Some(now), Some(then)) if now != then => Err(ApiError::invalid(
            "policy.container.profile",
            format!(
                "the session has {then:?} and its tenant may only use {now:?}; create another session"
            ),
        )),
        _ => Ok(Cow::Owned(own.merge(session))),
    }
}
