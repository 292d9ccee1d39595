//! An api, its database, and a worker that says what it is told to say.

#![allow(clippy::expect_used, reason = "all of this is test code")]

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use codelia_api::{Options, Service};
use codelia_policy::{Ceilings, IsolationLevel, Limits};
use codelia_proto::{
    internal::v1::{
        self as wire, attach_run_request, attach_run_response,
        worker_service_server::{WorkerService, WorkerServiceServer},
    },
    v1::{self, run_event},
};
use codelia_store::{NewKey, NewWorker, OutputChunk, OutputStream, Quotas, RunCommit, Scope, Store};
use codelia_telemetry::task;
use codelia_tests::{Client, Database, Scratch, within};
use codelia_types::{
    EndedRun, Incarnation, KeyId, LeaseToken, Mode, Outcome, Receipt, RunId, RunResult, SessionId, TenantId,
    Usage, WorkerId,
};
use tokio::{
    net::UnixListener,
    sync::{Mutex, mpsc, watch},
    task::JoinHandle,
};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, transport::Server};

type Answers = mpsc::Sender<Result<wire::AttachRunResponse, Status>>;

/// What the worker says or does next.
#[derive(Debug, Clone)]
pub(crate) enum Line {
    /// It does not know the run.
    Unknown,
    Assigned,
    Started,
    /// Output at this position, all of it on stdout.
    Output(i64, &'static str),
    /// Flushes output at this position to the store.
    Store(i64, &'static str),
    StoredUntil(i64),
    /// Commits, with this output at this position that was not flushed.
    Commit(i64, &'static str, Outcome),
    Committed,
    /// The stream breaks.
    Break,
}

/// An open attach.
pub(crate) struct Attached {
    pub(crate) position: i64,
    pub(crate) owner: bool,
    /// Whether the run came with it.
    pub(crate) pushed: bool,
    run: RunId,
    requests: Streaming<wire::AttachRunRequest>,
    answers: Option<Answers>,
    /// What was committed.
    ended: Option<EndedRun>,
    worker: Arc<Inner>,
}

impl Attached {
    fn committed(&self) -> wire::Committed {
        wire::Committed { ended_json: serde_json::to_string(&self.ended).expect("a result") }
    }

    /// Says these lines.
    pub(crate) async fn say(&mut self, lines: &[Line]) {
        for line in lines {
            let answer = match line.clone() {
                Line::Assigned => event(run_event::Kind::Assigned(v1::AssignedEvent::default())),
                Line::Started => event(run_event::Kind::Started(v1::StartedEvent::default())),
                Line::Output(position, text) => event(run_event::Kind::Output(output(position, text))),
                Line::StoredUntil(until) => attach_run_response::Kind::StoredUntil(until),
                Line::Committed => attach_run_response::Kind::Committed(self.committed()),
                Line::Store(position, text) => {
                    self.worker.append(self.run, position, text).await;
                    continue;
                }
                Line::Commit(position, text, outcome) => {
                    self.ended = Some(self.worker.commit(self.run, position, text, outcome).await);
                    continue;
                }
                Line::Break => {
                    self.answers = None;
                    continue;
                }
                Line::Unknown => panic!("only the first line"),
            };
            let answers = self.answers.as_ref().expect("an open stream");
            // A client that has heard enough may be gone.
            let _ = answers.send(Ok(wire::AttachRunResponse { kind: Some(answer) })).await;
        }
    }

    /// The next input.
    pub(crate) async fn input(&mut self) -> attach_run_request::Kind {
        let request = within("an input", self.requests.message()).await.expect("an open stream");
        request.and_then(|request| request.kind).expect("an input")
    }

    /// Waits until the api has left.
    pub(crate) async fn left(&mut self) {
        within("the api to leave", self.answers.as_ref().expect("an open stream").closed()).await;
    }
}

fn event(kind: run_event::Kind) -> attach_run_response::Kind {
    attach_run_response::Kind::Event(v1::RunEvent { kind: Some(kind) })
}

fn output(position: i64, text: &'static str) -> v1::OutputEvent {
    let next_position = position + i64::try_from(text.len()).expect("a length");
    let stream = v1::OutputStream::Stdout.into();
    v1::OutputEvent { stream, offset: position, data: text.as_bytes().into(), next_position }
}

fn chunk(position: i64, text: &str) -> OutputChunk {
    OutputChunk { position, stream: OutputStream::Stdout, offset: position, data: text.as_bytes().to_vec() }
}

struct Inner {
    store: Store,
    id: WorkerId,
    incarnation: Incarnation,
    knocks: mpsc::Sender<(Attached, tokio::sync::oneshot::Sender<bool>)>,
    canceled: watch::Sender<bool>,
}

impl Inner {
    async fn lease(&self, run: RunId) -> LeaseToken {
        let assigned =
            self.store.run_list_assigned(&self.id, self.incarnation).await.expect("the assigned runs");
        let epoch = assigned.iter().find(|each| each.id == run).expect("the run").epoch;
        LeaseToken { worker: self.id.clone(), incarnation: self.incarnation, epoch }
    }

    async fn append(&self, run: RunId, position: i64, text: &str) {
        let chunks = [chunk(position, text)];
        self.store.output_append(run, &self.lease(run).await, &chunks).await.expect("the append");
    }

    async fn commit(&self, run: RunId, position: i64, text: &str, outcome: Outcome) -> EndedRun {
        let tail: Vec<OutputChunk> = (!text.is_empty()).then(|| chunk(position, text)).into_iter().collect();
        let result = RunResult {
            outcome,
            usage: Usage::default(),
            receipt: Receipt::default(),
            sandbox_root: "/s".into(),
            setup_time: Some(Duration::from_millis(1)),
            prepared: false,
            unenforced: Vec::new(),
            output_bytes: position + i64::try_from(text.len()).expect("a length"),
            output_truncated: false,
            violations: Default::default(),
        };
        let started_ago = Some(Duration::from_millis(1));
        let committed = RunCommit { result, started_ago, tail, events: Vec::new() };
        self.store.run_commit(run, &self.lease(run).await, &committed).await.expect("the commit")
    }
}

struct Calls(Arc<Inner>);

#[tonic::async_trait]
impl WorkerService for Calls {
    async fn offer_session(
        &self,
        request: Request<wire::OfferSessionRequest>,
    ) -> Result<Response<wire::OfferSessionResponse>, Status> {
        let session: SessionId = request.into_inner().session_id.parse().expect("a session's id");
        let lease =
            self.0.store.lease_acquire(session, &self.0.id, self.0.incarnation).await.expect("the lease");
        let lease_epoch = lease.as_ref().map_or(0, |lease| lease.token.epoch.0);
        Ok(Response::new(wire::OfferSessionResponse { taken: lease.is_some(), lease_epoch }))
    }

    async fn start_run(
        &self,
        _: Request<wire::StartRunRequest>,
    ) -> Result<Response<wire::StartRunResponse>, Status> {
        Ok(Response::new(wire::StartRunResponse { result: wire::PushResult::Started.into() }))
    }

    type AttachRunStream = ReceiverStream<Result<wire::AttachRunResponse, Status>>;

    async fn attach_run(
        &self,
        request: Request<Streaming<wire::AttachRunRequest>>,
    ) -> Result<Response<Self::AttachRunStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|request| request.kind);
        let Some(attach_run_request::Kind::Attach(attach)) = first else {
            return Err(Status::invalid_argument("not an attach"));
        };
        let (answers, stream) = mpsc::channel(1);
        let attached = Attached {
            position: attach.position,
            owner: attach.owner,
            pushed: attach.start.is_some(),
            run: attach.run_id.parse().expect("a run's id"),
            requests,
            answers: Some(answers),
            ended: None,
            worker: self.0.clone(),
        };
        let (known, answer) = tokio::sync::oneshot::channel();
        self.0.knocks.send((attached, known)).await.map_err(|_| Status::unavailable("the test is over"))?;
        match answer.await {
            Ok(true) => Ok(Response::new(ReceiverStream::new(stream))),
            _ => Err(Status::not_found("unknown")),
        }
    }

    async fn cancel_run(
        &self,
        _: Request<wire::CancelRunRequest>,
    ) -> Result<Response<wire::CancelRunResponse>, Status> {
        self.0.canceled.send_replace(true);
        Ok(Response::new(wire::CancelRunResponse { known: true }))
    }

    async fn close_session(
        &self,
        _: Request<wire::CloseSessionRequest>,
    ) -> Result<Response<wire::CloseSessionResponse>, Status> {
        Ok(Response::new(wire::CloseSessionResponse {}))
    }
}

/// The worker, from the test's side.
pub(crate) struct Worker {
    knocks: Mutex<mpsc::Receiver<(Attached, tokio::sync::oneshot::Sender<bool>)>>,
    canceled: watch::Receiver<bool>,
}

impl Worker {
    /// Takes the next attach and answers it with these lines.
    pub(crate) async fn attached(&self, lines: &[Line]) -> Attached {
        let knock = async { self.knocks.lock().await.recv().await };
        let (mut attached, known) = within("an attach", knock).await.expect("the worker");
        if matches!(lines, [Line::Unknown]) {
            known.send(false).expect("the attach waits");
            return attached;
        }
        known.send(true).expect("the attach waits");
        attached.say(lines).await;
        attached
    }

