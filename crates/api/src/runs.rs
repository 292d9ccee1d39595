//! `RunService`: records runs, hands them to workers, shows them, ends them.

use std::{pin::Pin, sync::Arc, time::Instant};

use codelia_proto::v1::{self, run_service_server::RunService};
use codelia_store::{Caller, EventKind, NewRun, Run, RunAdmission, RunFilter, RunState, SessionRef};
use codelia_telemetry::{Step, metrics, task};
use codelia_types::{Incarnation, RunId, SessionId, TenantId};
use futures::{Stream, StreamExt};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    admission::{RunRequest, check_available, fingerprint},
    audit, auth,
    context::Context,
    exec::{Conversation, Inputs, Opening, opening},
    paging::Page,
    request::Deadline,
    resource_name::{self, RunName},
    status::ApiError,
    to_proto, validate,
    watch::{self, EVENTS_AHEAD, Watcher},
};

/// The service.
#[derive(Debug)]
pub(crate) struct Runs {
    pub(crate) context: Arc<Context>,
}

/// A run that was recorded, now or before.
struct Recorded {
    run: Run,
    next: Next,
}

/// What a recorded run needs. Nobody waits for it: a worker's poll would find the run too.
enum Next {
    /// It is on its way.
    Nothing,
    /// To be pushed to the worker that it is recorded for.
    Push(Incarnation),
    /// A worker that takes its session.
    Offer,
}

/// Asks for a run's end: in the store, and of its worker.
pub(crate) async fn cancel(context: &Arc<Context>, tenant: &TenantId, id: RunId) -> Result<Run, ApiError> {
    let run = context.store.run_cancel(tenant, id).await?.ok_or(ApiError::NotFound)?;
    if let (RunState::Running, Some(address)) = (run.state, run.worker_address.clone()) {
        let context = context.clone();
        task::background("cancel", async move { context.dispatch.cancel(&address, id).await });
    }
    Ok(run)
}

impl Runs {
    async fn start(&self, caller: &Caller, request: RunRequest) -> Result<Recorded, ApiError> {
        let session = request.session.clone();
        let recorded = self.admit(caller, request).await;
        if let Err(error) = &recorded {
            let store = &self.context.store;
            audit::record(store, caller, EventKind::RunRefused, Some(&session), error).await;
        }
        recorded
    }

    async fn admit(&self, caller: &Caller, request: RunRequest) -> Result<Recorded, ApiError> {
        let Context { options, store, specs, output, .. } = &*self.context;
        let begun = Instant::now();
        let found = specs.of(store, &caller.tenant, &request.session).await?;
        let (session, session_spec) = found.ok_or(ApiError::NotFound)?;
        let spec = request.specify(&session_spec, options, caller.floor)?;
        if spec.mode != session_spec.mode {
            check_available(store, spec.mode).await?;
        }
        output.check(store, caller).await?;
        let hash = fingerprint(&request)?;
        let admitted = Instant::now();
        metrics().step(Step::Admit, admitted - begun);
        let new = NewRun {
            id: RunId::generate(),
            session,
            tenant: &caller.tenant,
            spec: &spec,
            labels: &request.labels,
            retries: request.retries,
            idempotency: request.idempotency_key.as_deref().map(|key| (key, hash.as_slice())),
        };
        let admission = store.run_insert(new, caller.quotas).await?;
        metrics().step(Step::Record, admitted.elapsed());
        match admission {
            RunAdmission::Recorded { run, incarnation } => {
                Ok(Recorded { run: *run, next: incarnation.map_or(Next::Offer, Next::Push) })
            }
            RunAdmission::Existing(run) => Ok(Recorded { run: *run, next: Next::Nothing }),
            RunAdmission::KeyReused => Err(ApiError::KeyReused),
            RunAdmission::NoSession => Err(ApiError::NotFound),
            RunAdmission::SessionEnded => Err(ApiError::SessionEnded),
            RunAdmission::SessionDataLost => Err(ApiError::SessionDataLost),
            RunAdmission::OverQuota(quota) => Err(ApiError::OverQuota { quota }),
        }
    }

    fn push(&self, run: &Run, incarnation: Incarnation) -> JoinHandle<()> {
        let (context, run) = (self.context.clone(), run.clone());
        task::background("push", async move { context.dispatch.push(&run, incarnation).await })
    }

    fn offer(&self, run: &Run) -> JoinHandle<()> {
        let (context, session, mode) = (self.context.clone(), run.session, run.spec.mode);
        task::background("offer", async move { drop(context.dispatch.offer(session, mode).await) })
    }

    /// Finds a run, which must belong to the session it is named in.
    async fn find(&self, caller: &Caller, name: RunName) -> Result<Run, ApiError> {
        let run = self.context.store.run_get(&caller.tenant, name.run).await?.ok_or(ApiError::NotFound)?;
        let belongs = match name.session {
            None => true,
            Some(SessionRef::Id(id)) => id == run.session,
            Some(alias @ SessionRef::Alias(_)) => self.session_id(caller, &alias).await? == run.session,
        };
        if belongs { Ok(run) } else { Err(ApiError::NotFound) }
    }

    async fn session_id(&self, caller: &Caller, which: &SessionRef) -> Result<SessionId, ApiError> {
        let found = self.context.store.run_session(&caller.tenant, which).await?;
        found.map(|(id, _)| id).ok_or(ApiError::NotFound)
    }

