//! `RunService`: records runs, hands them to workers, shows and cancels them.

use std::{pin::Pin, sync::Arc, time::Instant};

use codelia_policy::{IsolationLevel, Limit, RunSpec};
use codelia_proto::v1::{self, run_service_server::RunService};
use codelia_store::{
    Caller, EventKind, Grant, KeyVersion, NewApproval, NewRun, Quotas, Run, RunAdmission, RunFilter,
    RunState, Scope, SessionRef,
};
use codelia_telemetry::{Step, metrics, task, trace};
use codelia_types::{ApprovalId, RunId, SessionId};
use futures::{Stream, StreamExt};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    admission::{
        RunRequest,
        approval::{approval_needed, may_ask},
        check_available,
    },
    audit,
    auth::{self, AdmittedCaller},
    cancel::{cancel_run, cancellation},
    changes,
    context::Context,
    dispatch::Push,
    live_usage,
    paging::Page,
    request::Deadline,
    resource_name::{self, RunName, SessionSelector},
    rules::Rules,
    run_stream::{self, EVENT_BUFFER, EventStreamer, ExecInput, ExecOpening, ExecStream, read_opening},
    session_lookup,
    sessions::{CreatedSession, Sessions},
    status::ApiError,
    to_proto, validate,
};

/// The service.
#[derive(Debug)]
pub(crate) struct Runs {
    pub(crate) context: Arc<Context>,
}

/// A run that was recorded by this request or an earlier one with the same idempotency key.
struct RecordedRun {
    run: Run,
    next: NextStep,
}

/// How a recorded run reaches a worker. It is only faster: a worker's poll finds the run as well.
enum NextStep {
    /// An earlier request took care of it, or it waits for an approval.
    Nothing,
    /// Push it to the worker that it is recorded for.
    Push(Push),
    /// Offer its session to a worker.
    Offer,
}

impl Runs {
    async fn parse(
        &self,
        caller: &Caller,
        wire: v1::StartRunRequest,
        ends_with_caller: bool,
    ) -> Result<RunRequest, ApiError> {
        let is_large = validate::is_large_policy(wire.policy.as_ref());
        let parse = move |rules: &Rules<'_>| RunRequest::parse(wire, ends_with_caller, rules);
        self.context.with_policy(caller, is_large, parse).await
    }

    /// Parses and records a run. If the caller's key was not looked up, the statement that records the run
    /// checks it. Any refusal is only for the owner of a valid key, so then the key is looked up, and the
    /// run admitted as if it were new.
    async fn start_admitted(
        &self,
        admitted: &AdmittedCaller,
        wire: v1::StartRunRequest,
        ends_with_caller: bool,
    ) -> Result<(Caller, RecordedRun), ApiError> {
        if wire.new_session.is_some() {
            // In a box, so that other calls do not carry its size.
            return Box::pin(self.start_in_new_session(admitted, wire, ends_with_caller)).await;
        }
        if let Some(version) = admitted.unchecked_version() {
            let caller = &admitted.caller;
            let recorded = match self.parse(caller, wire.clone(), ends_with_caller).await {
                Ok(request) => self.admit(caller, request, Some(version)).await,
                Err(error) => Err(error),
            };
            match recorded {
                Ok(recorded) => return Ok((caller.clone(), recorded)),
                // The run may have been recorded.
                Err(error) if !error.is_refusal() => return Err(error),
                Err(_) => {}
            }
        }
        let caller = admitted.check().await?;
        let request = self.parse(&caller, wire, ends_with_caller).await?;
        let recorded = self.start(&caller, request).await?;
        Ok((caller, recorded))
    }

    /// Creates a session and records a run in it. The session is closed if the run is refused.
    async fn start_in_new_session(
        &self,
        admitted: &AdmittedCaller,
        wire: v1::StartRunRequest,
        ends_with_caller: bool,
    ) -> Result<(Caller, RecordedRun), ApiError> {
        let unchecked = match admitted.unchecked_version() {
            Some(version) => {
                let caller = &admitted.caller;
                Some(self.create_session(caller, wire.clone(), ends_with_caller, Some(version)).await)
            }
            None => None,
        };
        let (caller, (created, request)) = match unchecked {
            Some(Ok(created)) => (admitted.caller.clone(), created),
            // The session may have been created.
            Some(Err(error)) if !error.is_refusal() => return Err(error),
            Some(Err(_)) | None => {
                let caller = admitted.check().await?;
                let created = self.create_session(&caller, wire, ends_with_caller, None).await?;
                (caller, created)
            }
        };
        let recorded = self.start(&caller, request).await;
        if created.is_new && recorded.as_ref().is_err_and(ApiError::is_refusal) {
            self.sessions().close_refused(&caller, created.session.id).await;
        }
        Ok((caller, recorded?))
    }