    /// Whether it was told to cancel a run.
    pub(crate) async fn canceled(&self) -> Option<()> {
        self.canceled.borrow().then_some(())
    }

    async fn start(store: Store, scratch: &Scratch, stop: CancellationToken) -> Result<Self> {
        let (id, incarnation): (WorkerId, _) = ("scripted".parse()?, Incarnation::generate());
        let path = scratch.join("worker.sock");
        let listener = UnixListener::bind(&path)?;
        let (knocks, receiver) = mpsc::channel(16);
        let canceled = watch::Sender::new(false);
        let worker = Self { knocks: Mutex::new(receiver), canceled: canceled.subscribe() };
        let new = NewWorker {
            before: None,
            id: id.clone(),
            incarnation,
            root_id: uuid::Uuid::new_v4(),
            address: format!("unix:{}", path.display()),
            modes: vec![Mode::Logical],
            slots: 4,
            version: "test".into(),
            lease_ttl: Duration::from_secs(600),
        };
        store.worker_register(&new).await?;
        let calls = Calls(Arc::new(Inner { store, id, incarnation, knocks, canceled }));
        let incoming = UnixListenerStream::new(listener);
        let router = Server::builder().add_service(WorkerServiceServer::new(calls));
        task::background("worker", async move {
            tokio::select! {
                served = router.serve_with_incoming(incoming) => served,
                () = stop.cancelled() => Ok(()),
            }
        });
        Ok(worker)
    }
}

/// An api with one tenant, one key, one session that the worker holds.
pub(crate) struct Api {
    pub(crate) client: Client,
    pub(crate) session: String,
    pub(crate) worker: Worker,
    store: Store,
    database: Database,
    tenant: TenantId,
    key: KeyId,
    serving: JoinHandle<Result<(), codelia_api::Error>>,
    stop: CancellationToken,
    _scratch: Scratch,
}

impl Api {
    pub(crate) async fn start() -> Result<Self> {
        let (database, scratch, stop) =
            (Database::create().await?, Scratch::new()?, CancellationToken::new());
        let store = database.store().await?;
        store.migrate().await?;
        let tenant: TenantId = "acme".parse()?;
        store.tenant_create(&tenant, Quotas::default()).await?;
        store.tenant_set_floor(&tenant, IsolationLevel::None, "a test", None).await?;
        let (secret, secret_hash) = codelia_api::generate_secret();
        let new = NewKey { tenant: &tenant, display_name: "", secret_hash, scopes: &[Scope::Run] };
        let key = store.key_create(new).await?.context("a key")?.id;
        let worker = Worker::start(store.clone(), &scratch, stop.clone()).await?;
        let service = Service::bind(options(), store.clone()).await?;
        let endpoint = format!("http://{}", service.local_addr());
        let serving = task::background("api", service.serve(stop.clone()));
        let client = Client::connect(&endpoint, &secret).await?;
        let session = client.session().await?;
        anyhow::ensure!(session.worker_id == "scripted", "the session was not taken");
        let session = session.name;
        Ok(Self { client, session, worker, store, database, tenant, key, serving, stop, _scratch: scratch })
    }

