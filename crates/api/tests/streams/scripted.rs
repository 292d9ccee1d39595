//! An api, its database, and a worker that follows a script.

#![allow(clippy::expect_used, reason = "all of this is test code")]

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use codelia_api::{ApiOptions, ApprovalOptions, LimitOptions, Options, Service};
use codelia_policy::IsolationLevel;
use codelia_proto::{
    internal::v1::{
        self as wire, attach_run_request, attach_run_response,
        worker_service_server::{WorkerService, WorkerServiceServer},
    },
    v1::{self, run_event},
};
use codelia_store::{
    NewKey, NewWorker, OutputChunk, OutputStream, Quotas, RunCommit, Scope, Store,
};
use codelia_telemetry::task;
use codelia_tests::{Client, Database, Scratch, within};
use codelia_types::{
    ByteSize, CommittedRun, Cores, Incarnation, KeyId, LeaseToken, Mode, Outcome, Receipt, RunId,
    RunResult, SessionId, TenantId, Usage, WorkerId,
};
use tokio::{
    net::UnixListener,
    sync::{Mutex, mpsc, oneshot, watch},
    task::JoinHandle,
};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, transport::Server};

type Responses = mpsc::Sender<Result<wire::AttachRunResponse, Status>>;

/// A step of the worker's script.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// Answer that it does not know the run; only as the first step.
    Unknown,
    Assigned,
    Started,
    /// Send output at this position, on stdout.
    Output(i64, &'static str),
    /// Store output at this position.
    Store(i64, &'static str),
    StoredUntil(i64),
    /// Commit the run, with the output at this position that was not stored.
    Commit(i64, &'static str, Outcome),
    Committed,
    /// Break the stream.
    Break,
}

/// A stream that the api attached.
pub(crate) struct Attached {
    pub(crate) position: i64,
    pub(crate) owner: bool,
    /// Whether the attach pushed the run.
    pub(crate) pushed: bool,
    run: RunId,
    requests: Streaming<wire::AttachRunRequest>,
    responses: Option<Responses>,
    /// The committed result.
    committed: Option<CommittedRun>,
    worker: Arc<WorkerState>,
}

impl Attached {
    fn committed(&self) -> wire::Committed {
        let ended =
            self.committed.as_ref().map(|it| serde_json::to_vec(it).expect("result is encoded"));
        wire::Committed { ended: ended.unwrap_or_default() }
    }

    /// Plays these steps.
    pub(crate) async fn play(&mut self, steps: &[Step]) {
        for step in steps {
            let response = match step.clone() {
                Step::Assigned => event(run_event::Kind::Assigned(v1::AssignedEvent::default())),
                Step::Started => event(run_event::Kind::Started(v1::StartedEvent::default())),
                Step::Output(position, text) => {
                    event(run_event::Kind::Output(output(position, text)))
                }
                Step::StoredUntil(until) => attach_run_response::Kind::StoredUntil(until),
                Step::Committed => attach_run_response::Kind::Committed(self.committed()),
                Step::Store(position, text) => {
                    self.worker.append(self.run, position, text).await;
                    continue;
                }
                Step::Commit(position, text, outcome) => {
                    self.committed =
                        Some(self.worker.commit(self.run, position, text, outcome).await);
                    continue;
                }
                Step::Break => {
                    self.responses = None;
                    continue;
                }
                Step::Unknown => panic!("`Unknown` must be the first step"),
            };
            let responses = self.responses.as_ref().expect("the stream is open");
            // The client may have disconnected.
            let _ = responses.send(Ok(wire::AttachRunResponse { kind: Some(response) })).await;
        }
    }

    /// The next input.
    pub(crate) async fn input(&mut self) -> attach_run_request::Kind {
        let request =
            within("the next input", self.requests.message()).await.expect("the stream is open");
        request.and_then(|request| request.kind).expect("an input")
    }

    /// Waits until the api closes the stream.
    pub(crate) async fn closed(&mut self) {
        within("the api to close", self.responses.as_ref().expect("the stream is open").closed())
            .await;
    }
}

fn event(kind: run_event::Kind) -> attach_run_response::Kind {
    attach_run_response::Kind::Event(v1::RunEvent { kind: Some(kind) })
}

fn output(position: i64, text: &'static str) -> v1::OutputEvent {
    let next_position = position + i64::try_from(text.len()).expect("length fits");
    let stream = v1::OutputStream::Stdout.into();
    v1::OutputEvent { stream, offset: position, data: text.as_bytes().into(), next_position }
}

fn chunk(position: i64, text: &str) -> OutputChunk {
    OutputChunk {
        position,
        stream: OutputStream::Stdout,
        offset: position,
        data: text.as_bytes().to_vec(),
    }
}

struct WorkerState {
    store: Store,
    id: WorkerId,
    incarnation: Incarnation,
    attaches: mpsc::Sender<PendingAttach>,
    canceled: watch::Sender<bool>,
}

impl WorkerState {
    async fn lease(&self, run: RunId) -> LeaseToken {
        let assigned = self
            .store
            .run_list_assigned(&self.id, self.incarnation)
            .await
            .expect("assigned runs are read");
        let epoch =
            assigned.iter().find(|assigned| assigned.id == run).expect("the run is assigned").epoch;
        LeaseToken { worker: self.id.clone(), incarnation: self.incarnation, epoch }
    }

    async fn append(&self, run: RunId, position: i64, text: &str) {
        let chunks = [chunk(position, text)];
        self.store
            .output_append(run, &self.lease(run).await, &chunks)
            .await
            .expect("output is stored");
    }

    async fn commit(
        &self,
        run: RunId,
        position: i64,
        text: &str,
        outcome: Outcome,
    ) -> CommittedRun {
        let tail: Vec<OutputChunk> =
            (!text.is_empty()).then(|| chunk(position, text)).into_iter().collect();
        let written = position + i64::try_from(text.len()).expect("length fits");
        let result = RunResult {
            usage: Some(Usage::default()),
            receipt: Some(Receipt::default()),
            sandbox_root: Some("/s".into()),
            setup_time: Some(Duration::from_millis(1)),
            output_bytes: written,
            output_total: Some(written),
            ..outcome.into()
        };
        let started_ago = Some(Duration::from_millis(1));
        let committed = RunCommit { result, started_ago, tail, events: Vec::new(), held_for: None };
        let assigned = self
            .store
            .run_list_assigned(&self.id, self.incarnation)
            .await
            .expect("assigned runs are read");
        let assigned =
            assigned.iter().find(|assigned| assigned.id == run).expect("the run is assigned");
        self.store
            .run_commit(assigned.names(), &self.lease(run).await, &committed)
            .await
            .expect("the run is committed")
    }
}

/// An attach, and whether the worker knows its run.
type PendingAttach = (Attached, oneshot::Sender<bool>);

struct ScriptedWorker(Arc<WorkerState>);

#[tonic::async_trait]
impl WorkerService for ScriptedWorker {
    async fn offer_session(
        &self,
        request: Request<wire::OfferSessionRequest>,
    ) -> Result<Response<wire::OfferSessionResponse>, Status> {
        let session: SessionId = request.into_inner().session_id.parse().expect("a session id");
        let lease = self
            .0
            .store
            .lease_acquire(session, &self.0.id, self.0.incarnation)
            .await
            .expect("the lease is acquired");
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
        let (responses, stream) = mpsc::channel(1);
        let attached = Attached {
            position: attach.position,
            owner: attach.owner,
            pushed: attach.start.is_some(),
            run: attach.run_id.parse().expect("a run id"),
            requests,
            responses: Some(responses),
            committed: None,
            worker: self.0.clone(),
        };
        let (known, is_known) = oneshot::channel();
        self.0
            .attaches
            .send((attached, known))
            .await
            .map_err(|_| Status::unavailable("the test ended"))?;
        match is_known.await {
            Ok(true) => Ok(Response::new(ReceiverStream::new(stream))),
            _ => Err(Status::not_found("unknown run")),
        }
    }

    async fn cancel_run(
        &self,
        _: Request<wire::CancelRunRequest>,
    ) -> Result<Response<wire::CancelRunResponse>, Status> {
        self.0.canceled.send_replace(true);
        Ok(Response::new(wire::CancelRunResponse { known: true }))
    }

    async fn signal_run(
        &self,
        _: Request<wire::SignalRunRequest>,
    ) -> Result<Response<wire::SignalRunResponse>, Status> {
        Ok(Response::new(wire::SignalRunResponse { known: true }))
    }

    async fn get_run_usage(
        &self,
        _: Request<wire::GetRunUsageRequest>,
    ) -> Result<Response<wire::GetRunUsageResponse>, Status> {
        Err(Status::not_found("unknown run"))
    }

    async fn close_session(
        &self,
        _: Request<wire::CloseSessionRequest>,
    ) -> Result<Response<wire::CloseSessionResponse>, Status> {
        Ok(Response::new(wire::CloseSessionResponse {}))
    }
}

/// The test's handle to the worker.
pub(crate) struct Worker {
    attaches: Mutex<mpsc::Receiver<PendingAttach>>,
    canceled: watch::Receiver<bool>,
}

impl Worker {
    /// Accepts the next attach and plays these steps.
    pub(crate) async fn attached(&self, steps: &[Step]) -> Attached {
        let next = async { self.attaches.lock().await.recv().await };
        let (mut attached, known) = within("an attach", next).await.expect("the worker runs");
        if matches!(steps, [Step::Unknown]) {
            known.send(false).expect("the attach waits");
            return attached;
        }
        known.send(true).expect("the attach waits");
        attached.play(steps).await;
        attached
    }

    /// `Some` once the api has cancelled a run.
    pub(crate) async fn canceled(&self) -> Option<()> {
        self.canceled.borrow().then_some(())
    }

    async fn start(store: Store, scratch: &Scratch, stop: CancellationToken) -> Result<Self> {
        let (id, incarnation): (WorkerId, _) = ("scripted".parse()?, Incarnation::generate());
        let path = scratch.join("worker.sock");
        let listener = UnixListener::bind(&path)?;
        let (attaches, receiver) = mpsc::channel(16);
        let canceled = watch::Sender::new(false);
        let worker = Self { attaches: Mutex::new(receiver), canceled: canceled.subscribe() };
        let new = NewWorker {
            previous: None,
            id: id.clone(),
            incarnation,
            root_id: uuid::Uuid::new_v4(),
            address: format!("unix:{}", path.display()),
            modes: vec![Mode::Logical],
            watched_modes: vec![],
            slots: 4,
            version: "test".into(),
            lease_ttl: Duration::from_secs(600),
        };
        store.worker_register(&new).await?;
        let service =
            ScriptedWorker(Arc::new(WorkerState { store, id, incarnation, attaches, canceled }));
        let incoming = UnixListenerStream::new(listener);
        let router = Server::builder().add_service(WorkerServiceServer::new(service));
        task::background("worker", async move {
            tokio::select! {
                served = router.serve_with_incoming(incoming) => served,
                () = stop.cancelled() => Ok(()),
            }
        });
        Ok(worker)
    }
}

/// An api with one tenant, one key and one session, which the worker holds.
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
        let (database, store) = Database::migrated().await?;
        let (scratch, stop) = (Scratch::new()?, CancellationToken::new());
        let tenant: TenantId = "acme".parse()?;
        store.tenant_create(&tenant, Quotas::default()).await?;
        store.tenant_set_floor(&tenant, IsolationLevel::None, None, "a test", None).await?;
        let (secret, secret_hash) = codelia_api::generate_secret();
        let new = NewKey {
            tenant: &tenant,
            display_name: "",
            secret_hash,
            scopes: &[Scope::Run],
            expires_at: None,
        };
        let key = store.key_create(new).await?.context("a key")?.id;
        let worker = Worker::start(store.clone(), &scratch, stop.clone()).await?;
        let service = Service::bind(options(), store.clone()).await?;
        let endpoint = format!("http://{}", service.local_addr());
        let serving = task::background("api", service.serve(stop.clone()));
        let client = Client::connect(&endpoint, &secret).await?;
        let session = client.session().await?;
        anyhow::ensure!(session.worker_id == "scripted", "the worker did not take the session");
        let session = session.name;
        Ok(Self {
            client,
            session,
            worker,
            store,
            database,
            tenant,
            key,
            serving,
            stop,
            _scratch: scratch,
        })
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

    /// Stops the api and returns the database.
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
    let limits = LimitOptions::default();
    let limits = limits
        .of_runs(ByteSize::mib(512), Cores::ONE, &ApprovalOptions::default())
        .expect("the default limits");
    Options {
        api: ApiOptions {
            listen: ([127, 0, 0, 1], 0).into(),
            connection_window: ByteSize::mib(1),
            ..ApiOptions::default()
        },
        tls: None,
        internal_tls: None,
        limits,
        policy: codelia_policy::Policy::installation(),
        profiles: codelia_policy::Profiles::default(),
        default_mode: Mode::Logical,
        default_network: None,
        session_ttl: Duration::from_secs(600),
        max_session_ttl: Duration::from_secs(600),
        allow_logical: true,
        unisolated_tenant: None,
        shutdown_grace: Duration::from_millis(100),
        secret_key: None,
        open_files: 1024,
        access_log: false,
        escape: codelia_policy::EscapeOptions::default(),
        webhook: None,
        retention: codelia_store::Retention::default(),
    }
}