    /// Parses the requests for a session and a run in it, and creates the session.
    async fn create_session(
        &self,
        caller: &Caller,
        mut wire: v1::StartRunRequest,
        ends_with_caller: bool,
        key_version: Option<KeyVersion>,
    ) -> Result<(CreatedSession, RunRequest), ApiError> {
        let (sessions, within) = (self.sessions(), |error: ApiError| error.within("new_session"));
        let mut new_session = wire.new_session.take().unwrap_or_default();
        move_disk_limits(&mut wire, &mut new_session)?;
        let mut session = sessions.parse(caller, new_session).await.map_err(within)?;
        if !wire.parent.is_empty() {
            return Err(ApiError::invalid("parent", "must be empty with new_session; leave one of them out"));
        }
        // Any name, until the session has one.
        wire.parent = format!("sessions/{}", SessionId::generate());
        let mut request = self.parse(caller, wire, ends_with_caller).await?;
        if session.idempotency_key.is_none() {
            session.idempotency_key.clone_from(&request.idempotency_key);
        }
        let created = sessions.create(caller, session, key_version).await.map_err(within)?;
        request.session = SessionRef::Id(created.session.id);
        Ok((created, request))
    }

    fn sessions(&self) -> Sessions {
        Sessions { context: self.context.clone() }
    }

    async fn start(&self, caller: &Caller, request: RunRequest) -> Result<RecordedRun, ApiError> {
        let session = request.session.clone();
        let recorded = self.admit(caller, request, None).await;
        if let Err(error) = &recorded {
            let store = &self.context.store;
            audit::record(store, caller, EventKind::RunRefused, Some(&session), error).await;
        }
        recorded
    }

