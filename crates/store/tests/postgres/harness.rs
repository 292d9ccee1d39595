//! A migrated database with two tenants, and helpers that insert sessions, runs and workers.

use std::{collections::BTreeMap, sync::LazyLock, time::Duration};

use codelia_policy::RunSpec;
use codelia_store::{
    AssignedRun, Heartbeat, Lease, NewRun, NewSession, NewWorker, Quotas, RunAdmission, RunCommit,
    RunRef, SealedEnv, Session, SessionCreated, Store,
};
use codelia_tests::{
    Database,
    store_values::{exit, logical_run, logical_session, logical_worker},
};
use codelia_types::{Incarnation, KeyId, LeaseToken, Mode, RunId, SessionId, TenantId, WorkerId};
use uuid::Uuid;

pub(crate) const LONG: Duration = Duration::from_secs(3600);
pub(crate) const ROOT: Uuid = Uuid::from_u128(1);

/// A registered worker.
#[derive(Debug, Clone)]
pub(crate) struct Registered {
    pub(crate) id: WorkerId,
    pub(crate) incarnation: Incarnation,
}

/// What a test asks of a new session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SessionRequest<'a> {
    pub(crate) alias: Option<&'a str>,
    pub(crate) idempotency: Option<(&'a str, &'a [u8])>,
    pub(crate) ttl: Duration,
    pub(crate) idle_ttl: Option<Duration>,
    pub(crate) check_quota: bool,
}

impl Default for SessionRequest<'_> {
    fn default() -> Self {
        Self { alias: None, idempotency: None, ttl: LONG, idle_ttl: None, check_quota: true }
    }
}

