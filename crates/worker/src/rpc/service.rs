//! The calls of apis about sessions and runs. They are hints and views; the store decides.

use std::{pin::Pin, str::FromStr, sync::Arc, time::Duration};

use codelia_proto::{
    duration_from_proto,
    internal::v1::{
        Attach, AttachRunRequest, AttachRunResponse, CancelRunRequest, CancelRunResponse,
        CloseSessionRequest, CloseSessionResponse, GetRunUsageRequest, GetRunUsageResponse,
        OfferSessionRequest, OfferSessionResponse, PushResult, SignalRunRequest, SignalRunResponse,
        StartRunRequest, StartRunResponse, attach_run_request::Kind,
        worker_service_server::WorkerService,
    },
};
use codelia_store::{AssignedRun, SealedEnv};
use codelia_telemetry::{task, trace};
use codelia_types::{Incarnation, LeaseEpoch, RunId, SessionId};
use futures::Stream;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;

use crate::{
    core::Core,
    lease::worker_lease::WorkerLease,
    run::{
        active::Control,
        attach::{RunAttachment, pass_input},
        dispatch::Dispatcher,
        live_usage,
        registry::{RunSource, RunStatus},
    },
    session::acquire::SessionLeases,
};

/// An older push is left to the poll: the worker may have forgotten that it already had the run.
const MAX_PUSH_AGE: Duration = Duration::from_secs(60);

/// How long the answer to an attach waits for the command to start, so that both are one message. A
/// prepared sandbox starts it sooner.
const MAX_START_WAIT: Duration = Duration::from_millis(2);

/// The internal service for sessions and runs.
#[derive(Debug)]
pub(crate) struct RunService {
    pub(crate) core: Arc<Core>,
    pub(crate) leases: SessionLeases,
    pub(crate) dispatcher: Arc<Dispatcher>,
}

impl RunService {
    fn push(
        &self,
        request: StartRunRequest,
        traceparent: Option<String>,
    ) -> Result<PushResult, Status> {
        let incarnation: Incarnation = parse("incarnation", &request.incarnation)?;
        let current = self.core.lease.current();
        if incarnation != current.incarnation || !current.is_live() || is_old(&request, &current)? {
            return Ok(PushResult::Rejected);
        }
        let assigned = AssignedRun { traceparent, ..read(request)? };
        Ok(self.dispatcher.assign(&current, assigned, RunSource::Push))
    }
}

#[tonic::async_trait]
impl WorkerService for RunService {
    type AttachRunStream = Pin<Box<dyn Stream<Item = Result<AttachRunResponse, Status>> + Send>>;

    async fn offer_session(
        &self,
        request: Request<OfferSessionRequest>,
    ) -> Result<Response<OfferSessionResponse>, Status> {
        let OfferSessionRequest { session_id, is_new } = request.get_ref();
        let (id, is_new): (SessionId, _) = (parse("session_id", session_id)?, *is_new);
        // In a task: an api that gives up must not leave a session half acquired.
        let leases = self.leases.clone();
        let span = tracing::info_span!("lease", session = %id);
        trace::continue_from(&span, traceparent(&request).as_deref());
        let acquiring = async move {
            let acquired = leases.acquire(id, is_new).await;
            trace::end("taken", if matches!(acquired, Ok(Some(_))) { "true" } else { "false" });
            acquired
        };
        let acquiring = task::background("acquire session", acquiring.instrument(span));
        let acquired = acquiring
            .await
            .map_err(|_| Status::internal("acquiring the session was interrupted"))?;
        let epoch = acquired.map_err(|error| {
            tracing::warn!(%error, session = %id, "cannot acquire session");
            Status::unavailable("the store does not answer")
        })?;
        let lease_epoch = epoch.map_or(0, |epoch| epoch.0);
        Ok(Response::new(OfferSessionResponse { taken: epoch.is_some(), lease_epoch }))
    }

    async fn start_run(
        &self,
        request: Request<StartRunRequest>,
    ) -> Result<Response<StartRunResponse>, Status> {
        let traceparent = traceparent(&request);
        let result = self.push(request.into_inner(), traceparent)?;
        Ok(Response::new(StartRunResponse { result: result.into() }))
    }

    async fn attach_run(
        &self,
        request: Request<Streaming<AttachRunRequest>>,
    ) -> Result<Response<Self::AttachRunStream>, Status> {
        let traceparent = traceparent(&request);
        let mut input = request.into_inner();
        let Some(AttachRunRequest {
            kind: Some(Kind::Attach(Attach { run_id, position, owner, start })),
        }) = input.message().await?
        else {
            return Err(Status::invalid_argument("the first message must be attach"));
        };
        // If the push was rejected, there is no run to attach to.
        start.map(|start| self.push(start, traceparent)).transpose()?;
        let run = self.core.runs.active(parse("run_id", &run_id)?);
        let run = run.ok_or_else(|| Status::not_found("this worker does not execute the run"))?;
        let detached = CancellationToken::new();
        let worker = self.core.lease.worker().to_string();
        let attachment =
            RunAttachment::new(run.clone(), worker, position.max(0), owner, detached.clone());
        task::background("pass input", pass_input(run.clone(), input, detached));
        run.started_within(MAX_START_WAIT).await;
        Ok(Response::new(Box::pin(attachment.into_stream())))
    }

