//! The egress proxy of this worker: a process of its own that serves the sandboxes in network mode
//! `proxy`.
//!
//! The table of sandboxes says what the proxy should know, and the task in `serve` brings it there:
//! it starts the proxy with the first sandbox, restarts it when it dies, and sends what has
//! changed. A run never waits for the proxy, except for its last records.

mod asks;
mod control;
mod process;
mod records;
mod rules;
mod sandbox;
mod serve;
mod tenants;
mod trust;
mod updates;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use codelia_backends::{CgroupParent, EgressSockets};
use codelia_egress::{
    Config, User,
    control::{Decision, OPEN_SOCKETS},
};
use codelia_policy::NetworkPolicy;
use codelia_store::{EventBody, EventKind, EventSubject, Store};
use codelia_telemetry::metrics;
use codelia_types::{RunId, WorkerId};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::options::Options;

use asks::Ask;
use rules::{BaseRules, Lists};
use sandbox::Sandbox;
use tenants::Tenants;

pub(crate) use records::{NetworkRecord, attempts};
pub(crate) use rules::RulesTooLarge;
pub(crate) use sandbox::Subject;
pub use trust::TrustError;
pub(crate) use trust::TrustStore;

/// `nobody`: no session has it, and it owns nothing.
const UNPRIVILEGED: User = User { uid: 65534, gid: 65534 };
/// How long the last records of a sandbox may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the proxy may take to end with the worker.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Sandboxes in mode `proxy` use at most half of the descriptors, at this many each: its sockets
/// and those of its processes.
const DESCRIPTORS_PER_SANDBOX: u64 = OPEN_SOCKETS as u64 + 29;
/// Hosts that wait for a person to be asked.
const MAX_ASKS: usize = 256;

/// The egress proxy of this worker.
#[derive(Debug)]
pub(crate) struct Egress {
    config: Config,
    cgroup: CgroupParent,
    store: Store,
    worker: WorkerId,
    tenants: Tenants,
    table: Mutex<Table>,
    /// Something in the table has changed.
    changed: Notify,
    descriptors: Arc<Semaphore>,
    asks: mpsc::Sender<Ask>,
    asked: Mutex<Option<mpsc::Receiver<Ask>>>,
    stop: CancellationToken,
    stopped: CancellationToken,
}

#[derive(Debug, Default)]
struct Table {
    /// Whether a sandbox was prepared or opened, so that a proxy is needed.
    is_wanted: bool,
    /// Whether a proxy runs.
    is_serving: bool,
    sandboxes: HashMap<RunId, Arc<Sandbox>>,
    /// Sandboxes that have changed since the proxy was sent something about them.
    changed: HashSet<RunId>,
}

/// Decisions for a session since it was created.
#[derive(Debug, Default)]
pub(crate) struct Decided {
    /// The lists that hold for it now.
    lists: Lists,
    /// The hosts and ports that a person has allowed.
    grants: Vec<(String, u16)>,
}

/// A sandbox that is served. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct OpenSandbox {
    egress: Arc<Egress>,
    sandbox: Arc<Sandbox>,
}

impl Egress {
    pub(crate) fn new(options: &Options, store: Store) -> Arc<Self> {
        let max = options.open_files / 2 / DESCRIPTORS_PER_SANDBOX;
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        let (asks, asked) = mpsc::channel(MAX_ASKS);
        Arc::new(Self {
            config: Config {
                user: rustix::process::geteuid().is_root().then_some(UNPRIVILEGED),
                ..options.egress.clone().into()
            },
            cgroup: options.cgroup_parent.clone(),
            store,
            worker: options.id.clone(),
            tenants: Tenants::default(),
            table: Mutex::default(),
            changed: Notify::new(),
            descriptors: Arc::new(Semaphore::new(max.clamp(1, Semaphore::MAX_PERMITS))),
            asks,
            asked: Mutex::new(Some(asked)),
            stop: CancellationToken::new(),
            stopped: CancellationToken::new(),
        })
    }

    /// The trust store of sandboxes whose requests get credentials; `None` if none are configured.
    pub(crate) fn trust_store(options: &Options) -> Result<Option<TrustStore>, TrustError> {
        let egress = &options.egress;
        let authority = egress.authority().filter(|_| egress.credentials_file.is_some());
        authority.as_ref().map(TrustStore::load).transpose()
    }

    /// Starts the proxy if it does not run: a sandbox will need it soon.
    pub(crate) fn warm(&self) {
        self.table.lock().is_wanted = true;
        self.changed.notify_one();
    }