    async fn admit(
        &self,
        caller: &Caller,
        mut request: RunRequest,
        key_version: Option<KeyVersion>,
    ) -> Result<RecordedRun, ApiError> {
        let Context { options, store, session_cache, storage_quota, run_quota, tools, .. } = &*self.context;
        let begun = Instant::now();
        let name = request.session.clone();
        let Some((session, session_spec)) = session_cache.get(store, &caller.tenant, &name).await? else {
            return Err(session_lookup::missing(store, &caller.tenant, &name).await);
        };
        if let Some(tool) = &request.tool {
            request.declared = Some(tools.get(store, caller, tool).await?);
        }
        let of_tool = request.declared.as_ref().is_some_and(|tool| tool.declaration.policy.is_large());
        let is_large = of_tool || request.policy.is_large() || session_spec.policy.is_large();
        let upper = session_spec.clone();
        let specify = move |rules: &Rules<'_>| {
            let spec = request.to_spec(&upper, rules)?;
            Ok((spec, request))
        };
        let (spec, request) = self.context.with_policy(caller, is_large, specify).await?;
        if spec.mode != session_spec.mode {
            check_available(store, spec.mode).await?;
        }
        storage_quota.check_run(store, caller).await?;
        let (id, secret_key) = (RunId::generate(), request.secret_key(options)?);
        let key = request.idempotency_key.as_deref();
        let hash = key.map(|_| request.fingerprint(&caller.tenant, secret_key)).transpose()?;
        let secret_env = secret_key.map(|key| key.seal(id, &request.secret_env)).transpose();
        let secret_env = secret_env.map_err(ApiError::internal)?;
        // An operator decided about the level of an approved tool.
        let floor = request.approved_level().map_or(caller.floor, |level| level.min(caller.floor));
        let approval = self.approval(caller, session, &spec, floor).await?;
        let admitted = Instant::now();
        metrics().step(Step::Admit, admitted - begun);
        let Quotas { concurrent_runs, queued_runs, .. } = caller.quotas;
        let traceparent = trace::current();
        let new = NewRun {
            id,
            session,
            tenant: &caller.tenant,
            spec: &spec,
            labels: &request.labels,
            retries: request.retries,
            queue_timeout: request.queue_timeout.unwrap_or(options.timeouts.queue),
            idempotency: key.zip(hash.as_ref().map(<[_; 32]>::as_slice)),
            secret_env: secret_env.as_ref(),
            check_quotas: run_quota.must_count(&caller.tenant, [concurrent_runs, queued_runs]),
            key: caller.key,
            key_version,
            requested_by: may_ask(&spec).then_some(caller.key),
            traceparent: traceparent.as_deref(),
            approval: approval.as_ref(),
        };
        let admission = store.run_insert(new, caller.quotas).await?;
        metrics().step(Step::Record, admitted.elapsed());
        match admission {
            RunAdmission::Recorded { run, incarnation, counted } => {
                if let Some(counted) = counted {
                    run_quota.counted(&caller.tenant, [counted.active, counted.queued], admitted);
                }
                let push = |incarnation| NextStep::Push(Push { incarnation, secret_env, traceparent });
                let next = match run.approval {
                    Some(_) => NextStep::Nothing,
                    None => incarnation.map_or(NextStep::Offer, push),
                };
                Ok(RecordedRun { run: *run, next })
            }
            RunAdmission::Existing(run) => Ok(RecordedRun { run: *run, next: NextStep::Nothing }),
            RunAdmission::KeyReused => Err(ApiError::IdempotencyKeyReused),
            RunAdmission::KeyChanged => Err(ApiError::Unauthenticated),
            RunAdmission::NoSession => Err(session_lookup::missing(store, &caller.tenant, &name).await),
            RunAdmission::SessionEnded => Err(session_lookup::ended(store, &caller.tenant, session).await),
            RunAdmission::SessionDataLost => Err(ApiError::SessionDataLost),
            RunAdmission::WorkerLacks => Err(ApiError::WorkerOutdated),
            RunAdmission::SessionQuarantined(reason) => {
                Err(ApiError::SessionQuarantined { id: session, reason })
            }
            RunAdmission::OverQuota(quota) => Err(ApiError::QuotaExceeded { quota }),
        }
    }

    /// The approval that a run needs before it may start, unless it is granted to its session.
    async fn approval(
        &self,
        caller: &Caller,
        session: SessionId,
        spec: &RunSpec,
        floor: IsolationLevel,
    ) -> Result<Option<NewApproval>, ApiError> {
        let Context { options, store, .. } = &*self.context;
        let Some(need) = approval_needed(spec, options, floor) else { return Ok(None) };
        let Grant { kind, host, port } = &need.grant;
        let may_be_granted = !kind.is_once_only();
        if may_be_granted && store.approval_granted(&caller.tenant, session, &need.grant).await?.is_some() {
            return Ok(None);
        }
        Ok(Some(NewApproval {
            id: ApprovalId::generate(),
            kind: *kind,
            host: host.clone(),
            port: *port,
            message: need.message,
            requested_by: caller.key,
            timeout: options.timeouts.approval,
        }))
    }

    fn push(&self, run: &Run, push: Push) -> JoinHandle<()> {
        let (context, run) = (self.context.clone(), run.clone());
        task::background("push", async move { context.dispatch.push(&run, push).await })
    }

    fn offer(&self, run: &Run) -> JoinHandle<()> {
        let (context, session, mode) = (self.context.clone(), run.session, run.spec.mode);
        task::background("offer", async move { drop(context.dispatch.offer(session, mode).await) })
    }

    /// Finds a run, which must belong to the session in its name.
    async fn find(&self, caller: &Caller, name: RunName) -> Result<Run, ApiError> {
        let not_found = || ApiError::not_found("run", name.run);
        let run = self.context.store.run_get(&caller.tenant, name.run).await?.ok_or_else(not_found)?;
        let belongs = match name.session {
            SessionSelector::Any => true,
            SessionSelector::One(SessionRef::Id(id)) => id == run.session,
            SessionSelector::One(alias @ SessionRef::Alias(_)) => {
                self.session_id(caller, &alias).await? == Some(run.session)
            }
        };
        if belongs { Ok(run) } else { Err(not_found()) }
    }

    async fn session_id(&self, caller: &Caller, session: &SessionRef) -> Result<Option<SessionId>, ApiError> {
        let found = self.context.store.session_spec(&caller.tenant, session).await?;
        Ok(found.map(|(id, _)| id))
    }

    async fn list(
        &self,
        caller: &Caller,
        wire: v1::ListRunsRequest,
    ) -> Result<v1::ListRunsResponse, ApiError> {
        let mut page = Page::<RunId, _>::parse(&caller.tenant, &wire)?;
        let sessions = resource_name::session_selector("parent", &wire.parent)?;
        let mut filter = RunFilter {
            session: None,
            state: match validate::enum_value("state", wire.state)? {
                v1::RunState::Unspecified => None,
                v1::RunState::Queued => Some(RunState::Queued),
                v1::RunState::Running => Some(RunState::Running),
                v1::RunState::Ended => Some(RunState::Ended),
            },
            created_after: validate::time("created_after", wire.created_after)?,
            created_before: validate::time("created_before", wire.created_before)?,
            labels: validate::labels(wire.labels)?,
            before: None,
        };
        if let SessionSelector::One(session) = sessions {
            let Some(id) = self.session_id(caller, &session).await? else {
                return Err(session_lookup::missing(&self.context.store, &caller.tenant, &session).await);
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

    async fn cancel(&self, caller: &Caller, wire: v1::CancelRunRequest) -> Result<Run, ApiError> {
        let name = resource_name::run("name", &wire.name)?;
        let cancellation = cancellation(wire.reason, wire.grace)?;
        let id = match name.session {
            SessionSelector::Any => name.run,
            SessionSelector::One(_) => self.find(caller, name).await?.id,
        };
        cancel_run(&self.context, &caller.tenant, id, &cancellation).await
    }

    /// Signals the command of a run. Fails unless the worker has passed it on.
    async fn signal(&self, caller: &Caller, wire: v1::SignalRunRequest) -> Result<Run, ApiError> {
        let name = resource_name::run("name", &wire.name)?;
        let signal = validate::signal(wire.signal)?;
        let run = self.find(caller, name).await?;
        let (RunState::Running, Some(address)) = (run.state, &run.worker_address) else {
            return Err(ApiError::RunNotRunning);
        };
        let known = self.context.dispatch.signal(address, run.id, signal).await;
        match known.map_err(|error| ApiError::unavailable(format!("signal at {address}: {error}")))? {
            true => Ok(run),
            false => Err(ApiError::RunNotRunning),
        }
    }

    /// Applies or drops the changes of a run that wait for a decision.
    async fn decide_changes(&self, caller: &Caller, name: &str, apply: bool) -> Result<v1::Run, ApiError> {
        let run = self.find(caller, resource_name::run("name", name)?).await?;
        let run = changes::decide(&self.context, caller, run, apply).await?;
        Ok(shown(caller, &run, to_proto::run(&run)))
    }

    /// Finds the run that a watch request names, and the position to send output from.
    async fn watched(&self, caller: &Caller, wire: v1::WatchRunRequest) -> Result<(Run, i64), ApiError> {
        let name = resource_name::run("name", &wire.name)?;
        let position = validate::position(wire.position)?;
        Ok((self.find(caller, name).await?, position))
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
                    return Err(ApiError::invalid("attach.stored_only", "only for WatchRun; leave it unset"));
                }
                let (run, position) =
                    self.watched(&caller, wire).await.map_err(|error| error.within("attach"))?;
                (caller, RecordedRun { run, next: NextStep::Nothing }, position, false)
            }
        };
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let streamer =
            EventStreamer::new(self.context.clone(), caller.tenant.clone(), position, events.clone())
                .for_operator(is_operator(&caller));
        let streamer = match recorded.next {
            NextStep::Nothing => streamer,
            NextStep::Push(push) => streamer.push_to(push),
            NextStep::Offer => streamer.after_offer(self.offer(&recorded.run)),
        }
        .owning_run(starts);
        let input = ExecInput::new(requests, &streamer, starts);
        let exec = ExecStream { context: self.context.clone(), tenant: caller.tenant, events, deadline };
        task::background("exec", exec.run(streamer, recorded.run, input));
        Ok(ReceiverStream::new(receiver))
    }
}