    pub(crate) async fn is_cancel_requested(&self, name: &str) -> Result<bool> {
        let id = name.rsplit('/').next().unwrap_or_default().parse()?;
        let run = self.store.run_get(&self.tenant, id).await?.context("the run")?;
        Ok(run.cancel_requested)
    }

    pub(crate) async fn revoke_key(&self) -> Result<()> {
        self.store.key_revoke(&self.tenant, self.key).await?.context("the key")?;
        Ok(())
    }

    /// Stops the api and leaves the database.
    pub(crate) async fn stop(self) -> Result<Database> {
        self.stop.cancel();
        within("the api to stop", self.serving).await??;
        self.store.close().await;
        Ok(self.database)
    }

    pub(crate) async fn end(self) -> Result<()> {
        self.stop().await?.end().await
    }
}

fn options() -> Options {
    Options {
        listen: ([127, 0, 0, 1], 0).into(),
        tls: None,
        internal_tls: None,
        defaults: Limits::default(),
        ceilings: Ceilings::default(),
        policy: codelia_policy::Policy::installation(),
        default_mode: Mode::Logical,
        default_network: None,
        session_ttl: Duration::from_secs(600),
        max_session_ttl: Duration::from_secs(600),
        allow_logical: true,
        shutdown_grace: Duration::from_millis(100),
    }
}
