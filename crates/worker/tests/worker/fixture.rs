//! One worker with its own database, root and caller.

use std::{collections::BTreeMap, num::NonZeroUsize, path::PathBuf, sync::Arc, time::Duration};

use codelia_backends::Backend;
use codelia_policy::{Limits, LimitsRequest, RunSpec};
use codelia_proto::{
    internal::v1::{
        Attach, AttachRunRequest, AttachRunResponse, OfferSessionRequest, PushResult,
        StartRunRequest, attach_run_request::Kind as Input, attach_run_response::Kind as Answer,
        worker_service_client::WorkerServiceClient,
    },
    timestamp_to_proto,
    v1::{file_service_client::FileServiceClient, run_event::Kind as Event},
};
use codelia_store::{
    NewRun, NewSession, NewWorker, Quotas, Run, RunAdmission, RunState, SessionRef, SessionSpec,
    Store,
};
use codelia_telemetry::task::background;
use codelia_tests::{Database, Scratch, eventually, is_root, within};
use codelia_types::{
    ByteSize, CommandSpec, Incarnation, KeyId, Mode, RunId, SessionId, TenantId, WorkerId,
};
use codelia_worker::{Error, Listen, Options, Service, UidRange, WorkerOptions};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};
use uuid::Uuid;

use crate::process_backend::ProcessBackend;

pub(crate) type Caller = WorkerServiceClient<Channel>;

/// A running worker and everything around it.
pub(crate) struct Fixture {
    pub(crate) store: Store,
    pub(crate) caller: Caller,
    pub(crate) files: FileServiceClient<Channel>,
    pub(crate) tenant: TenantId,
    pub(crate) worker: WorkerId,
    /// The mode of its sessions.
    mode: Mode,
    shutdown: CancellationToken,
    service: JoinHandle<Result<(), Error>>,
    scratch: Scratch,
    pub(crate) database: Database,
}

/// Settings that differ between tests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) slots: usize,
    pub(crate) lease_ttl: Duration,
    pub(crate) drain_grace: Duration,
    pub(crate) file_call_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            slots: 4,
            lease_ttl: Duration::from_secs(30),
            drain_grace: Duration::from_secs(20),
            file_call_timeout: Duration::from_secs(60),
        }
    }
}

impl Fixture {
    pub(crate) async fn new(settings: Settings) -> Self {
        Self::with(settings, vec![Arc::new(ProcessBackend::default())]).await
    }

    pub(crate) async fn with(settings: Settings, backends: Vec<Arc<dyn Backend>>) -> Self {
        let mode = backends[0].mode();
        let (database, store) = Database::migrated().await.unwrap();
        let tenant: TenantId = "team".parse().unwrap();
        store.tenant_create(&tenant, Quotas::default()).await.unwrap();
        let scratch = Scratch::new().unwrap();
        let worker: WorkerId = "w-1".parse().unwrap();
        let service = Service::start(options(&worker, &scratch, settings), store.clone(), backends);
        let service = service.await.unwrap();
        let channel =
            Endpoint::from_shared(service.address().to_owned()).unwrap().connect().await.unwrap();
        let shutdown = CancellationToken::new();
        Self {
            store,
            mode,
            files: FileServiceClient::new(channel.clone()),
            caller: WorkerServiceClient::new(channel),
            tenant,
            worker,
            service: background("worker", service.run(shutdown.clone())),
            shutdown,
            scratch,
            database,
        }
    }

    /// Asks the worker to shut down and waits until it has.
    pub(crate) async fn shut_down(&mut self) {
        self.shutdown.cancel();
        within("the worker shuts down", &mut self.service).await.unwrap().unwrap();
    }

    pub(crate) async fn end(mut self) {
        if !self.service.is_finished() {
            self.shut_down().await;
        }
        self.store.close().await;
        self.database.end().await.unwrap();
    }

    pub(crate) fn directory(&self, session: SessionId) -> PathBuf {
        let sessions = self.scratch.path().canonicalize().unwrap().join("root/sessions");
        sessions.join(session.to_string()).join("workspace")
    }