    async fn cancel_run(
        &self,
        request: Request<CancelRunRequest>,
    ) -> Result<Response<CancelRunResponse>, Status> {
        let CancelRunRequest { run_id, grace } = request.into_inner();
        let id = parse("run_id", &run_id)?;
        let grace = grace.map(|grace| duration_from_proto(&grace)).transpose();
        let grace = grace.map_err(|_| Status::invalid_argument("grace"))?;
        let known = match self.core.runs.status(id, self.core.lease.incarnation()) {
            RunStatus::Active(run) => {
                run.cancel_within(grace);
                true
            }
            // The store has it as queued and ends it there.
            RunStatus::Waiting => true,
            RunStatus::Unknown | RunStatus::Prior(_) => false,
        };
        Ok(Response::new(CancelRunResponse { known }))
    }

    async fn signal_run(
        &self,
        request: Request<SignalRunRequest>,
    ) -> Result<Response<SignalRunResponse>, Status> {
        let SignalRunRequest { run_id, signal } = request.into_inner();
        let known =
            match self.core.runs.status(parse("run_id", &run_id)?, self.core.lease.incarnation()) {
                // A run that starts now gets it then.
                RunStatus::Active(run) => run.control.try_send(Control::Signal(signal)).is_ok(),
                RunStatus::Waiting | RunStatus::Unknown | RunStatus::Prior(_) => false,
            };
        Ok(Response::new(SignalRunResponse { known }))
    }

    async fn get_run_usage(
        &self,
        request: Request<GetRunUsageRequest>,
    ) -> Result<Response<GetRunUsageResponse>, Status> {
        let GetRunUsageRequest { run_id, include_processes } = request.into_inner();
        let run = self.core.runs.active(parse("run_id", &run_id)?);
        let run = run.ok_or_else(|| Status::not_found("this worker does not execute the run"))?;
        let mut response = GetRunUsageResponse::default();
        match live_usage::read(&run).await {
            Ok(usage) => response.usage = Some(usage),
            Err(unavailable) => response.unavailable = unavailable.to_string(),
        }
        if include_processes {
            match live_usage::processes(&run).await {
                Ok(processes) => response.processes = processes,
                Err(unavailable) => response.processes_unavailable = unavailable.to_string(),
            }
        }
        Ok(Response::new(response))
    }

    async fn close_session(
        &self,
        request: Request<CloseSessionRequest>,
    ) -> Result<Response<CloseSessionResponse>, Status> {
        let id = parse("session_id", &request.get_ref().session_id)?;
        self.core.sessions.close(id);
        self.core.runs.cancel_session(id);
        self.core.wakeups.upkeep.notify_one();
        Ok(Response::new(CloseSessionResponse {}))
    }
}

/// The span that a call belongs to.
fn traceparent<T>(request: &Request<T>) -> Option<String> {
    Some(request.metadata().get(trace::TRACEPARENT)?.to_str().ok()?.to_owned())
}

fn is_old(request: &StartRunRequest, current: &WorkerLease) -> Result<bool, Status> {
    let invalid = || Status::invalid_argument("create_time");
    let created = request.create_time.as_ref().ok_or_else(invalid)?;
    let created = OffsetDateTime::from_unix_timestamp(created.seconds).map_err(|_| invalid())?;
    Ok(current.database_now() - created > MAX_PUSH_AGE)
}

fn read(request: StartRunRequest) -> Result<AssignedRun, Status> {
    let spec = serde_json::from_slice(&request.spec)
        .map_err(|error| Status::invalid_argument(format!("spec: {error}")))?;
    Ok(AssignedRun {
        id: parse::<RunId>("run_id", &request.run_id)?,
        session: parse("session_id", &request.session_id)?,
        tenant: parse("tenant_id", &request.tenant_id)?,
        spec,
        epoch: LeaseEpoch(request.lease_epoch),
        attempt: request.attempt,
        // Only runs that were assigned when they were created are pushed.
        turn: 0,
        cancel_requested: false,
        cancel_grace: None,
        secret_env: (!request.secret_env.is_empty()).then_some(SealedEnv(request.secret_env)),
        traceparent: None,
    })
}

fn parse<T: FromStr>(field: &'static str, text: &str) -> Result<T, Status> {
    text.parse().map_err(|_| Status::invalid_argument(field))
}
