//! `ApprovalService`: shows requests that a person decides about, and takes the decisions. The auth
//! layer requires the scope `approve` for decisions.

mod not_decided;
mod watch;

use std::sync::Arc;

use codelia_policy::IsolationLevel;
use codelia_proto::v1::{self, approval_service_server::ApprovalService};
use codelia_store::{
    Approval, ApprovalFilter, ApprovalScope, ApprovalStatus, Caller, Decision, DecisionResult,
    Permitted, Revocation, RunToWake,
};
use codelia_telemetry::task;
use codelia_types::{ApprovalId, NetworkMode, SessionId};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use self::watch::{BUFFER, Watch};
use crate::{
    auth,
    context::Context,
    error::ApiError,
    options::Options,
    rpc::{ResponseStream, serve},
    server::request::Deadline,
    sessions::lookup,
    wire::{
        paging::Page,
        resource_name::{self, SessionSelector},
        to_proto, validate, words,
    },
};

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct Approvals {
    pub(crate) context: Arc<Context>,
}

impl Approvals {
    /// The session that a parent names; `None` for all of them.
    async fn session(&self, caller: &Caller, parent: &str) -> Result<Option<SessionId>, ApiError> {
        match resource_name::session_selector("parent", parent)? {
            SessionSelector::Any => Ok(None),
            SessionSelector::One(name) => {
                let session = lookup::find(&self.context.store, &caller.tenant, &name).await?;
                Ok(Some(session.id))
            }
        }
    }

    async fn list_approvals(
        &self,
        caller: &Caller,
        wire: v1::ListApprovalsRequest,
    ) -> Result<v1::ListApprovalsResponse, ApiError> {
        let mut page = Page::<ApprovalId, _>::parse(&caller.tenant, &wire)?;
        let status = match validate::enum_value("filter", wire.filter)? {
            v1::ApprovalFilter::Unspecified | v1::ApprovalFilter::Pending => {
                ApprovalStatus::Pending
            }
            v1::ApprovalFilter::Granted => ApprovalStatus::Granted,
            v1::ApprovalFilter::All => ApprovalStatus::Any,
        };
        let session = self.session(caller, &wire.parent).await?;
        let mut filter = ApprovalFilter { status, session, before: None };
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            filter.before = page.after;
            let rows = self.context.store.approval_list(&caller.tenant, &filter, limit).await?;
            page.add(rows, |approval| (approval.id, to_proto::approval(approval)));
        }
        let (approvals, next_page_token) = page.finish();
        Ok(v1::ListApprovalsResponse { approvals, next_page_token })
    }

    async fn get_approval(
        &self,
        caller: &Caller,
        wire: v1::GetApprovalRequest,
    ) -> Result<v1::GetApprovalResponse, ApiError> {
        let id = resource_name::approval("name", &wire.name)?;
        let found = self.context.store.approval_get(&caller.tenant, id).await?;
        let approval = found.ok_or_else(|| ApiError::not_found("approval", id))?;
        Ok(v1::GetApprovalResponse { approval: Some(to_proto::approval(approval)) })
    }

    async fn watch_approvals(
        &self,
        request: Request<v1::WatchApprovalsRequest>,
    ) -> Result<Response<ResponseStream<v1::WatchApprovalsResponse>>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let session = self.session(&caller, &request.get_ref().parent).await?;
        // Before the response: a change that the caller makes after it must be sent.
        let began = self.context.store.database_now().await.map_err(ApiError::from)?;
        let (responses, receiver) = mpsc::channel(BUFFER);
        let watch = Watch::new(self.context.clone(), caller, session, began, responses);
        task::background("watch approvals", watch.run(deadline));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn decide_approval(
        &self,
        caller: &Caller,
        wire: v1::DecideApprovalRequest,
    ) -> Result<v1::DecideApprovalResponse, ApiError> {
        let id = resource_name::approval("name", &wire.name)?;
        let permitted = permitted(&self.context.options);
        let decision = Decision {
            allow: allowed_scope(&wire)?,
            reach: words::parse("reach", wire.reach)?,
            key: caller.key,
            reason: reason(wire.reason)?,
            permitted,
        };
        let result = self.context.store.approval_decide(&caller.tenant, id, &decision).await?;
        let (approval, run) = decided(id, result)?;
        if let Some(run) = run {
            self.wake(run);
        }
        Ok(v1::DecideApprovalResponse { approval: Some(to_proto::approval(approval)) })
    }

    /// Lets a worker find the run at once. Its poll finds it as well.
    fn wake(&self, run: RunToWake) {
        let context = self.context.clone();
        task::background("wake", async move {
            match run.holder {
                Some(address) => context.worker_calls.wake(&address, run.session).await,
                None => drop(context.worker_calls.offer(run.session, run.mode).await),
            }
        });
    }

    async fn revoke_approval(
        &self,
        caller: &Caller,
        wire: v1::RevokeApprovalRequest,
    ) -> Result<v1::RevokeApprovalResponse, ApiError> {
        let id = resource_name::approval("name", &wire.name)?;
        let revocation = Revocation { key: caller.key, reason: reason(wire.reason)? };
        let result = self.context.store.approval_revoke(&caller.tenant, id, &revocation).await?;
        let (approval, _) = decided(id, result)?;
        Ok(v1::RevokeApprovalResponse { approval: Some(to_proto::approval(approval)) })
    }
}

