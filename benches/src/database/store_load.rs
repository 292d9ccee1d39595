//! The database's part of runs, without sandboxes: what api and worker write for each run.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use codelia_store::{
    Lease, NewRun, NewSession, NewWorker, OutputChunk, OutputStream, Quotas, RunAdmission,
    RunCommit, RunRef, SessionCreated, SessionRef, Store,
};
use codelia_tests::store_values::{exit, logical_run, logical_session, logical_worker};
use codelia_types::{Incarnation, KeyId, RunId, RunResult, SessionId, TenantId, WorkerId};
use uuid::Uuid;

const LONG: Duration = Duration::from_secs(86_400);
const OUTPUT: &[u8] = b"a line of output\n";

/// A tenant and a worker that holds one session for each lane.
#[derive(Debug)]
pub(crate) struct StoreLoad {
    pub(crate) store: Store,
    pub(crate) tenant: TenantId,
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    pub(crate) root: Uuid,
    pub(crate) quotas: Quotas,
    pub(crate) leases: Vec<Lease>,
}

impl StoreLoad {
    /// Registers the tenant and the worker, and leases the sessions.
    pub(crate) async fn prepare(store: Store, lanes: usize) -> Result<Self> {
        let quotas = Quotas {
            sessions: 1_000_000_000,
            concurrent_runs: 1_000_000_000,
            queued_runs: 1_000_000_000,
            requests_per_second: 1_000_000_000,
            output_bytes: 1 << 60,
            disk_bytes: 1 << 60,
        };
        let tenant: TenantId = "load".parse()?;
        store.tenant_create(&tenant, quotas).await?;
        let worker = "load".parse::<WorkerId>()?;
        let root = Uuid::now_v7();
        let registered = NewWorker { slots: 64, ..logical_worker(worker.clone(), root, LONG) };
        let incarnation = registered.incarnation;
        store.worker_register(&registered).await?;
        let mut load =
            Self { store, tenant, worker, incarnation, root, quotas, leases: Vec::new() };
        for _ in 0..lanes {
            let session = load.create_session(None).await?;
            load.leases.push(load.lease(session).await?);
        }
        Ok(load)
    }

    /// Creates a session.
    pub(crate) async fn create_session(&self, idle_ttl: Option<Duration>) -> Result<SessionId> {
        let spec = logical_session();
        let new = NewSession {
            id: SessionId::generate(),
            tenant: &self.tenant,
            key: KeyId::generate(),
            alias: None,
            spec: &spec,
            labels: &BTreeMap::new(),
            ttl: LONG,
            idle_ttl,
            allow_data_loss: false,
            idempotency: None,
            check_quota: false,
        };
        match self.store.session_create(new, self.quotas).await? {
            SessionCreated::New { session, .. } => Ok(session.id),
            other => bail!("{other:?}"),
        }
    }

    /// Acquires the lease of a session.
    pub(crate) async fn lease(&self, session: SessionId) -> Result<Lease> {
        let lease = self.store.lease_acquire_first(session, &self.worker, self.incarnation).await?;
        lease.context("the lease was not acquired")
    }

    /// Inserts a run.
    pub(crate) async fn insert(&self, session: SessionId) -> Result<RunId> {
        let spec = logical_run();
        let new = NewRun {
            id: RunId::generate(),
            session,
            tenant: &self.tenant,
            spec: &spec,
            labels: &BTreeMap::new(),
            retries: 0,
            queue_timeout: LONG,
            idempotency: None,
            secret_env: None,
            check_quotas: false,
            key: KeyId::generate(),
            key_version: None,
            requested_by: None,
            traceparent: None,
            approval: None,
        };
        match self.store.run_insert(new, self.quotas).await? {
            RunAdmission::Recorded { run, .. } => Ok(run.id),
            other => bail!("{other:?}"),
        }
    }

    /// Commits a run with some output.
    pub(crate) async fn commit(&self, run: RunId, lease: &Lease) -> Result<()> {
        let length = i64::try_from(OUTPUT.len())?;
        let result = RunResult { output_bytes: length, output_total: Some(length), ..exit(0) };
        let chunk = OutputChunk {
            position: 0,
            stream: OutputStream::Stdout,
            offset: 0,
            data: OUTPUT.to_vec(),
        };
        let commit = RunCommit {
            result,
            started_ago: Some(Duration::from_millis(5)),
            tail: vec![chunk],
            events: vec![],
            held_for: None,
        };
        self.store
            .run_commit(
                RunRef { id: run, session: lease.session, tenant: &self.tenant },
                &lease.token,
                &commit,
            )
            .await?;
        Ok(())
    }

    /// The two writes of a run in a session that the worker holds.
    pub(crate) async fn run(&self, lane: usize) -> Result<Duration> {
        let begin = Instant::now();
        let lease = &self.leases[lane];
        let run = self.insert(lease.session).await?;
        self.commit(run, lease).await?;
        Ok(begin.elapsed())
    }

    /// All writes of a session with one run, as `codelia run` makes them.
    pub(crate) async fn session_with_run(&self) -> Result<Duration> {
        let begin = Instant::now();
        let session = self.create_session(None).await?;
        let lease = self.lease(session).await?;
        let run = self.insert(session).await?;
        self.commit(run, &lease).await?;
        self.store.session_close(&self.tenant, &SessionRef::Id(session)).await?;
        self.store.session_mark_removed(&[session], self.root).await?;
        Ok(begin.elapsed())
    }
}
