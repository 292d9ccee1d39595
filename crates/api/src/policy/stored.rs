//! The stored policies of scopes: who may set and read them, their versions, and dry runs on
//! recorded runs.

use std::{collections::HashMap, time::Duration};

use codelia_policy::{DryRun, Policy, PolicyScope, RunSpec, SessionScopes};
use codelia_proto::{timestamp_to_proto, v1};
use codelia_store::{
    Caller, MAX_POLICY_NAMES, NewPolicyVersion, PolicyChange, PolicyVersion, RecordedRun, Scope,
    ScopePolicySet, ScopeRef,
};
use codelia_types::{KeyId, Reason, RunId};
use time::OffsetDateTime;

use super::{cache::check_enforceable, service::Policies};
use crate::{
    admin::tenant_not_found,
    admission::rules::Rules,
    auth::{has_scope, require_scope},
    error::ApiError,
    wire::{
        paging::Page,
        resource_name::{self, TenantName},
        validate,
    },
};

/// How old runs are that a policy is tried on, by default and at most.
const SINCE: Duration = Duration::from_secs(24 * 3600);
const MAX_SINCE: Duration = Duration::from_secs(31 * 24 * 3600);

/// What a caller wants to do with a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl Policies {
    pub(super) async fn set_scope_policy(
        &self,
        caller: &Caller,
        wire: v1::SetScopePolicyRequest,
    ) -> Result<v1::SetScopePolicyResponse, ApiError> {
        let of = target(caller, wire.scope, wire.name, Access::Write)?;
        let reason = validate::reason(wire.reason)?;
        let expected = expected(wire.expected_version)?;
        let policy =
            wire.policy.ok_or_else(|| ApiError::invalid("policy", "required; or delete it"))?;
        let policy = self.checked(caller, &of, policy).await?;
        let new = NewPolicyVersion {
            policy: Some(&policy),
            expected,
            restored: None,
            reason: &reason,
            key: caller.key,
        };
        let scope_policy = Some(self.store(&of, new).await?);
        Ok(v1::SetScopePolicyResponse { scope_policy })
    }

    pub(super) async fn delete_scope_policy(
        &self,
        caller: &Caller,
        wire: v1::DeleteScopePolicyRequest,
    ) -> Result<v1::DeleteScopePolicyResponse, ApiError> {
        let of = target(caller, wire.scope, wire.name, Access::Write)?;
        let reason = validate::reason(wire.reason)?;
        let expected = expected(wire.expected_version)?;
        self.version(&of, None).await?.ok_or_else(|| ApiError::not_found("policy", &of.name))?;
        let new = NewPolicyVersion {
            policy: None,
            expected,
            restored: None,
            reason: &reason,
            key: caller.key,
        };
        let scope_policy = Some(self.store(&of, new).await?);
        Ok(v1::DeleteScopePolicyResponse { scope_policy })
    }

    pub(super) async fn rollback_scope_policy(
        &self,
        caller: &Caller,
        wire: v1::RollbackScopePolicyRequest,
    ) -> Result<v1::RollbackScopePolicyResponse, ApiError> {
        let of = target(caller, wire.scope, wire.name, Access::Write)?;
        let reason = validate::reason(wire.reason)?;
        let version = version("version", wire.version)?.unwrap_or_default();
        let restored = self.version(&of, Some(version)).await?;
        let restored =
            restored.ok_or_else(|| ApiError::not_found("version of the policy", version))?;
        // What is above may have become tighter.
        let policy = match restored.policy {
            Some(policy) => Some(self.checked(caller, &of, (&policy).into()).await?),
            None => None,
        };
        let new = NewPolicyVersion {
            policy: policy.as_ref(),
            expected: None,
            restored: Some(version),
            reason: &reason,
            key: caller.key,
        };
        let scope_policy = Some(self.store(&of, new).await?);
        Ok(v1::RollbackScopePolicyResponse { scope_policy })
    }

    pub(super) async fn get_scope_policy(
        &self,
        caller: &Caller,
        wire: v1::GetScopePolicyRequest,
    ) -> Result<v1::GetScopePolicyResponse, ApiError> {
        let of = target(caller, wire.scope, wire.name, Access::Read)?;
        let version = version("version", wire.version)?;
        let scope_policy = match (self.version(&of, version).await?, version) {
            (Some(found), _) => to_proto(&of, found),
            (None, Some(version)) => {
                return Err(ApiError::not_found("version of the policy", version));
            }
            (None, None) => {
                let store = &self.context.store;
                store.tenant_get(&of.tenant).await?.ok_or_else(|| tenant_not_found(&of.tenant))?;
                named(&of)
            }
        };
        Ok(v1::GetScopePolicyResponse { scope_policy: Some(scope_policy) })
    }

    pub(super) async fn list_scope_policy_versions(
        &self,
        caller: &Caller,
        wire: v1::ListScopePolicyVersionsRequest,
    ) -> Result<v1::ListScopePolicyVersionsResponse, ApiError> {
        let mut page = Page::<i64, _>::parse(&caller.tenant, &wire)?;
        let of = target(caller, wire.scope, wire.name, Access::Read)?;
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            let rows = self.context.store.scope_policy_history(&of, page.after, limit).await?;
            page.add(rows, |change| (change.version, change_to_proto(&of, change)));
        }
        let (versions, next_page_token) = page.finish();
        Ok(v1::ListScopePolicyVersionsResponse { versions, next_page_token })
    }

    pub(super) async fn list_projects(
        &self,
        caller: &Caller,
        wire: v1::ListProjectsRequest,
    ) -> Result<v1::ListProjectsResponse, ApiError> {
        let mut page = Page::<String, _>::parse(&caller.tenant, &wire)?;
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            let rows = self
                .context
                .store
                .project_list(&caller.tenant, page.after.as_deref(), limit)
                .await?;
            page.add(rows, |(name, change)| {
                let tenant = caller.tenant.clone();
                let of = ScopeRef { tenant, scope: PolicyScope::Project, name: name.clone() };
                (name, change_to_proto(&of, change))
            });
        }
        let (projects, next_page_token) = page.finish();
        Ok(v1::ListProjectsResponse { projects, next_page_token })
    }

    pub(super) async fn dry_run_scope_policy(
        &self,
        caller: &Caller,
        wire: v1::DryRunScopePolicyRequest,
    ) -> Result<v1::DryRunScopePolicyResponse, ApiError> {
        let mut page = Page::<RunId, _>::parse(&caller.tenant, &wire)?;
        let of = target(caller, wire.scope, wire.name, Access::Read)?;
        if of.tenant != caller.tenant {
            // It would show runs of the tenant.
            return Err(tenant_not_found(&of.tenant));
        }
        let since = OffsetDateTime::now_utc()
            - validate::ttl("since", wire.since, MAX_SINCE)?.unwrap_or(SINCE);
        let policy = wire.policy.ok_or_else(|| ApiError::invalid("policy", "required"))?;
        let mut judge = Judge {
            policy: self.checked(caller, &of, policy).await?,
            by_delegated: HashMap::new(),
        };
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            let runs = self.context.store.run_recorded(&of, since, page.after, limit).await?;
            let work = move || {
                let results: Result<Vec<_>, _> = runs.iter().map(|run| judge.result(run)).collect();
                (judge, results)
            };
            let (returned, results) =
                self.context.policy_checks.run(caller.tenant.as_str(), work).await?;
            judge = returned;
            page.add(results?, |result| result);
        }
        let (results, next_page_token) = page.finish();
        Ok(v1::DryRunScopePolicyResponse { results, next_page_token })
    }

    /// Validates a policy of a scope within the policies above it as they are now.
    async fn checked(
        &self,
        caller: &Caller,
        of: &ScopeRef,
        wire: v1::Policy,
    ) -> Result<Policy, ApiError> {
        let is_large = validate::is_large_policy(Some(&wire));
        let tenant = self.context.store.tenant_get(&of.tenant).await?;
        let tenant = tenant.ok_or_else(|| tenant_not_found(&of.tenant))?;
        let scope = of.scope;
        let check = move |rules: &Rules<'_>| {
            let options = rules.options;
            let policy = validate::scope_policy(
                Some(wire),
                &options.limits.ceilings.of_tenant(&tenant.max_limits),
            )?;
            if scope == PolicyScope::User && !policy.delegate.is_empty() {
                return Err(ApiError::invalid(
                    "policy.delegate",
                    "nothing is below a user; remove it",
                ));
            }
            // The organisation's policy can only be the caller's: others have no scope below it
            // here.
            let above = rules.organisation().filter(|_| scope != PolicyScope::Organisation);
            policy.check_scope(&options.policy, above, options.default_network)?;
            check_enforceable(&options.policy.merge(&policy))?;
            Ok(policy)
        };
        self.context.with_policy(caller, is_large, check).await
    }

    async fn version(
        &self,
        of: &ScopeRef,
        version: Option<i64>,
    ) -> Result<Option<PolicyVersion>, ApiError> {
        Ok(self.context.store.scope_policy(of, version).await?)
    }

    async fn store(
        &self,
        of: &ScopeRef,
        new: NewPolicyVersion<'_>,
    ) -> Result<v1::ScopePolicy, ApiError> {
        match self.context.store.scope_policy_set(of, new).await? {
            ScopePolicySet::Set(set) => Ok(to_proto(of, *set)),
            ScopePolicySet::Changed(version) => Err(changed(version)),
            ScopePolicySet::TooMany => Err(too_many()),
            ScopePolicySet::NoTenant => Err(tenant_not_found(&of.tenant)),
        }
    }
}