/// What this installation permits. The host's network needs its operator's policy.
fn permitted(options: &Options) -> Permitted {
    Permitted {
        network: options.policy.network.mode.unwrap_or(NetworkMode::Proxy),
        isolation: if options.allow_logical {
            IsolationLevel::None
        } else {
            IsolationLevel::Process
        },
    }
}

/// What a decision allows; `None` if it denies.
fn allowed_scope(wire: &v1::DecideApprovalRequest) -> Result<Option<ApprovalScope>, ApiError> {
    let scope = words::parse("scope", wire.scope)?;
    match (validate::enum_value("decision", wire.decision)?, scope) {
        (v1::ApprovalDecision::Unspecified, _) => {
            Err(ApiError::invalid("decision", "must be set: allow or deny"))
        }
        (v1::ApprovalDecision::Allow, scope) => Ok(Some(scope.unwrap_or(ApprovalScope::Once))),
        (v1::ApprovalDecision::Deny, None) => Ok(None),
        (v1::ApprovalDecision::Deny, Some(_)) => {
            Err(ApiError::invalid("scope", "only for an allowed approval; leave it unset to deny"))
        }
    }
}

fn reason(text: String) -> Result<Option<String>, ApiError> {
    if text.is_empty() { Ok(None) } else { validate::reason(text).map(Some) }
}

fn decided(
    id: ApprovalId,
    result: DecisionResult,
) -> Result<(Approval, Option<RunToWake>), ApiError> {
    match result {
        DecisionResult::Decided { approval, run } => Ok((*approval, run)),
        DecisionResult::NotDecided(why) => Err(not_decided::error(id, &why)),
    }
}

serve! {
    ApprovalService for Approvals;
    type WatchApprovalsStream = WatchApprovalsResponse;
    request watch_approvals(v1::WatchApprovalsRequest) -> Self::WatchApprovalsStream;
    call list_approvals(ListApprovalsRequest) -> ListApprovalsResponse;
    call get_approval(GetApprovalRequest) -> GetApprovalResponse;
    call decide_approval(DecideApprovalRequest) -> DecideApprovalResponse;
    call revoke_approval(RevokeApprovalRequest) -> RevokeApprovalResponse;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope_of(
        decision: v1::ApprovalDecision,
        scope: v1::ApprovalScope,
    ) -> Result<Option<ApprovalScope>, ApiError> {
        allowed_scope(&v1::DecideApprovalRequest {
            decision: decision.into(),
            scope: scope.into(),
            ..Default::default()
        })
    }

    #[test]
    fn decision_must_be_explicit_and_denial_has_no_scope() {
        use v1::{ApprovalDecision as D, ApprovalScope as S};
        assert_eq!(scope_of(D::Allow, S::Unspecified), Ok(Some(ApprovalScope::Once)));
        assert_eq!(scope_of(D::Allow, S::Tenant), Ok(Some(ApprovalScope::Tenant)));
        assert_eq!(scope_of(D::Deny, S::Unspecified), Ok(None));
        for (decision, scope, at_fault) in
            [(D::Unspecified, S::Once, "decision"), (D::Deny, S::Session, "scope")]
        {
            let refused = scope_of(decision, scope);
            assert!(refused.is_err_and(|error| error.invalid_field() == Some(at_fault)));
        }
    }
}
