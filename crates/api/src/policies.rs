//! `PolicyService`: checks policies and explains the effective one. Read-only.

use std::sync::Arc;

use codelia_policy::{HostInfo, Ids, Plan, PlanTarget, Policy, RunSpec};
use codelia_proto::v1::{self, policy_service_server::PolicyService};
use codelia_store::{Caller, SessionSpec};
use codelia_types::{Mode, RunId, SessionId};
use tonic::{Request, Response, Status};

use crate::{
    admission::{RunRequest, SessionRequest, admit_policy},
    auth,
    context::Context,
    resource_name,
    rules::Rules,
    session_lookup,
    status::ApiError,
    validate,
};

/// The service.
#[derive(Debug)]
pub(crate) struct Policies {
    pub(crate) context: Arc<Context>,
}

impl Policies {
    async fn check(
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

    async fn explain(
        &self,
        caller: &Caller,
        wire: v1::ExplainPolicyRequest,
    ) -> Result<v1::ExplainPolicyResponse, ApiError> {
        let is_large = validate::is_large_policy(wire.policy.as_ref());
        if wire.session.is_empty() {
            let explain = move |rules: &Rules<'_>| {
                let policy = validate::policy(wire.policy, &rules.ceilings)?;
                let mode = validate::mode(wire.mode)?;
                let request = SessionRequest { mode, policy, ..SessionRequest::default() };
                let session = request.to_spec(rules)?;
                let request = RunRequest::without_command(None, Policy::default());
                explain(&session, &Policy::default(), &request.to_spec(&session, rules)?, rules)
            };
            return self.context.with_policy(caller, is_large, explain).await;
        }
        let name = resource_name::session("session", &wire.session)?;
        let session = session_lookup::find(&self.context.store, &caller.tenant, &name).await?.spec;
        let is_large = is_large || session.policy.is_large();
        let explain = move |rules: &Rules<'_>| {
            let policy = validate::policy(wire.policy, &rules.ceilings)?;
            let request = RunRequest::without_command(validate::mode(wire.mode)?, policy.clone());
            explain(&session, &policy, &request.to_spec(&session, rules)?, rules)
        };
        self.context.with_policy(caller, is_large, explain).await
    }
}

fn explain(
    session: &SessionSpec,
    requested: &Policy,
    run: &RunSpec,
    rules: &Rules<'_>,
) -> Result<v1::ExplainPolicyResponse, ApiError> {
    let upper = rules.tenant.map(|tenant| (&rules.options.policy, &tenant.own));
    let fields = session.policy.explain(upper, requested).into_iter().map(|explained| v1::PolicyField {
        field: explained.field,
        value: explained.value,
        source: v1::PolicySource::from(explained.source).into(),
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
    let (sandbox, session) = (RunId(uuid::Uuid::nil()), SessionId(uuid::Uuid::nil()));
    let ids = Ids { uid: 0, gid: 0 };
    let plan = Plan::isolated(
        PlanTarget { sandbox, session, root: "the session's directory".into() },
        run,
        &HostInfo::fully_capable(),
        ids,
    )?;
    Ok(plan.mounts.iter().map(ToString::to_string).collect())
}

#[tonic::async_trait]
impl PolicyService for Policies {
    async fn check_policy(
        &self,
        request: Request<v1::CheckPolicyRequest>,
    ) -> Result<Response<v1::CheckPolicyResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.check(&caller, request.into_inner()).await?))
    }

    async fn explain_policy(
        &self,
        request: Request<v1::ExplainPolicyRequest>,
    ) -> Result<Response<v1::ExplainPolicyResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.explain(&caller, request.into_inner()).await?))
    }
}