/// Another version of a policy is in effect than expected; 0 for none.
fn changed(version: i64) -> ApiError {
    let message = match version {
        0 => "expected_version: the scope has no policy; leave the field out".to_owned(),
        _ => format!(
            "expected_version: version {version} is in effect; read it and repeat the change"
        ),
    };
    ApiError::new(Reason::PolicyChanged, message).with("version", version)
}

fn too_many() -> ApiError {
    let message = format!("the tenant has {MAX_POLICY_NAMES} of them; use a name again");
    ApiError::new(Reason::TooManyPolicies, message)
}

/// Tries a policy on runs.
#[derive(Debug)]
struct Judge {
    policy: Policy,
    /// By what the organisation delegated in the session of a run.
    by_delegated: HashMap<Vec<String>, DryRun>,
}

impl Judge {
    fn result(&mut self, run: &RecordedRun) -> Result<(RunId, v1::DryRunResult), ApiError> {
        let spec: RunSpec = serde_json::from_str(&run.spec).map_err(ApiError::internal)?;
        let scopes: Option<SessionScopes> = run
            .scopes
            .as_deref()
            .map(serde_json::from_str)
            .transpose()
            .map_err(ApiError::internal)?;
        let delegated = scopes.unwrap_or_default().delegated;
        let policy = &self.policy;
        let dry_run = self
            .by_delegated
            .entry(delegated)
            .or_insert_with_key(|delegated| DryRun::new(policy.without(delegated).into_owned()));
        let judged = dry_run.judge(&spec);
        let (verdict, fields, message) = match judged.refused {
            Some(error) => (v1::DryRunVerdict::Refused, vec![error.field], error.message),
            None if judged.changed.is_empty() => {
                (v1::DryRunVerdict::Unchanged, Vec::new(), String::new())
            }
            None => {
                let fields = judged.changed.into_iter().map(str::to_owned).collect();
                (v1::DryRunVerdict::Changed, fields, String::new())
            }
        };
        let result = v1::DryRunResult {
            run: format!("sessions/{}/runs/{}", run.session, run.id),
            create_time: Some(timestamp_to_proto(run.created_at)),
            verdict: verdict.into(),
            fields,
            message,
        };
        Ok((run.id, result))
    }
}

