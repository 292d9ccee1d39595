//! `RunService`: starts runs, hands them to workers, shows and cancels them.

pub(crate) mod cancel;
pub(crate) mod held_changes;
pub(crate) mod live_usage;
mod start;

use std::sync::Arc;

use codelia_proto::v1::{self, run_service_server::RunService};
use codelia_store::{Caller, Run, RunFilter, RunState, Scope, SessionRef};
use codelia_telemetry::task;
use codelia_types::{Reason, RunId, SessionId};
use futures::StreamExt;
use tokio::{sync::mpsc, task::JoinHandle};
use tonic::{Request, Response, Status, Streaming};

use self::start::{NextStep, RecordedRun};
use crate::{
    auth::{self, AdmittedCaller},
    context::Context,
    error::ApiError,
    rpc::{ResponseStream, serve},
    server::request::Deadline,
    sessions::lookup,
    stream::{
        self, EVENT_BUFFER, EventStreamer, ExecInput, ExecOpening, ExecStream, read_opening,
        response_events,
    },
    wire::{
        paging::Page,
        resource_name::{self, RunName, SessionSelector},
        to_proto, validate, words,
    },
    workers::Push,
};
use cancel::{cancel_run, cancellation};

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct Runs {
    pub(crate) context: Arc<Context>,
}

fn not_running() -> ApiError {
    ApiError::new(Reason::RunNotRunning, "the run is not running: it is queued or has ended")
}

impl Runs {
    fn push(&self, run: &Run, push: Push) -> JoinHandle<()> {
        let context = self.context.clone();
        let run = run.clone();
        task::background("push", async move { context.worker_calls.push(&run, push).await })
    }

    fn offer(&self, run: &Run) -> JoinHandle<()> {
        let context = self.context.clone();
        let session = run.session;
        let mode = run.spec.mode;
        task::background(
            "offer",
            async move { drop(context.worker_calls.offer(session, mode).await) },
        )
    }

    /// Finds a run, which must belong to the session in its name.
    async fn find(&self, caller: &Caller, name: RunName) -> Result<Run, ApiError> {
        let not_found = || ApiError::not_found("run", name.run);
        let run =
            self.context.store.run_get(&caller.tenant, name.run).await?.ok_or_else(not_found)?;
        let belongs = match name.session {
            SessionSelector::Any => true,
            SessionSelector::One(SessionRef::Id(id)) => id == run.session,
            SessionSelector::One(alias @ SessionRef::Alias(_)) => {
                self.session_id(caller, &alias).await? == Some(run.session)
            }
        };
        if belongs { Ok(run) } else { Err(not_found()) }
    }

    async fn session_id(
        &self,
        caller: &Caller,
        session: &SessionRef,
    ) -> Result<Option<SessionId>, ApiError> {
        let found = self.context.store.session_spec(&caller.tenant, session).await?;
        Ok(found.map(|(id, _)| id))
    }