    /// Creates a session that no worker holds.
    pub(crate) async fn session(&self, ttl: Duration) -> SessionId {
        let id = SessionId::generate();
        let spec = SessionSpec {
            mode: self.mode,
            limits: Limits::default(),
            requested_limits: LimitsRequest::default(),
            network: None,
            policy: codelia_policy::Policy::default(),
            flags: codelia_policy::SessionFlags::default(),
            scopes: codelia_policy::SessionScopes::default(),
            profile: None,
        };
        let new = NewSession {
            id,
            tenant: &self.tenant,
            key: KeyId::generate(),
            alias: None,
            spec: &spec,
            labels: &BTreeMap::new(),
            ttl,
            idle_ttl: None,
            allow_data_loss: false,
            idempotency: None,
            check_quota: true,
        };
        self.store.session_create(new, Quotas::default()).await.unwrap();
        id
    }

    /// Creates a session that the worker holds.
    pub(crate) async fn held_session(&self) -> SessionId {
        let id = self.session(Duration::from_secs(600)).await;
        let offer = OfferSessionRequest { session_id: id.to_string(), is_new: false };
        assert!(self.caller.clone().offer_session(offer).await.unwrap().into_inner().taken);
        id
    }

    /// Records a run, as an api does.
    pub(crate) async fn record(
        &self,
        session: SessionId,
        spec: &RunSpec,
    ) -> (Run, Option<Incarnation>) {
        let new = NewRun {
            id: RunId::generate(),
            session,
            tenant: &self.tenant,
            spec,
            labels: &BTreeMap::new(),
            queue_timeout: Duration::from_secs(600),
            retries: 0,
            idempotency: None,
            secret_env: None,
            check_quotas: true,
            key: KeyId::generate(),
            key_version: None,
            requested_by: None,
            traceparent: None,
            approval: None,
        };
        match self.store.run_insert(new, Quotas::default()).await.unwrap() {
            RunAdmission::Recorded { run, incarnation, .. } => (*run, incarnation),
            other => panic!("the run was not recorded: {other:?}"),
        }
    }

    pub(crate) async fn push(&self, run: &Run, incarnation: Option<Incarnation>) -> PushResult {
        let request = push_request(run, incarnation);
        self.caller.clone().start_run(request).await.unwrap().into_inner().result()
    }

    /// Records a run and pushes it.
    pub(crate) async fn start(&self, session: SessionId, spec: &RunSpec) -> RunId {
        let (run, incarnation) = self.record(session, spec).await;
        let pushed = self.push(&run, incarnation).await;
        // The poll may have found the run first and ended it.
        assert!(
            pushed == PushResult::Started || self.row(run.id).await.outcome().is_some(),
            "{pushed:?}"
        );
        run.id
    }

    pub(crate) async fn attach(&self, run: RunId, owner: bool) -> Attached {
        self.attach_by(Attach { run_id: run.to_string(), position: 0, owner, start: None }).await
    }

    /// Pushes a run and attaches to it in one call.
    pub(crate) async fn push_and_attach(
        &self,
        run: &Run,
        incarnation: Option<Incarnation>,
    ) -> Attached {
        let start = Some(push_request(run, incarnation));
        self.attach_by(Attach { run_id: run.id.to_string(), position: 0, owner: false, start })
            .await
    }

    async fn attach_by(&self, attach: Attach) -> Attached {
        let (input, messages) = mpsc::channel(16);
        input.send(AttachRunRequest { kind: Some(Input::Attach(attach)) }).await.unwrap();
        let events = self
            .caller
            .clone()
            .attach_run(ReceiverStream::new(messages))
            .await
            .unwrap()
            .into_inner();
        Attached { input, events }
    }

    /// Another incarnation of the worker: registering it fences this one.
    pub(crate) fn successor(&self) -> NewWorker {
        NewWorker {
            previous: None,
            id: self.worker.clone(),
            incarnation: Incarnation::generate(),
            root_id: Uuid::new_v4(),
            address: "unix:/nowhere".into(),
            modes: vec![Mode::Logical],
            watched_modes: vec![],
            slots: 1,
            version: "0".into(),
            lease_ttl: Duration::from_millis(1),
        }
    }

    pub(crate) async fn row(&self, run: RunId) -> Run {
        self.store.run_get(&self.tenant, run).await.unwrap().unwrap()
    }

