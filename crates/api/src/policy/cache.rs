//! Copies of the policies of tenants, which callers are held to. Each call learns the version in
//! effect with its key, so a copy is never older than the call.

use std::sync::Arc;

use codelia_policy::{Plan, Policy};
use codelia_store::{Caller, ScopeRef, Store};
use codelia_telemetry::TenantPool;
use codelia_types::{Mode, TenantId};

use crate::{cache::Cache, error::ApiError};

/// Tenants to remember.
const CAPACITY: usize = 1024;

/// The policy of a tenant, ready to be merged.
#[derive(Debug)]
pub(crate) struct TenantRules {
    /// The tenant's own policy.
    pub(crate) own: Policy,
    /// The installation's, tightened by it.
    pub(crate) effective: Policy,
    pub(crate) is_large: bool,
}

impl TenantRules {
    fn new(own: Policy, installation: &Policy) -> Self {
        Self { effective: installation.merge(&own), is_large: own.is_large(), own }
    }
}

/// Policies by tenant, each with its version.
#[derive(Debug, Default)]
pub(crate) struct TenantPolicies(Cache<TenantId, Entry, CAPACITY>);

/// The version, and its policy unless it was cleared.
type Entry = (i64, Option<Arc<TenantRules>>);

impl TenantPolicies {
    /// Returns the policy that a caller is held to in addition to the installation's, if there is
    /// one. A large policy is merged under the limit of `checks`.
    pub(crate) async fn get(
        &self,
        store: &Store,
        checks: &Arc<TenantPool>,
        installation: &Policy,
        caller: &Caller,
    ) -> Result<Option<Arc<TenantRules>>, ApiError> {
        let Some(version) = caller.policy_version else { return Ok(None) };
        if let Some((cached, rules)) = self.0.get(&caller.tenant)
            && cached == version
        {
            return Ok(rules);
        }
        let found =
            store.scope_policy(&ScopeRef::organisation(&caller.tenant), Some(version)).await?;
        let found =
            found.ok_or_else(|| ApiError::internal("the policy of the tenant is missing"))?;
        let rules = match found.policy {
            None => None,
            Some(own) => {
                let merged = if own.is_large() {
                    let installation = installation.clone();
                    let merge = move || TenantRules::new(own, &installation);
                    checks.run(caller.tenant.as_str(), merge).await?
                } else {
                    TenantRules::new(own, installation)
                };
                Some(Arc::new(merged))
            }
        };
        self.0.insert(caller.tenant.clone(), (version, rules.clone()));
        Ok(rules)
    }
}

/// Refuses a policy that no mode can enforce: no session could be created under it.
pub(crate) fn check_enforceable(policy: &Policy) -> Result<(), ApiError> {
    policy.network.check_size().map_err(codelia_policy::PolicyError::from)?;
    let check = |mode: Mode| {
        policy
            .check_mode(mode)
            .map_err(ApiError::from)
            .and(Plan::check(mode, None, policy).map_err(ApiError::from))
    };
    let first = check(Mode::Bwrap);
    if Mode::ALL.into_iter().any(|mode| check(mode).is_ok()) { Ok(()) } else { first }
}