/// Whose policy a caller may read or write. What belongs to another tenant does not exist.
fn target(caller: &Caller, scope: i32, name: String, access: Access) -> Result<ScopeRef, ApiError> {
    let own = |scope, name| ScopeRef { tenant: caller.tenant.clone(), scope, name };
    match validate::enum_value("scope", scope)? {
        v1::PolicyScope::Unspecified => {
            Err(ApiError::invalid("scope", "required: organisation, project or user"))
        }
        v1::PolicyScope::Organisation => {
            let tenant = match name.as_str() {
                "" => caller.tenant.clone(),
                name => match resource_name::tenant("name", name)? {
                    TenantName::Own => caller.tenant.clone(),
                    TenantName::Id(id) => id,
                },
            };
            if tenant != caller.tenant && !has_scope(caller, Scope::Operator) {
                return Err(tenant_not_found(&tenant));
            }
            if access == Access::Write {
                require_scope(caller, Scope::Operator)?;
            }
            Ok(ScopeRef::organisation(&tenant))
        }
        v1::PolicyScope::Project => {
            if access == Access::Write {
                require_scope(caller, Scope::Admin)?;
            }
            let name = validate::project("name", name)?;
            let name =
                name.ok_or_else(|| ApiError::invalid("name", "required: the name of the project"))?;
            Ok(own(PolicyScope::Project, name))
        }
        v1::PolicyScope::User => {
            let key: KeyId = match name.as_str() {
                "" => caller.key,
                name => name
                    .parse()
                    .map_err(|_| ApiError::invalid("name", "must be the id of a key"))?,
            };
            match access {
                Access::Write if key != caller.key => {
                    return Err(ApiError::invalid(
                        "name",
                        "a key sets only its own policy; leave it out",
                    ));
                }
                Access::Read if key != caller.key => require_scope(caller, Scope::Admin)?,
                Access::Read | Access::Write => {}
            }
            Ok(own(PolicyScope::User, key.to_string()))
        }
    }
}

