//! The policies of tenants: the operator's calls, and the copies that callers are held to. Each call
//! learns the version in effect with its key, so a copy is never older than the call.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use codelia_policy::{Plan, Policy};
use codelia_proto::{timestamp_to_proto, v1};
use codelia_store::{Caller, NewPolicyVersion, PolicyVersion, ScopePolicySet, ScopeRef};
use codelia_types::{Mode, TenantId};

use crate::{
    context::Context,
    operator::{Operator, tenant_not_found},
    resource_name::{self, TenantName},
    rules::Rules,
    status::ApiError,
    validate,
};

/// The cache is cleared when it has this many entries.
const MAX_ENTRIES: usize = 1024;

/// The policy of a tenant, ready to be merged.
#[derive(Debug)]
pub(crate) struct TenantRules {
    /// The tenant's own policy.
    pub(crate) own: Policy,
    /// The installation's, tightened by it.
    pub(crate) effective: Policy,
    pub(crate) is_large: bool,
}

/// Policies by tenant, each with its version.
#[derive(Debug, Default)]
pub(crate) struct TenantPolicies {
    entries: Mutex<HashMap<TenantId, Entry>>,
}

/// The version, and its policy unless it was cleared.
type Entry = (i64, Option<Arc<TenantRules>>);

impl TenantPolicies {
    /// Returns the policy that a caller is held to in addition to the installation's, if there is one.
    pub(crate) async fn of(
        &self,
        context: &Arc<Context>,
        caller: &Caller,
    ) -> Result<Option<Arc<TenantRules>>, ApiError> {
        let Some(version) = caller.policy_version else { return Ok(None) };
        if let Some(rules) = self.cached(&caller.tenant, version) {
            return Ok(rules);
        }
        let found =
            context.store.scope_policy(&ScopeRef::organisation(&caller.tenant), Some(version)).await?;
        let found = found.ok_or_else(|| ApiError::internal("the policy of the tenant is missing"))?;
        let rules = match found.policy {
            None => None,
            Some(own) => {
                let (is_large, owner) = (own.is_large(), context.clone());
                let merge = move || {
                    let effective = owner.options.policy.merge(&own);
                    TenantRules { own, effective, is_large }
                };
                let merged = match is_large {
                    true => context.policy_checks.run(caller.tenant.as_str(), merge).await?,
                    false => merge(),
                };
                Some(Arc::new(merged))
            }
        };
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= MAX_ENTRIES {
            entries.clear();
        }
        entries.insert(caller.tenant.clone(), (version, rules.clone()));
        Ok(rules)
    }

    fn cached(&self, tenant: &TenantId, version: i64) -> Option<Option<Arc<TenantRules>>> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.get(tenant).filter(|(of, _)| *of == version).map(|(_, rules)| rules.clone())
    }
}

impl Operator {
    pub(crate) async fn set_policy(
        &self,
        caller: &Caller,
        wire: v1::SetTenantPolicyRequest,
    ) -> Result<v1::TenantPolicy, ApiError> {
        let id = tenant_id(caller, &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let store = &self.context.store;
        let tenant = store.tenant_get(&id).await?.ok_or_else(|| tenant_not_found(&id))?;
        let is_large = validate::is_large_policy(wire.policy.as_ref());
        let policy =
            wire.policy.ok_or_else(|| ApiError::invalid("policy", "required; or clear the policy"))?;
        let check = move |rules: &Rules<'_>| {
            let options = rules.options;
            let ceilings = options.ceilings.of_tenant(&tenant.max_limits);
            let policy = validate::scope_policy(Some(policy), &ceilings)?;
            policy.check_tenant(&options.policy, options.default_network)?;
            check_enforceable(&options.policy.merge(&policy))?;
            Ok(policy)
        };
        let policy = self.context.with_policy(caller, is_large, check).await?;
        Ok(to_proto(&id, self.store_policy(caller, &id, Some(&policy), &reason).await?))
    }

    pub(crate) async fn clear_policy(
        &self,
        caller: &Caller,
        wire: v1::ClearTenantPolicyRequest,
    ) -> Result<v1::TenantPolicy, ApiError> {
        let id = tenant_id(caller, &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        Ok(to_proto(&id, self.store_policy(caller, &id, None, &reason).await?))
    }

    async fn store_policy(
        &self,
        caller: &Caller,
        id: &TenantId,
        policy: Option<&Policy>,
        reason: &str,
    ) -> Result<PolicyVersion, ApiError> {
        let new = NewPolicyVersion { policy, expected: None, restored: None, reason, key: caller.key };
        match self.context.store.scope_policy_set(&ScopeRef::organisation(id), new).await? {
            ScopePolicySet::Set(set) => Ok(*set),
            ScopePolicySet::NoTenant => Err(tenant_not_found(id)),
            ScopePolicySet::Changed(_) | ScopePolicySet::TooMany => {
                Err(ApiError::internal("the policy of a tenant was not set"))
            }
        }
    }

    pub(crate) async fn get_policy(
        &self,
        caller: &Caller,
        wire: v1::GetTenantPolicyRequest,
    ) -> Result<v1::TenantPolicy, ApiError> {
        let id = tenant_id(caller, &wire.name)?;
        if wire.version < 0 {
            return Err(ApiError::invalid("version", "must not be negative; 0 is the one in effect"));
        }
        let store = &self.context.store;
        let version = Some(wire.version).filter(|version| *version != 0);
        if let Some(found) = store.scope_policy(&ScopeRef::organisation(&id), version).await? {
            return Ok(to_proto(&id, found));
        }
        store.tenant_get(&id).await?.ok_or_else(|| tenant_not_found(&id))?;
        match version {
            Some(version) => Err(ApiError::not_found("version of the policy", version)),
            None => Ok(v1::TenantPolicy { tenant_id: id.to_string(), ..v1::TenantPolicy::default() }),
        }
    }
}

fn tenant_id(caller: &Caller, name: &str) -> Result<TenantId, ApiError> {
    match resource_name::tenant("name", name)? {
        TenantName::Id(id) => Ok(id),
        TenantName::Own => Ok(caller.tenant.clone()),
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

fn to_proto(tenant: &TenantId, set: PolicyVersion) -> v1::TenantPolicy {
    v1::TenantPolicy {
        tenant_id: tenant.to_string(),
        version: set.version,
        policy: set.policy.as_ref().map(Into::into),
        key_id: set.key.to_string(),
        reason: set.reason,
        set_time: Some(timestamp_to_proto(set.set_at)),
    }
}