    async fn list_runs(
        &self,
        caller: &Caller,
        wire: v1::ListRunsRequest,
    ) -> Result<v1::ListRunsResponse, ApiError> {
        let mut page = Page::<RunId, _>::parse(&caller.tenant, &wire)?;
        let sessions = resource_name::session_selector("parent", &wire.parent)?;
        let mut filter = RunFilter {
            session: None,
            state: words::parse("state", wire.state)?,
            created_after: validate::time("created_after", wire.created_after)?,
            created_before: validate::time("created_before", wire.created_before)?,
            labels: validate::labels(wire.labels)?,
            before: None,
        };
        if let SessionSelector::One(session) = sessions {
            let Some(id) = self.session_id(caller, &session).await? else {
                return Err(lookup::missing(&self.context.store, &caller.tenant, &session).await);
            };
            filter.session = Some(id);
        }
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            filter.before = page.after;
            let rows = self.context.store.run_list(&caller.tenant, &filter, limit).await?;
            page.add(rows, |run| (run.id, shown(caller, &run, to_proto::run_summary(&run))));
        }
        let (runs, next_page_token) = page.finish();
        Ok(v1::ListRunsResponse { runs, next_page_token })
    }

    async fn cancel_run(
        &self,
        caller: &Caller,
        wire: v1::CancelRunRequest,
    ) -> Result<v1::CancelRunResponse, ApiError> {
        let name = resource_name::run("name", &wire.name)?;
        let cancellation = cancellation(wire.reason, wire.grace)?;
        let id = match name.session {
            SessionSelector::Any => name.run,
            SessionSelector::One(_) => self.find(caller, name).await?.id,
        };
        let run = cancel_run(&self.context, &caller.tenant, id, &cancellation).await?;
        Ok(v1::CancelRunResponse { run: Some(shown(caller, &run, to_proto::run(&run))) })
    }

    /// Signals the command of a run. Fails unless the worker has passed it on.
    async fn signal_run(
        &self,
        caller: &Caller,
        wire: v1::SignalRunRequest,
    ) -> Result<v1::SignalRunResponse, ApiError> {
        let name = resource_name::run("name", &wire.name)?;
        let signal = validate::signal(wire.signal)?;
        let run = self.find(caller, name).await?;
        let (RunState::Running, Some(address)) = (run.state, &run.worker_address) else {
            return Err(not_running());
        };
        let signaled = self.context.worker_calls.signal(address, run.id, signal).await;
        let is_known = signaled
            .map_err(|error| ApiError::unavailable(format!("signal at {address}: {error}")))?;
        if !is_known {
            return Err(not_running());
        }
        Ok(v1::SignalRunResponse { run: Some(shown(caller, &run, to_proto::run(&run))) })
    }

    async fn apply_changes(
        &self,
        caller: &Caller,
        wire: v1::ApplyChangesRequest,
    ) -> Result<v1::ApplyChangesResponse, ApiError> {
        let run = self.decide_changes(caller, &wire.name, true).await?;
        Ok(v1::ApplyChangesResponse { run: Some(run) })
    }

    async fn discard_changes(
        &self,
        caller: &Caller,
        wire: v1::DiscardChangesRequest,
    ) -> Result<v1::DiscardChangesResponse, ApiError> {
        let run = self.decide_changes(caller, &wire.name, false).await?;
        Ok(v1::DiscardChangesResponse { run: Some(run) })
    }

    /// Applies or drops the changes of a run that wait for a decision.
    async fn decide_changes(
        &self,
        caller: &Caller,
        name: &str,
        apply: bool,
    ) -> Result<v1::Run, ApiError> {
        let run = self.find(caller, resource_name::run("name", name)?).await?;
        let run = held_changes::decide(&self.context, caller, run, apply).await?;
        Ok(shown(caller, &run, to_proto::run(&run)))
    }

    /// Finds the run that a watch request names, and the position to send output from.
    async fn watched(
        &self,
        caller: &Caller,
        wire: v1::WatchRunRequest,
    ) -> Result<(Run, i64), ApiError> {
        let name = resource_name::run("name", &wire.name)?;
        let position = validate::position(wire.position)?;
        Ok((self.find(caller, name).await?, position))
    }

    async fn start_run(
        &self,
        request: Request<v1::StartRunRequest>,
    ) -> Result<Response<v1::StartRunResponse>, Status> {
        let admitted = auth::admitted(request.extensions())?;
        let (caller, RecordedRun { run, next }) =
            self.start_admitted(&admitted, request.into_inner(), false).await?;
        match next {
            NextStep::Nothing => {}
            NextStep::Push(push) => drop(self.push(&run, push)),
            NextStep::Offer => drop(self.offer(&run)),
        }
        Ok(Response::new(v1::StartRunResponse {
            run: Some(shown(&caller, &run, to_proto::run(&run))),
        }))
    }

    async fn watch_run(
        &self,
        request: Request<v1::WatchRunRequest>,
    ) -> Result<Response<ResponseStream<v1::WatchRunResponse>>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let stored_only = request.get_ref().stored_only;
        let (run, position) = self.watched(&caller, request.into_inner()).await?;
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let is_operator = is_operator(&caller);
        let streamer = EventStreamer::new(self.context.clone(), caller.tenant, position, events)
            .for_operator(is_operator)
            .stored_only(stored_only);
        task::background("watch", stream::watch(streamer, run, deadline));
        let events = response_events(receiver).await;
        let events =
            events.map(|event| event.map(|event| v1::WatchRunResponse { event: Some(event) }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn exec(
        &self,
        request: Request<Streaming<v1::ExecRequest>>,
    ) -> Result<Response<ResponseStream<v1::ExecResponse>>, Status> {
        let admitted = auth::admitted(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let events = self.open_exec(&admitted, request.into_inner(), deadline).await?;
        let events = response_events(events).await;
        let events = events.map(|event| event.map(|event| v1::ExecResponse { event: Some(event) }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn get_run(
        &self,
        caller: &Caller,
        wire: v1::GetRunRequest,
    ) -> Result<v1::GetRunResponse, ApiError> {
        let v1::GetRunRequest { name, include_env, include_usage, include_processes } = wire;
        let name = resource_name::run("name", &name)?;
        if include_env {
            auth::require_scope(caller, Scope::Admin)?;
        }
        let mut run = self.find(caller, name).await?;
        let mut response = v1::GetRunResponse::default();
        if include_usage || include_processes {
            let answer = live_usage::read(&self.context, &mut run, include_processes).await?;
            if include_usage {
                response.live_usage = answer.usage;
                response.live_usage_unavailable = answer.unavailable;
            }
            if include_processes {
                response.processes = answer.processes;
                response.processes_unavailable = answer.processes_unavailable;
            }
        }
        let message = if include_env { to_proto::run_with_env(&run) } else { to_proto::run(&run) };
        let approval = self.context.store.approval_of_start(&caller.tenant, run.id).await?;
        let approval = approval.map(to_proto::approval);
        response.run = Some(v1::Run { approval, ..shown(caller, &run, message) });
        Ok(response)
    }

    async fn open_exec(
        &self,
        admitted: &AdmittedCaller,
        mut requests: Streaming<v1::ExecRequest>,
        deadline: Deadline,
    ) -> Result<EventReceiver, ApiError> {
        let opening = match read_opening(&mut requests).await {
            Ok(opening) => opening,
            Err(error) => return Err(admitted.check().await.err().unwrap_or(error)),
        };
        let (caller, recorded, position, starts) = match opening {
            ExecOpening::Start(wire) => {
                let started = self.start_admitted(admitted, *wire, true).await;
                let (caller, recorded) = started.map_err(|error| error.within("start"))?;
                (caller, recorded, 0, true)
            }
            ExecOpening::Attach(wire) => {
                let caller = admitted.check().await?;
                if wire.stored_only {
                    return Err(ApiError::invalid(
                        "attach.stored_only",
                        "only for WatchRun; leave it unset",
                    ));
                }
                let (run, position) =
                    self.watched(&caller, wire).await.map_err(|error| error.within("attach"))?;
                (caller, RecordedRun { run, next: NextStep::Nothing }, position, false)
            }
        };
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let streamer = EventStreamer::new(
            self.context.clone(),
            caller.tenant.clone(),
            position,
            events.clone(),
        )
        .for_operator(is_operator(&caller));
        let streamer = match recorded.next {
            NextStep::Nothing => streamer,
            NextStep::Push(push) => streamer.push_to(push),
            NextStep::Offer => streamer.after_offer(self.offer(&recorded.run)),
        }
        .owning_run(starts);
        let input = ExecInput::new(requests, &streamer, starts);
        let exec =
            ExecStream { context: self.context.clone(), tenant: caller.tenant, events, deadline };
        task::background("exec", exec.run(streamer, recorded.run, input));
        Ok(receiver)
    }
}

fn is_operator(caller: &Caller) -> bool {
    auth::has_scope(caller, Scope::Operator)
}

/// The message with what the caller may see in addition.
fn shown<Spec>(caller: &Caller, run: &Run<Spec>, message: v1::Run) -> v1::Run {
    if is_operator(caller) { to_proto::for_operator(run, message) } else { message }
}

type EventReceiver = mpsc::Receiver<Result<v1::RunEvent, Status>>;

serve! {
    RunService for Runs;
    type WatchRunStream = WatchRunResponse;
    type ExecStream = ExecResponse;
    request start_run(v1::StartRunRequest) -> v1::StartRunResponse;
    request watch_run(v1::WatchRunRequest) -> Self::WatchRunStream;
    request exec(Streaming<v1::ExecRequest>) -> Self::ExecStream;
    call get_run(GetRunRequest) -> GetRunResponse;
    call list_runs(ListRunsRequest) -> ListRunsResponse;
    call cancel_run(CancelRunRequest) -> CancelRunResponse;
    call signal_run(SignalRunRequest) -> SignalRunResponse;
    call apply_changes(ApplyChangesRequest) -> ApplyChangesResponse;
    call discard_changes(DiscardChangesRequest) -> DiscardChangesResponse;
}