    /// Waits until there are enough descriptors for one more sandbox.
    pub(crate) async fn reserve(&self) -> Option<OwnedSemaphorePermit> {
        // Fails only if the semaphore is closed, which never happens.
        self.descriptors.clone().acquire_owned().await.ok()
    }

    /// The same without waiting; `None` if there are too few.
    pub(crate) fn try_reserve(&self) -> Option<OwnedSemaphorePermit> {
        self.descriptors.clone().try_acquire_owned().ok()
    }

    /// Reads what was decided for a run's session since it was created.
    pub(crate) async fn decided(&self, subject: &Subject) -> Result<Decided, codelia_store::Error> {
        let sessions = [subject.session];
        let (networks, grants) = tokio::try_join!(
            self.store.session_networks(&sessions),
            asks::grants(&self.store, subject)
        )?;
        let lists = match networks.into_iter().next() {
            Some(changed) => self.tenants.lists(&self.store, &subject.tenant, changed).await?,
            None => Lists::default(),
        };
        Ok(Decided { lists, grants })
    }

    /// Has the proxy serve a sandbox, as long as the returned value lives. Call it before the
    /// command starts. `session` is the network policy that the session was created with.
    ///
    /// # Errors
    /// The lists of the policy are too long.
    pub(crate) fn open(
        self: &Arc<Self>,
        subject: Subject,
        policy: &NetworkPolicy,
        session: Option<&NetworkPolicy>,
        decided: Decided,
        sockets: EgressSockets,
        descriptors: OwnedSemaphorePermit,
    ) -> Result<OpenSandbox, RulesTooLarge> {
        let base = BaseRules::new(policy, session, decided.lists.tenant.as_deref());
        let rules = base.under(&decided.lists)?;
        let run = subject.run;
        let sandbox = Arc::new(Sandbox::new(subject, base, rules, sockets, descriptors));
        for (host, port) in decided.grants {
            sandbox.decide(host, port, Decision::Always);
        }
        let mut table = self.table.lock();
        table.sandboxes.insert(run, sandbox.clone());
        metrics().egress.sandboxes(table.sandboxes.len());
        drop(table);
        self.mark(run);
        Ok(OpenSandbox { egress: self.clone(), sandbox })
    }

    /// Ends the proxy and waits until it is gone.
    pub(crate) async fn shut_down(&self) {
        self.stop.cancel();
        if timeout(STOP_TIMEOUT, self.stopped.cancelled()).await.is_err() {
            tracing::error!("egress proxy did not end in time");
        }
    }

    /// A sandbox has changed: the proxy must learn of it.
    fn mark(&self, run: RunId) {
        let mut table = self.table.lock();
        table.is_wanted = true;
        table.changed.insert(run);
        drop(table);
        self.changed.notify_one();
    }

    fn sandbox(&self, run: RunId) -> Option<Arc<Sandbox>> {
        self.table.lock().sandboxes.get(&run).cloned()
    }

    fn all(&self) -> Vec<Arc<Sandbox>> {
        self.table.lock().sandboxes.values().cloned().collect()
    }

    fn remove(&self, run: RunId) {
        let mut table = self.table.lock();
        table.sandboxes.remove(&run);
        metrics().egress.sandboxes(table.sandboxes.len());
        drop(table);
        self.mark(run);
    }

    /// Records that the proxy died. The event is for operators: it has no tenant.
    async fn record_restart(&self, how: &str) {
        let subject = EventSubject { worker: Some(self.worker.clone()), ..EventSubject::default() };
        let detail = serde_json::json!({ "ended": how });
        let body = EventBody { kind: EventKind::EgressRestarted, field: None, detail };
        if let Err(error) = self.store.audit_insert(&subject, &body).await {
            tracing::warn!(%error, "cannot record the restart of the egress proxy");
        }
    }
}

impl OpenSandbox {
    /// Closes the sandbox and waits for its last records. Call it when its processes are dead.
    pub(crate) async fn close(self) -> NetworkRecord {
        self.sandbox.begin_close();
        if self.egress.table.lock().is_serving {
            self.egress.mark(self.sandbox.subject.run);
            if timeout(CLOSE_TIMEOUT, self.sandbox.closed.cancelled()).await.is_err() {
                tracing::warn!(run = %self.sandbox.subject.run, "egress proxy did not close a sandbox in time");
            }
        }
        self.sandbox.take_record()
    }
}

impl Drop for OpenSandbox {
    fn drop(&mut self) {
        self.sandbox.begin_close();
        self.egress.remove(self.sandbox.subject.run);
    }
}