    async fn list(
        &self,
        caller: &Caller,
        wire: v1::ListRunsRequest,
    ) -> Result<v1::ListRunsResponse, ApiError> {
        let page = Page::<RunId>::read(wire.page_size, &wire.page_token)?;
        let session = resource_name::any_session("parent", &wire.parent)?;
        let mut filter = RunFilter {
            session: None,
            state: match validate::known("state", wire.state)? {
                v1::RunState::Unspecified => None,
                v1::RunState::Queued => Some(RunState::Queued),
                v1::RunState::Running => Some(RunState::Running),
                v1::RunState::Ended => Some(RunState::Ended),
            },
            created_after: validate::time("created_after", wire.created_after)?,
            created_before: validate::time("created_before", wire.created_before)?,
            before: page.after,
        };
        if let Some(session) = session {
            filter.session = Some(self.session_id(caller, &session).await?);
        }
        let mut rows = self.context.store.run_list(&caller.tenant, &filter, page.limit).await?;
        let next_page_token = page.cut(&mut rows, |run| run.id);
        Ok(v1::ListRunsResponse { runs: rows.iter().map(to_proto::run).collect(), next_page_token })
    }

    async fn cancel(&self, caller: &Caller, wire: v1::CancelRunRequest) -> Result<Run, ApiError> {
        let name = resource_name::run("name", &wire.name)?;
        let id = if name.session.is_some() { self.find(caller, name).await?.id } else { name.run };
        cancel(&self.context, &caller.tenant, id).await
    }

    /// Finds the run that a watch request names, and from where its output is wanted.
    async fn watched(&self, caller: &Caller, wire: v1::WatchRunRequest) -> Result<(Run, i64), ApiError> {
        let name = resource_name::run("name", &wire.name)?;
        let position = validate::position(wire.position)?;
        Ok((self.find(caller, name).await?, position))
    }

    async fn converse(
        &self,
        caller: Caller,
        mut requests: Streaming<v1::ExecRequest>,
        deadline: Deadline,
    ) -> Result<EventStream, ApiError> {
        let (recorded, position, starts) = match opening(&mut requests).await? {
            Opening::Start(wire) => {
                let request = RunRequest::read(*wire, true, &self.context.options)
                    .map_err(|error| error.within("start"))?;
                let recorded = self.start(&caller, request).await.map_err(|error| error.within("start"))?;
                (recorded, 0, true)
            }
            Opening::Attach(wire) => {
                let found = self.watched(&caller, wire).await.map_err(|error| error.within("attach"))?;
                (Recorded { run: found.0, next: Next::Nothing }, found.1, false)
            }
        };
        let (out, events) = mpsc::channel(EVENTS_AHEAD);
        let watcher = Watcher::new(self.context.clone(), caller.tenant.clone(), position, out.clone());
        let watcher = match recorded.next {
            Next::Nothing => watcher,
            Next::Push(incarnation) => watcher.pushing(incarnation),
            Next::Offer => watcher.after(self.offer(&recorded.run)),
        }
        .owning(starts);
        let inputs = Inputs::new(requests, &watcher, starts);
        let conversation =
            Conversation { context: self.context.clone(), tenant: caller.tenant, out, deadline };
        task::background("exec", conversation.hold(watcher, recorded.run, inputs));
        Ok(ReceiverStream::new(events))
    }
}

type EventStream = ReceiverStream<Result<v1::RunEvent, Status>>;
type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl RunService for Runs {
    type WatchRunStream = Boxed<v1::WatchRunResponse>;
    type ExecStream = Boxed<v1::ExecResponse>;

    async fn start_run(
        &self,
        request: Request<v1::StartRunRequest>,
    ) -> Result<Response<v1::StartRunResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let request = RunRequest::read(request.into_inner(), false, &self.context.options)?;
        let Recorded { run, next } = self.start(&caller, request).await?;
        match next {
            Next::Nothing => {}
            Next::Push(incarnation) => drop(self.push(&run, incarnation)),
            Next::Offer => drop(self.offer(&run)),
        }
        Ok(Response::new(v1::StartRunResponse { run: Some(to_proto::run(&run)) }))
    }

    async fn watch_run(
        &self,
        request: Request<v1::WatchRunRequest>,
    ) -> Result<Response<Self::WatchRunStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::of_call(&request);
        let (run, position) = self.watched(&caller, request.into_inner()).await?;
        let (out, events) = mpsc::channel(EVENTS_AHEAD);
        let watcher = Watcher::new(self.context.clone(), caller.tenant, position, out);
        task::background("watch", watch::serve(watcher, run, deadline));
        let events = ReceiverStream::new(events);
        let events = events.map(|event| event.map(|event| v1::WatchRunResponse { event: Some(event) }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn exec(
        &self,
        request: Request<Streaming<v1::ExecRequest>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::of_call(&request);
        let events = self.converse(caller, request.into_inner(), deadline).await?;
        let events = events.map(|event| event.map(|event| v1::ExecResponse { event: Some(event) }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn get_run(
        &self,
        request: Request<v1::GetRunRequest>,
    ) -> Result<Response<v1::GetRunResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let name = resource_name::run("name", &request.into_inner().name)?;
        let run = self.find(&caller, name).await?;
        Ok(Response::new(v1::GetRunResponse { run: Some(to_proto::run(&run)) }))
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
        Ok(Response::new(v1::CancelRunResponse { run: Some(to_proto::run(&run)) }))
    }
}
