//! `PolicyService`: checks policies and explains the effective one. `stored` has the
//! stored ones.

use std::sync::Arc;

use codelia_policy::{
    ExplainedField, HostInfo, Ids, Layout, Plan, PlanTarget, Policy, RunSpec, Source,
};
use codelia_proto::v1::{self, policy_service_server::PolicyService};
use codelia_store::{Caller, SessionSpec};
use codelia_types::{Mode, RunId, SessionId};

use super::effective::ScopePolicies;
use crate::{
    admission::{RunRequest, SessionRequest, admit_policy, rules::Rules},
    context::Context,
    error::ApiError,
    rpc::serve,
    sessions::lookup,
    wire::{resource_name, to_proto, validate},
};

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct Policies {
    pub(crate) context: Arc<Context>,
}

impl Policies {
    async fn check_policy(
        &self,
        caller: &Caller,
        wire: v1::CheckPolicyRequest,
    ) -> Result<v1::CheckPolicyResponse, ApiError> {
        let is_large = validate::is_large_policy(wire.policy.as_ref());
        let check = move |rules: &Rules<'_>| {
            let policy = wire.policy.ok_or_else(|| ApiError::invalid("policy", "required"))?;
            let policy = validate::policy(Some(policy), &rules.ceilings)?;
            let mode = validate::mode(wire.mode)?.unwrap_or(rules.options.default_mode);
            admit_policy(&policy, rules.policy(), mode)?;
            Ok(v1::CheckPolicyResponse { policy: Some((&policy.merge(&Policy::default())).into()) })
        };
        self.context.with_policy(caller, is_large, check).await
    }

    async fn explain_policy(
        &self,
        caller: &Caller,
        wire: v1::ExplainPolicyRequest,
    ) -> Result<v1::ExplainPolicyResponse, ApiError> {
        let is_large = validate::is_large_policy(wire.policy.as_ref());
        let project = validate::project("project", wire.project)?;
        let applied = validate::profile(&wire.profile, &self.context.options.profiles)?;
        let profile = applied.is_some().then_some(wire.profile);
        if wire.session.is_empty() {
            let scopes =
                ScopePolicies::of_new(&self.context.store, caller, project.as_deref()).await?;
            let is_large = is_large || scopes.is_large();
            let explain = move |rules: &Rules<'_>| {
                let rules = &rules.under(scopes);
                let policy = validate::policy(wire.policy, &rules.ceilings)?;
                let mode = validate::mode(wire.mode)?;
                let request = SessionRequest {
                    mode,
                    policy,
                    project,
                    profile,
                    applied,
                    ..SessionRequest::default()
                };
                let session = request.to_spec(rules)?;
                let request = RunRequest::without_command(None, Policy::default());
                explain(&session, &Policy::default(), &request.to_spec(&session, rules)?, rules)
            };
            return self.context.with_policy(caller, is_large, explain).await;
        }
        if project.is_some() {
            return Err(ApiError::invalid(
                "project",
                "only for a new session; leave out the session",
            ));
        }
        if profile.is_some() {
            return Err(ApiError::invalid(
                "profile",
                "only for a new session; leave out the session",
            ));
        }
        let name = resource_name::session("session", &wire.session)?;
        let session = lookup::find(&self.context.store, &caller.tenant, &name).await?.spec;
        let is_large = is_large || session.policy.is_large();
        let explain = move |rules: &Rules<'_>| {
            let policy = validate::policy(wire.policy, &rules.ceilings)?;
            let request = RunRequest::without_command(validate::mode(wire.mode)?, policy.clone());
            explain(&session, &policy, &request.to_spec(&session, rules)?, rules)
        };
        self.context.with_policy(caller, is_large, explain).await
    }

    async fn list_profiles(
        &self,
        _: &Caller,
        _: v1::ListProfilesRequest,
    ) -> Result<v1::ListProfilesResponse, ApiError> {
        let summary =
            |(name, profile)| v1::Profile { policy: None, ..to_proto::profile(name, profile) };
        let profiles = self.context.options.profiles.iter().map(summary).collect();
        Ok(v1::ListProfilesResponse { profiles })
    }

    async fn get_profile(
        &self,
        _: &Caller,
        wire: v1::GetProfileRequest,
    ) -> Result<v1::GetProfileResponse, ApiError> {
        let profiles = &self.context.options.profiles;
        let unknown =
            || ApiError::invalid("name", format!("unknown; known are: {}", profiles.names()));
        let profile = profiles.get(&wire.name).ok_or_else(unknown)?;
        Ok(v1::GetProfileResponse { profile: Some(to_proto::profile(&wire.name, profile)) })
    }
}

fn explain(
    session: &SessionSpec,
    requested: &Policy,
    run: &RunSpec,
    rules: &Rules<'_>,
) -> Result<v1::ExplainPolicyResponse, ApiError> {
    let own = rules.tenant_policy(session);
    let upper = own.as_deref().map(|own| (&rules.options.policy, own));
    let source = |explained: &ExplainedField| match session.scopes.sources.get(&explained.field) {
        Some(source) if explained.source == Source::Session => *source,
        _ => explained.source,
    };
    let fields =
        session.policy.explain(upper, requested).into_iter().map(|explained| v1::PolicyField {
            source: v1::PolicySource::from(source(&explained)).into(),
            field: explained.field,
            value: explained.value,
        });
    Ok(v1::ExplainPolicyResponse {
        policy: Some((&run.policy).into()),
        mode: v1::SandboxMode::from(run.mode).into(),
        limits: Some((&run.limits).into()),
        fields: fields.collect(),
        mounts: mounts(run)?,
    })
}

/// The mounts of such a run on a host with every capability.
fn mounts(run: &RunSpec) -> Result<Vec<String>, ApiError> {
    if run.mode == Mode::Logical {
        return Ok(Vec::new());
    }
    let sandbox = RunId(uuid::Uuid::nil());
    let session = SessionId(uuid::Uuid::nil());
    let ids = Ids { uid: 0, gid: 0 };
    let plan = Plan::isolated(
        PlanTarget { sandbox, session, root: "the session's directory".into() },
        run,
        &HostInfo::fully_capable(),
        ids,
    )?;
    let layout = plan.layout.as_ref().map(Layout::descriptions).unwrap_or_default();
    Ok(plan.mounts.iter().map(ToString::to_string).chain(layout).collect())
}

serve! {
    PolicyService for Policies;
    call check_policy(CheckPolicyRequest) -> CheckPolicyResponse;
    call explain_policy(ExplainPolicyRequest) -> ExplainPolicyResponse;
    call set_scope_policy(SetScopePolicyRequest) -> SetScopePolicyResponse;
    call get_scope_policy(GetScopePolicyRequest) -> GetScopePolicyResponse;
    call delete_scope_policy(DeleteScopePolicyRequest) -> DeleteScopePolicyResponse;
    call rollback_scope_policy(RollbackScopePolicyRequest) -> RollbackScopePolicyResponse;
    call list_scope_policy_versions(ListScopePolicyVersionsRequest) -> ListScopePolicyVersionsResponse;
    call list_projects(ListProjectsRequest) -> ListProjectsResponse;
    call list_profiles(ListProfilesRequest) -> ListProfilesResponse;
    call get_profile(GetProfileRequest) -> GetProfileResponse;
    call dry_run_scope_policy(DryRunScopePolicyRequest) -> DryRunScopePolicyResponse;
}
