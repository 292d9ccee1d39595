//! What an api asks of this worker. Hints and views alone: the truth is in the store.

use std::{pin::Pin, str::FromStr, sync::Arc, time::Duration};

use codelia_policy::RunSpec;
use codelia_proto::internal::v1::{
    Attach, AttachRunRequest, AttachRunResponse, CancelRunRequest, CancelRunResponse, CloseSessionRequest,
    CloseSessionResponse, OfferSessionRequest, OfferSessionResponse, PushResult, StartRunRequest,
    StartRunResponse, attach_run_request::Kind, worker_service_server::WorkerService,
};
use codelia_store::AssignedRun;
use codelia_telemetry::task;
use codelia_types::{Incarnation, LeaseEpoch, RunId, SessionId};
use futures::Stream;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    lease::acquire::take_session,
    lease::keeper::Current,
    run::attach::{Watcher, pass_input},
    run::dispatch::{Taken, assign},
    run::table::{Known, Source},
    worker::Worker,
};

/// A push that is older than this is left to the poll: the worker may have forgotten that it had it.
const PUSH_AGE: Duration = Duration::from_secs(60);

/// The internal service.
#[derive(Debug)]
pub(crate) struct Internal(pub(crate) Arc<Worker>);

#[tonic::async_trait]
impl WorkerService for Internal {
    type AttachRunStream = Pin<Box<dyn Stream<Item = Result<AttachRunResponse, Status>> + Send>>;

    async fn offer_session(
        &self,
        request: Request<OfferSessionRequest>,
    ) -> Result<Response<OfferSessionResponse>, Status> {
        let id: SessionId = parse("session_id", &request.get_ref().session_id)?;
        // On its own: an api that gives up must not leave a session half taken.
        let worker = self.0.clone();
        let taking = task::background("take session", async move { take_session(&worker, id).await });
        let taken = taking.await.map_err(|_| Status::internal("taking the session was interrupted"))?;
        let taken = taken.map_err(|error| {
            tracing::warn!(%error, session = %id, "cannot take a session");
            Status::unavailable("the store does not answer")
        })?;
        let lease_epoch = taken.map_or(0, |epoch| epoch.0);
        Ok(Response::new(OfferSessionResponse { taken: taken.is_some(), lease_epoch }))
    }

    async fn start_run(
        &self,
        request: Request<StartRunRequest>,
    ) -> Result<Response<StartRunResponse>, Status> {
        let result = match push(&self.0, request.into_inner())? {
            Taken::Started => PushResult::Started,
            Taken::Queued => PushResult::Queued,
            Taken::Rejected => PushResult::Rejected,
        };
        Ok(Response::new(StartRunResponse { result: result.into() }))
    }

    async fn attach_run(
        &self,
        request: Request<Streaming<AttachRunRequest>>,
    ) -> Result<Response<Self::AttachRunStream>, Status> {
        let mut input = request.into_inner();
        let Some(AttachRunRequest { kind: Some(Kind::Attach(Attach { run_id, position, owner, start })) }) =
            input.message().await?
        else {
            return Err(Status::invalid_argument("the first message must be attach"));
        };
        // What became of it shows in whether there is something to attach to.
        start.map(|start| push(&self.0, start)).transpose()?;
        let run = self.0.runs.active(parse("run_id", &run_id)?);
        let run = run.ok_or_else(|| Status::not_found("no such run here"))?;
        let gone = CancellationToken::new();
        let watcher =
            Watcher::new(run.clone(), self.0.id().to_string(), position.max(0), owner, gone.clone());
        task::background("pass input", pass_input(run, input, gone));
        Ok(Response::new(Box::pin(watcher.into_stream())))
    }

    async fn cancel_run(
        &self,
        request: Request<CancelRunRequest>,
    ) -> Result<Response<CancelRunResponse>, Status> {
        let id = parse("run_id", &request.get_ref().run_id)?;
        let known = match self.0.runs.known(id, self.0.current().incarnation) {
            Known::Active(run) => {
                run.cancel.cancel();
                true
            }
            // It is queued in the store, and ends there.
            Known::Waiting => true,
            Known::No | Known::Past(_) => false,
        };
        Ok(Response::new(CancelRunResponse { known }))
    }

    async fn close_session(
        &self,
        request: Request<CloseSessionRequest>,
    ) -> Result<Response<CloseSessionResponse>, Status> {
        let id = parse("session_id", &request.get_ref().session_id)?;
        self.0.close_session(id);
        self.0.clean_now.notify_one();
        Ok(Response::new(CloseSessionResponse {}))
    }
}

fn push(worker: &Arc<Worker>, request: StartRunRequest) -> Result<Taken, Status> {
    let incarnation: Incarnation = parse("incarnation", &request.incarnation)?;
    let current = worker.current();
    if incarnation != current.incarnation || !current.is_live() || is_old(&request, &current)? {
        return Ok(Taken::Rejected);
    }
    Ok(assign(worker, &current, read(request)?, Source::Push))
}

fn is_old(request: &StartRunRequest, current: &Current) -> Result<bool, Status> {
    let invalid = || Status::invalid_argument("create_time");
    let recorded = request.create_time.as_ref().ok_or_else(invalid)?;
    let recorded = OffsetDateTime::from_unix_timestamp(recorded.seconds).map_err(|_| invalid())?;
    Ok(current.database_now() - recorded > PUSH_AGE)
}

fn read(request: StartRunRequest) -> Result<AssignedRun, Status> {
    let spec = request.spec.ok_or_else(|| Status::invalid_argument("spec: is missing"))?;
    let spec = RunSpec::try_from(spec)
        .map_err(|error| Status::invalid_argument(error.within("spec").to_string()))?;
    Ok(AssignedRun {
        id: parse::<RunId>("run_id", &request.run_id)?,
        session: parse("session_id", &request.session_id)?,
        tenant: parse("tenant_id", &request.tenant_id)?,
        spec,
        epoch: LeaseEpoch(request.lease_epoch),
        attempt: request.attempt,
        // Only what was recorded for this worker at once is pushed.
        turn: 0,
        cancel_requested: false,
    })
}

fn parse<T: FromStr>(field: &'static str, text: &str) -> Result<T, Status> {
    text.parse().map_err(|_| Status::invalid_argument(field))
}