/// A version in a request; `None` for 0.
fn version(field: &str, number: i64) -> Result<Option<i64>, ApiError> {
    match number {
        ..0 => Err(ApiError::invalid(field, "must not be negative")),
        0 => Ok(None),
        number => Ok(Some(number)),
    }
}

fn expected(number: Option<i64>) -> Result<Option<i64>, ApiError> {
    number
        .map(|number| version("expected_version", number).map(Option::unwrap_or_default))
        .transpose()
}

fn named(of: &ScopeRef) -> v1::ScopePolicy {
    let (scope, name) = match of.scope {
        PolicyScope::Organisation => (v1::PolicyScope::Organisation, of.tenant.to_string()),
        PolicyScope::Project => (v1::PolicyScope::Project, of.name.clone()),
        PolicyScope::User => (v1::PolicyScope::User, of.name.clone()),
    };
    v1::ScopePolicy { scope: scope.into(), name, ..v1::ScopePolicy::default() }
}

fn to_proto(of: &ScopeRef, set: PolicyVersion) -> v1::ScopePolicy {
    let policy = set.policy.as_ref().map(Into::into);
    let PolicyVersion { version, key, reason, set_at, .. } = set;
    let is_deleted = policy.is_none();
    let change = PolicyChange { version, is_deleted, key, reason, set_at };
    v1::ScopePolicy { policy, ..change_to_proto(of, change) }
}

fn change_to_proto(of: &ScopeRef, change: PolicyChange) -> v1::ScopePolicy {
    v1::ScopePolicy {
        version: change.version,
        deleted: change.is_deleted,
        key_id: change.key.to_string(),
        reason: change.reason,
        set_time: Some(timestamp_to_proto(change.set_at)),
        ..named(of)
    }
}