fn is_operator(caller: &Caller) -> bool {
    auth::has_scope(caller, Scope::Operator)
}

/// The message with what the caller may see in addition.
fn shown<Spec>(caller: &Caller, run: &Run<Spec>, message: v1::Run) -> v1::Run {
    if is_operator(caller) { to_proto::for_operator(run, message) } else { message }
}

type EventReceiver = ReceiverStream<Result<v1::RunEvent, Status>>;
type BoxedStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl RunService for Runs {
    type WatchRunStream = BoxedStream<v1::WatchRunResponse>;
    type ExecStream = BoxedStream<v1::ExecResponse>;

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
        Ok(Response::new(v1::StartRunResponse { run: Some(shown(&caller, &run, to_proto::run(&run))) }))
    }

    async fn watch_run(
        &self,
        request: Request<v1::WatchRunRequest>,
    ) -> Result<Response<Self::WatchRunStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let stored_only = request.get_ref().stored_only;
        let (run, position) = self.watched(&caller, request.into_inner()).await?;
        let (events, receiver) = mpsc::channel(EVENT_BUFFER);
        let is_operator = is_operator(&caller);
        let streamer = EventStreamer::new(self.context.clone(), caller.tenant, position, events)
            .for_operator(is_operator)
            .stored_only(stored_only);
        task::background("watch", run_stream::watch(streamer, run, deadline));
        let events = ReceiverStream::new(receiver);
        let events = events.map(|event| event.map(|event| v1::WatchRunResponse { event: Some(event) }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn exec(
        &self,
        request: Request<Streaming<v1::ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let admitted = auth::admitted(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let events = self.open_exec(&admitted, request.into_inner(), deadline).await?;
        let events = events.map(|event| event.map(|event| v1::ExecResponse { event: Some(event) }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn get_run(
        &self,
        request: Request<v1::GetRunRequest>,
    ) -> Result<Response<v1::GetRunResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let v1::GetRunRequest { name, include_env, include_usage, include_processes } = request.into_inner();
        let name = resource_name::run("name", &name)?;
        if include_env {
            auth::require_scope(&caller, Scope::Admin)?;
        }
        let mut run = self.find(&caller, name).await?;
        let mut response = v1::GetRunResponse::default();
        if include_usage || include_processes {
            let answer = live_usage::of(&self.context, &mut run, include_processes).await?;
            if include_usage {
                (response.live_usage, response.live_usage_unavailable) = (answer.usage, answer.unavailable);
            }
            if include_processes {
                response.processes = answer.processes;
                response.processes_unavailable = answer.processes_unavailable;
            }
        }
        let message = if include_env { to_proto::run_with_env(&run) } else { to_proto::run(&run) };
        let approval = self.context.store.approval_of_start(&caller.tenant, run.id).await;
        let approval = approval.map_err(ApiError::from)?.map(to_proto::approval);
        response.run = Some(v1::Run { approval, ..shown(&caller, &run, message) });
        Ok(Response::new(response))
    }

    async fn list_runs(
        &self,
        request: Request<v1::ListRunsRequest>,
    ) -> Result<Response<v1::ListRunsResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.list(&caller, request.into_inner()).await?))
    }

    async fn cancel_run(
        &self,
        request: Request<v1::CancelRunRequest>,
    ) -> Result<Response<v1::CancelRunResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let run = self.cancel(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::CancelRunResponse { run: Some(shown(&caller, &run, to_proto::run(&run))) }))
    }

    async fn signal_run(
        &self,
        request: Request<v1::SignalRunRequest>,
    ) -> Result<Response<v1::SignalRunResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let run = self.signal(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::SignalRunResponse { run: Some(shown(&caller, &run, to_proto::run(&run))) }))
    }

    async fn apply_changes(
        &self,
        request: Request<v1::ApplyChangesRequest>,
    ) -> Result<Response<v1::ApplyChangesResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let run = self.decide_changes(&caller, &request.get_ref().name, true).await?;
        Ok(Response::new(v1::ApplyChangesResponse { run: Some(run) }))
    }

    async fn discard_changes(
        &self,
        request: Request<v1::DiscardChangesRequest>,
    ) -> Result<Response<v1::DiscardChangesResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let run = self.decide_changes(&caller, &request.get_ref().name, false).await?;
        Ok(Response::new(v1::DiscardChangesResponse { run: Some(run) }))
    }
}

/// The limits of the session's files, where the request for a run in a new session has them: they are
/// the new session's.
fn move_disk_limits(
    run: &mut v1::StartRunRequest,
    session: &mut v1::CreateSessionRequest,
) -> Result<(), ApiError> {
    let Some(limits) = &mut run.limits else { return Ok(()) };
    let of_session = session.limits.get_or_insert_default();
    let moved = [
        (Limit::DiskBytes, limits.disk_bytes.take(), &mut of_session.disk_bytes),
        (Limit::Inodes, limits.inodes.take(), &mut of_session.inodes),
    ];
    for (limit, of_run, of_session) in moved {
        let Some(requested) = of_run else { continue };
        if *of_session.get_or_insert(requested) != requested {
            let message = "differs from that of new_session; set it there only";
            return Err(ApiError::invalid(limit.field(), message));
        }
    }
    Ok(())
}