    /// Waits until a run has ended.
    pub(crate) async fn ended(&self, run: RunId) -> Run {
        let ended =
            || async { Some(self.row(run).await).filter(|run| run.state == RunState::Ended) };
        eventually("the run ends", ended).await
    }

    /// Reads all stored output of a run.
    pub(crate) async fn output(&self, run: RunId) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let position = i64::try_from(all.len()).unwrap();
            let chunks =
                self.store.output_read(&self.tenant, run, position, 1 << 20).await.unwrap();
            if chunks.is_empty() {
                return all;
            }
            for chunk in chunks {
                assert_eq!(chunk.position, i64::try_from(all.len()).unwrap());
                all.extend(chunk.data);
            }
        }
    }

    pub(crate) async fn holder(&self, session: SessionId) -> Option<WorkerId> {
        self.store
            .session_get(&self.tenant, &SessionRef::Id(session))
            .await
            .unwrap()
            .unwrap()
            .holder
    }
}

/// A caller attached to a run.
pub(crate) struct Attached {
    input: mpsc::Sender<AttachRunRequest>,
    events: Streaming<AttachRunResponse>,
}

fn push_request(run: &Run, incarnation: Option<Incarnation>) -> StartRunRequest {
    StartRunRequest {
        run_id: run.id.to_string(),
        session_id: run.session.to_string(),
        tenant_id: run.tenant.to_string(),
        incarnation: incarnation.unwrap().to_string(),
        lease_epoch: run.lease_epoch.unwrap().0,
        create_time: Some(timestamp_to_proto(run.created_at)),
        attempt: run.attempt,
        spec: serde_json::to_vec(&run.spec).unwrap(),
        secret_env: Vec::new(),
    }
}

impl Attached {
    pub(crate) async fn send(&self, kind: Input) {
        self.input.send(AttachRunRequest { kind: Some(kind) }).await.unwrap();
    }

    pub(crate) async fn next(&mut self) -> Option<Answer> {
        let message = within("an event", self.events.message()).await.unwrap()?;
        message.kind
    }

    /// Waits until the output contains `text`.
    pub(crate) async fn until(&mut self, text: &str) {
        let mut seen = String::new();
        while !seen.contains(text) {
            if let Some(Event::Output(output)) = self.event().await {
                seen.push_str(&String::from_utf8_lossy(&output.data));
            }
        }
    }

    /// Returns the next event, or `None` if the next message is not an event.
    pub(crate) async fn event(&mut self) -> Option<Event> {
        match self.next().await.expect("the stream is open") {
            Answer::Event(event) => event.kind,
            Answer::StoredUntil(_) | Answer::Committed(_) => None,
        }
    }
}

pub(crate) fn options(worker: &WorkerId, scratch: &Scratch, settings: Settings) -> Options {
    Options {
        id: worker.clone(),
        root: scratch.join("root"),
        listen: Listen::Unix(scratch.join("run/worker.sock")),
        internal_tls: None,
        worker: WorkerOptions {
            slots: NonZeroUsize::new(settings.slots),
            lease_ttl: settings.lease_ttl,
            poll_interval: Duration::from_millis(100),
            drain_grace: Some(settings.drain_grace),
            file_call_timeout: settings.file_call_timeout,
            min_free_memory: ByteSize::new(0),
            disk_reserve: Some(ByteSize::new(0)),
            ..WorkerOptions::default()
        },
        kill_grace: Duration::from_millis(200),
        read_timeout: Duration::from_secs(60),
        escape: codelia_policy::EscapeOptions::default(),
        retention: codelia_store::Retention::default(),
        required_mode: None,
        uids: is_root().then_some(UidRange { base: 400_000, count: 1000 }),
        secret_key: None,
        open_files: 1024,
        egress: codelia_egress::Options::default(),
        cgroup_parent: codelia_backends::CgroupParent::default(),
    }
}

/// Returns the spec of a run of a shell script.
pub(crate) fn shell(script: &str) -> RunSpec {
    RunSpec {
        command: CommandSpec::new(["sh", "-c", script]),
        mode: Mode::Logical,
        network: None,
        limits: Limits::default(),
        requested_limits: LimitsRequest::default(),
        policy: codelia_policy::Policy::default(),
        ends_with_caller: false,
        tool: None,
        transaction: None,
    }
}