pub(crate) struct Fixture {
    pub(crate) store: Store,
    pub(crate) tenant: TenantId,
    pub(crate) other: TenantId,
    pub(crate) quotas: Quotas,
    pub(crate) database: Database,
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        let (database, store) = Database::migrated().await.unwrap();
        let (tenant, other): (TenantId, TenantId) = ("a".parse().unwrap(), "b".parse().unwrap());
        let quotas = Quotas::default();
        store.tenant_create(&tenant, quotas).await.unwrap();
        store.tenant_create(&other, quotas).await.unwrap();
        Self { store, tenant, other, quotas, database }
    }

    pub(crate) async fn end(self) {
        self.store.close().await;
        self.database.end().await.unwrap();
    }

    pub(crate) async fn worker(&self, id: &str) -> Registered {
        self.worker_on(id, ROOT, LONG).await
    }

    pub(crate) async fn worker_with(&self, id: &str, modes: Vec<Mode>, slots: i32) -> Registered {
        self.register(NewWorker { modes, slots, ..new_worker(id) }).await.0
    }

    pub(crate) async fn worker_on(
        &self,
        id: &str,
        root_id: Uuid,
        lease_ttl: Duration,
    ) -> Registered {
        self.register(NewWorker { root_id, lease_ttl, ..new_worker(id) }).await.0
    }

    /// Registers a new incarnation, of the same process if `previous` is set.
    pub(crate) async fn register_again(
        &self,
        id: &str,
        previous: Option<Incarnation>,
    ) -> (Registered, Heartbeat) {
        self.register(NewWorker { previous, ..new_worker(id) }).await
    }

    async fn register(&self, worker: NewWorker) -> (Registered, Heartbeat) {
        let beat = self.store.worker_register(&worker).await.unwrap();
        (Registered { id: worker.id, incarnation: worker.incarnation }, beat)
    }

    /// Ends the worker's leases now, as if it had died long ago.
    pub(crate) async fn expire_worker(&self, worker: &Registered) {
        self.store.worker_leave(&worker.id, worker.incarnation).await.unwrap();
    }

    pub(crate) async fn session(&self) -> Session {
        self.session_with(LONG, None).await
    }

    pub(crate) async fn session_with(&self, ttl: Duration, idle_ttl: Option<Duration>) -> Session {
        let request = SessionRequest { ttl, idle_ttl, ..SessionRequest::default() };
        let created = self.session_try(request, self.quotas).await.unwrap();
        match created {
            SessionCreated::New { session, .. } => *session,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn quarantine(&self, session: &Session) {
        let id = session.id;
        let quarantine = "UPDATE sessions SET quarantined_at = now(), quarantine_reason = 'x'";
        self.database.execute(&format!("{quarantine} WHERE id = '{id}'")).await.unwrap();
    }

    pub(crate) async fn session_try(
        &self,
        request: SessionRequest<'_>,
        quotas: Quotas,
    ) -> Result<SessionCreated, codelia_store::Error> {
        self.session_try_in(&self.store, request, quotas).await
    }

    pub(crate) async fn session_try_in(
        &self,
        store: &Store,
        request: SessionRequest<'_>,
        quotas: Quotas,
    ) -> Result<SessionCreated, codelia_store::Error> {
        let spec = logical_session();
        let new = NewSession {
            id: SessionId::generate(),
            tenant: &self.tenant,
            key: KeyId::generate(),
            alias: request.alias,
            spec: &spec,
            labels: &BTreeMap::new(),
            ttl: request.ttl,
            idle_ttl: request.idle_ttl,
            allow_data_loss: false,
            idempotency: request.idempotency,
            check_quota: request.check_quota,
        };
        store.session_create(new, quotas).await
    }

    pub(crate) async fn lease(&self, session: &Session, worker: &Registered) -> Option<Lease> {
        self.store.lease_acquire(session.id, &worker.id, worker.incarnation).await.unwrap()
    }

    pub(crate) async fn insert(&self, session: SessionId, retries: i32) -> RunId {
        match self.insert_try(session, retries, None, self.quotas).await {
            RunAdmission::Recorded { run, .. } => run.id,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn insert_try(
        &self,
        session: SessionId,
        retries: i32,
        idempotency: Option<(&str, &[u8])>,
        quotas: Quotas,
    ) -> RunAdmission {
        let new = NewRun { retries, idempotency, ..self.new_run(session) };
        self.store.run_insert(new, quotas).await.unwrap()
    }

    /// Inserts a run that may wait this long.
    pub(crate) async fn insert_waiting(
        &self,
        session: SessionId,
        queue_timeout: Duration,
    ) -> RunId {
        let new = NewRun { queue_timeout, ..self.new_run(session) };
        match self.store.run_insert(new, self.quotas).await.unwrap() {
            RunAdmission::Recorded { run, .. } => run.id,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn new_run(&self, session: SessionId) -> NewRun<'_> {
        static SPEC: LazyLock<RunSpec> = LazyLock::new(logical_run);
        static LABELS: BTreeMap<String, String> = BTreeMap::new();
        static SECRET: LazyLock<SealedEnv> = LazyLock::new(|| SealedEnv(b"sealed".to_vec()));
        NewRun {
            id: RunId::generate(),
            session,
            tenant: &self.tenant,
            spec: &SPEC,
            labels: &LABELS,
            queue_timeout: LONG,
            retries: 0,
            idempotency: None,
            // The database refuses every statement that ends a run and keeps them.
            secret_env: Some(&SECRET),
            check_quotas: true,
            key: KeyId(Uuid::nil()),
            key_version: None,
            requested_by: None,
            traceparent: None,
            approval: None,
        }
    }

    pub(crate) async fn assigned(&self, worker: &Registered) -> Vec<AssignedRun> {
        self.store.run_list_assigned(&worker.id, worker.incarnation).await.unwrap()
    }

    pub(crate) fn run_ref(&self, id: RunId, session: SessionId) -> RunRef<'_> {
        RunRef { id, session, tenant: &self.tenant }
    }

    pub(crate) fn names(&self, id: RunId, lease: &Lease) -> RunRef<'_> {
        RunRef { id, session: lease.session, tenant: &self.tenant }
    }

    pub(crate) async fn commit(
        &self,
        run: RunId,
        worker: &Registered,
        lease: &Lease,
    ) -> Result<(), codelia_store::Error> {
        let token = LeaseToken {
            worker: worker.id.clone(),
            incarnation: worker.incarnation,
            epoch: lease.token.epoch,
        };
        self.store.run_commit(self.names(run, lease), &token, &exited(0)).await.map(drop)
    }

    pub(crate) async fn run(&self, id: RunId) -> codelia_store::Run {
        self.store.run_get(&self.tenant, id).await.unwrap().unwrap()
    }
}

pub(crate) fn new_worker(id: &str) -> NewWorker {
    logical_worker(id.parse().unwrap(), ROOT, LONG)
}

pub(crate) fn exited(code: i32) -> RunCommit {
    RunCommit {
        result: exit(code),
        started_ago: Some(Duration::from_millis(5)),
        tail: vec![],
        events: vec![],
        held_for: None,
    }
}
