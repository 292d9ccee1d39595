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
    status::ApiError,
    validate,
};

/// The service.
#[derive(Debug)]
pub(crate) struct Policies {
    pub(crate) context: Arc<Context>,
}

impl Policies {
    fn check(&self, wire: v1::CheckPolicyRequest) -> Result<v1::CheckPolicyResponse, ApiError> {
        let options = &self.context.options;
        let policy = wire.policy.ok_or_else(|| ApiError::invalid("policy", "required"))?;
        let policy = validate::policy(Some(policy), &options.ceilings)?;
        let mode = validate::mode(wire.mode)?.unwrap_or(options.default_mode);
        admit_policy(&policy, &options.policy, mode, None)?;
        Ok(v1::CheckPolicyResponse { policy: Some((&policy.merge(&Policy::default())).into()) })
    }

    async fn explain(
        &self,
        caller: &Caller,
        wire: v1::ExplainPolicyRequest,
    ) -> Result<v1::ExplainPolicyResponse, ApiError> {
        let options = &self.context.options;
        let policy = validate::policy(wire.policy, &options.ceilings)?;
        let mode = validate::mode(wire.mode)?;
        if wire.session.is_empty() {
            let request = SessionRequest { mode, policy, ..SessionRequest::default() };
            let session = request.to_spec(options, caller.floor)?;
            let request = RunRequest::without_command(None, Policy::default());
            let run = request.to_spec(&session, options, caller.floor)?;
            return explain(&session, &Policy::default(), &run);
        }
        let name = resource_name::session("session", &wire.session)?;
        let session = self.context.store.session_get(&caller.tenant, &name).await?;
        let session = session.ok_or_else(|| resource_name::session_not_found(&name))?.spec;
        let request = RunRequest::without_command(mode, policy.clone());
        let run = request.to_spec(&session, options, caller.floor)?;
        explain(&session, &policy, &run)
    }
}

fn explain(
    session: &SessionSpec,
    requested: &Policy,
    run: &RunSpec,
) -> Result<v1::ExplainPolicyResponse, ApiError> {
    let fields = session.policy.explain(requested).into_iter().map(|explained| v1::PolicyField {
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
        auth::caller(request.extensions())?;
        Ok(Response::new(self.check(request.into_inner())?))
    }

    async fn explain_policy(
        &self,
        request: Request<v1::ExplainPolicyRequest>,
    ) -> Result<Response<v1::ExplainPolicyResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.explain(&caller, request.into_inner()).await?))
    }
}
