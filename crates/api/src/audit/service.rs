//! `AuditService`: lists the audit of a tenant, and checks that of the installation.

use std::{sync::Arc, time::Duration};

use codelia_proto::{
    timestamp_to_proto,
    v1::{self, audit_service_server::AuditService},
};
use codelia_store::{AuditEvent, AuditFilter, AuditReport, Caller, Scope, SessionRef};
use codelia_telemetry::task;
use codelia_types::{Reason, SessionId};
use tokio::{
    sync::{Mutex, mpsc, watch},
    time::sleep,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    auth,
    context::Context,
    error::ApiError,
    rpc::{ResponseStream, serve},
    sessions::lookup,
    wire::{
        paging::Page,
        resource_name::{self, SessionSelector},
        validate,
    },
};

/// Between two messages about progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Messages buffered for a slow client.
const BUFFER: usize = 4;

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct AuditEvents {
    pub(crate) context: Arc<Context>,
    /// One check at a time: it reads the whole audit.
    pub(crate) check: Arc<Mutex<()>>,
}

impl AuditEvents {
    /// The session that a parent names; `None` for all of them. An id is not looked up: the audit
    /// outlives sessions.
    async fn session(&self, caller: &Caller, parent: &str) -> Result<Option<SessionId>, ApiError> {
        match resource_name::session_selector("parent", parent)? {
            SessionSelector::Any => Ok(None),
            SessionSelector::One(SessionRef::Id(id)) => Ok(Some(id)),
            SessionSelector::One(alias) => {
                let session = lookup::find(&self.context.store, &caller.tenant, &alias).await?;
                Ok(Some(session.id))
            }
        }
    }

    async fn list_events(
        &self,
        caller: &Caller,
        wire: v1::ListEventsRequest,
    ) -> Result<v1::ListEventsResponse, ApiError> {
        let mut page = Page::<Uuid, _>::parse(&caller.tenant, &wire)?;
        let tenant = match wire.of_installation {
            true => {
                auth::require_scope(caller, Scope::Operator)?;
                None
            }
            false => Some(&caller.tenant),
        };
        let session = self.session(caller, &wire.parent).await?;
        let kind = match wire.kind.as_str() {
            "" => None,
            kind => {
                Some(kind.parse().map_err(|()| ApiError::invalid("kind", "not a kind of event"))?)
            }
        };
        let mut filter = AuditFilter {
            session,
            kind,
            start: validate::time("start_time", wire.start_time)?,
            end: validate::time("end_time", wire.end_time)?,
            oldest_first: wire.oldest_first,
            after: None,
        };
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            filter.after = page.after;
            let rows = self.context.store.audit_list(tenant, &filter, limit).await?;
            page.add(rows, |event| (event.id, to_proto(event)));
        }
        let (events, next_page_token) = page.finish();
        if let (true, Some(id)) = (events.is_empty(), session) {
            // An existing session without events is not an error.
            lookup::find(&self.context.store, &caller.tenant, &SessionRef::Id(id)).await?;
        }
        Ok(v1::ListEventsResponse { events, next_page_token })
    }

    async fn verify_events(
        &self,
        request: Request<v1::VerifyEventsRequest>,
    ) -> Result<Response<ResponseStream<v1::VerifyEventsResponse>>, Status> {
        let caller = auth::caller(request.extensions())?;
        auth::require_scope(&caller, Scope::Operator)?;
        let (responses, receiver) = mpsc::channel(BUFFER);
        task::background(
            "verify audit",
            verify(self.context.clone(), self.check.clone(), responses),
        );
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

fn to_proto(event: AuditEvent) -> v1::AuditEvent {
    let subject = event.subject;
    let text = |id: Option<String>| id.unwrap_or_default();
    v1::AuditEvent {
        event_id: event.id.to_string(),
        writer_id: event.writer.to_string(),
        create_time: Some(timestamp_to_proto(event.at)),
        kind: event.kind,
        tenant_id: text(subject.tenant.map(|id| id.to_string())),
        session_id: text(subject.session.map(|id| id.to_string())),
        run_id: text(subject.run.map(|id| id.to_string())),
        key_id: text(subject.key.map(|id| id.to_string())),
        worker_id: text(subject.worker.map(|id| id.to_string())),
        field: text(event.field),
        detail: event.detail,
    }
}

fn response(report: &AuditReport, done: bool) -> v1::VerifyEventsResponse {
    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    v1::VerifyEventsResponse {
        done,
        writers: count(report.writers),
        checkpoints: count(report.checkpoints),
        events: count(report.events),
        unlisted_events: count(report.unlisted),
        unsigned_events: count(report.unsigned),
        problem_count: count(report.problem_count),
        problems: match done {
            true => report.problems.iter().map(ToString::to_string).collect(),
            false => Vec::new(),
        },
    }
}

/// Checks the audit and sends how far it is. Ends when the client leaves.
async fn verify(
    context: Arc<Context>,
    check: Arc<Mutex<()>>,
    responses: mpsc::Sender<Result<v1::VerifyEventsResponse, Status>>,
) {
    let (progress, mut checked) = watch::channel(AuditReport::default());
    let checking = async {
        let _one_at_a_time = check.lock().await;
        context.store.audit_verify(|report| drop(progress.send_replace(report.clone()))).await
    };
    let sending = async {
        loop {
            // Also when nothing changed, so that the client sees that it is alive.
            sleep(PROGRESS_INTERVAL).await;
            let report = checked.borrow_and_update().clone();
            if responses.send(Ok(response(&report, false))).await.is_err() {
                return;
            }
        }
    };
    let result = tokio::select! {
        result = checking => result,
        () = sending => return,
        () = context.stop_streams.cancelled() => {
            drop(responses.send(Err(ApiError::shutting_down().into())).await);
            return;
        }
    };
    let last = match result {
        Ok(Some(report)) => Ok(response(&report, true)),
        Ok(None) => Err(unsigned().into()),
        Err(error) => Err(ApiError::from(error).into()),
    };
    drop(responses.send(last).await);
}

serve! {
    AuditService for AuditEvents;
    type VerifyEventsStream = VerifyEventsResponse;
    request verify_events(v1::VerifyEventsRequest) -> Self::VerifyEventsStream;
    call list_events(ListEventsRequest) -> ListEventsResponse;
}

/// The audit cannot be checked, since the installation has no key.
fn unsigned() -> ApiError {
    let message = "the audit of this installation is not signed; set `secrets.key_file` for every api and worker";
    ApiError::new(Reason::SecretsUnavailable, message).with("field", "secrets.key_file")
}
