//! Builds the parts of a worker and connects them.

use std::{
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Duration,
};

use codelia_store::{FlagTally, NewWorker, Retention, Store};
use codelia_types::Incarnation;
use tokio::runtime::Handle;

use crate::{
    Options,
    disk::{Disk, DiskReporter, Space},
    egress::Egress,
    files::{FileService, Workspaces},
    lease::{
        acquire::SessionLeases,
        drain::Drainer,
        drain_state::DrainState,
        poll::Poller,
        registration::Registration,
        sessions::Sessions,
        turns::Turns,
        worker_lease::{LeaseHandle, LeaseTerm, WorkerLease},
    },
    rpc::service::RunService,
    run::{dispatch::Dispatcher, execute::Executor, held::Decider, registry::RunRegistry, slots::SlotQueue},
    sandbox::{backends::Backends, receipts::Receipts, spare_maker::SpareMaker, spare_pool::SparePool},
    wakeups::Wakeups,
    workspace::{janitor::Janitor, removal_backoff::RemovalBackoff, root::SessionRoot},
};

/// Runs that wait for a slot here; more wait in the store alone.
const MAX_WAITING: usize = 16 * 1024;
/// How long a statement of the lease keeper may take at least. A slower one is tried again on a new
/// connection.
const MIN_LEASE_TIMEOUT: Duration = Duration::from_secs(1);
/// Spare sandboxes in addition to two for each slot.
const EXTRA_SPARES: usize = 64;
/// Spare sandboxes use at most a quarter of the descriptors, at this many each.
const DESCRIPTORS_PER_SANDBOX: u64 = 16;

/// The parts of a worker. Only the wiring sees it; each part holds the others that it uses.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) address: String,
    pub(crate) term: LeaseTerm,
    pub(crate) poll_interval: Duration,
    pub(crate) retention: Retention,
    file_call_timeout: Duration,
    pub(crate) store: Store,
    pub(crate) lease: LeaseHandle,
    pub(crate) turns: Arc<Turns>,
    pub(crate) drain: Arc<DrainState>,
    pub(crate) registration: Arc<Registration>,
    pub(crate) backends: Arc<Backends>,
    pub(crate) receipts: Arc<Receipts>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) root: Arc<SessionRoot>,
    pub(crate) runs: Arc<RunRegistry>,
    pub(crate) leases: Arc<SessionLeases>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) poller: Arc<Poller>,
    pub(crate) janitor: Janitor,
    pub(crate) drainer: Drainer,
    pub(crate) wakeups: Arc<Wakeups>,
    pub(crate) egress: Arc<Egress>,
    pub(crate) flags: Arc<FlagTally>,
    pub(crate) disk: Arc<Disk>,
    pub(crate) disk_reporter: DiskReporter,
}

/// State that most parts share.
struct Shared {
    store: Store,
    lease: LeaseHandle,
    receipts: Arc<Receipts>,
    sessions: Arc<Sessions>,
    runs: Arc<RunRegistry>,
    slots: Arc<SlotQueue>,
    root: Arc<SessionRoot>,
    backends: Arc<Backends>,
    drain: Arc<DrainState>,
    wakeups: Arc<Wakeups>,
    egress: Arc<Egress>,
    /// What happens under mode flags.
    flags: Arc<FlagTally>,
    disk: Arc<Disk>,
    space: Arc<Space>,
}

impl Worker {
    pub(crate) fn new(
        options: &Options,
        store: Store,
        backends: Backends,
        root: SessionRoot,
        address: String,
    ) -> Arc<Self> {
        let shared = Shared::new(options, store, backends, root);
        let spares = shared.spare_maker();
        let executor = shared.executor(spares.clone(), options);
        let dispatcher = shared.dispatcher(executor);
        let leases = shared.leases(spares);
        let poller = shared.poller(leases.clone(), dispatcher.clone());
        let term = LeaseTerm { ttl: options.lease_ttl, margin: options.lease_margin };
        Arc::new(Self {
            term,
            turns: Arc::new(Turns::new(term)),
            drain: shared.drain.clone(),
            poll_interval: options.poll_interval,
            retention: options.retention,
            file_call_timeout: options.file_call_timeout,
            registration: shared.registration(options, &address, dispatcher.clone()),
            janitor: shared.janitor(options, leases.clone()),
            drainer: shared.drainer(options, poller.clone(), dispatcher.clone()),
            disk_reporter: shared.disk_reporter(),
            address,
            poller,
            dispatcher,
            leases,
            store: shared.store,
            lease: shared.lease,
            backends: shared.backends,
            receipts: shared.receipts,
            sessions: shared.sessions,
            root: shared.root,
            runs: shared.runs,
            wakeups: shared.wakeups,
            egress: shared.egress,
            flags: shared.flags,
            disk: shared.disk,
        })
    }

    /// The service through which apis start and attach to runs.
    pub(crate) fn run_service(&self) -> RunService {
        RunService {
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            runs: self.runs.clone(),
            leases: self.leases.clone(),
            dispatcher: self.dispatcher.clone(),
            wakeups: self.wakeups.clone(),
        }
    }

    /// The service through which apis read and write the files of sessions.
    pub(crate) fn file_service(&self) -> FileService {
        let workspaces = Workspaces {
            sessions: self.sessions.clone(),
            root: self.root.clone(),
            lease: self.lease.clone(),
            call_timeout: self.file_call_timeout,
            disk: self.disk.clone(),
        };
        let (decider, space) = (self.janitor.decider.clone(), self.disk_reporter.space.clone());
        FileService::new(workspaces, decider, self.leases.clone(), space)
    }
}

fn max_spares(options: &Options) -> usize {
    let by_descriptors = options.open_files / 4 / DESCRIPTORS_PER_SANDBOX;
    (options.slots * 2 + EXTRA_SPARES).min(usize::try_from(by_descriptors).unwrap_or(usize::MAX))
}

impl Shared {
    fn new(options: &Options, store: Store, backends: Backends, root: SessionRoot) -> Self {
        let receipts = Arc::<Receipts>::default();
        let spares = SparePool::new(max_spares(options), receipts.clone());
        let egress = Egress::new(options, store.clone());
        let disk = Arc::new(Disk::new(root.path(), root.quota()));
        Self {
            store,
            lease: LeaseHandle::new(options.id.clone(), WorkerLease::none()),
            sessions: Arc::new(Sessions::new(spares, disk.clone())),
            runs: Arc::new(RunRegistry::new()),
            space: Arc::new(Space::new(&options.root, options.disk_reserve_bytes)),
            slots: Arc::new(SlotQueue::new(options.slots, MAX_WAITING)),
            root: Arc::new(root),
            backends: Arc::new(backends),
            drain: Arc::new(DrainState::new(receipts.clone())),
            receipts,
            wakeups: Arc::default(),
            egress,
            flags: Arc::default(),
            disk,
        }
    }

    fn spare_maker(&self) -> Arc<SpareMaker> {
        Arc::new(SpareMaker {
            sessions: self.sessions.clone(),
            backends: self.backends.clone(),
            root: self.root.clone(),
            slots: self.slots.clone(),
            drain: self.drain.clone(),
            egress: self.egress.clone(),
        })
    }

    fn executor(&self, spares: Arc<SpareMaker>, options: &Options) -> Arc<Executor> {
        Arc::new(Executor {
            store: self.store.clone(),
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            runs: self.runs.clone(),
            root: self.root.clone(),
            backends: self.backends.clone(),
            spares,
            receipts: self.receipts.clone(),
            wakeups: self.wakeups.clone(),
            egress: self.egress.clone(),
            flags: self.flags.clone(),
            disk: self.disk.clone(),
            space: self.space.clone(),
            kill_grace: options.kill_grace,
            read_timeout: options.read_timeout,
            escape: options.escape,
            secret_key: options.secret_key.clone(),
        })
    }

    fn dispatcher(&self, executor: Arc<Executor>) -> Arc<Dispatcher> {
        Arc::new(Dispatcher {
            store: self.store.clone(),
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            runs: self.runs.clone(),
            slots: self.slots.clone(),
            executor,
            drain: self.drain.clone(),
        })
    }

    fn leases(&self, spares: Arc<SpareMaker>) -> Arc<SessionLeases> {
        Arc::new(SessionLeases {
            store: self.store.clone(),
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            runs: self.runs.clone(),
            root: self.root.clone(),
            spares,
            space: self.space.clone(),
            drain: self.drain.clone(),
            wakeups: self.wakeups.clone(),
            disk: self.disk.clone(),
        })
    }

    fn poller(&self, leases: Arc<SessionLeases>, dispatcher: Arc<Dispatcher>) -> Arc<Poller> {
        Arc::new(Poller {
            store: self.store.clone(),
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            runs: self.runs.clone(),
            leases,
            dispatcher,
            drain: self.drain.clone(),
            last: Mutex::default(),
        })
    }

    fn registration(
        &self,
        options: &Options,
        address: &str,
        dispatcher: Arc<Dispatcher>,
    ) -> Arc<Registration> {
        let record = NewWorker {
            id: options.id.clone(),
            incarnation: Incarnation::generate(),
            previous: None,
            root_id: self.root.id,
            address: address.to_owned(),
            modes: self.backends.modes(),
            watched_modes: self.backends.watched_modes(),
            slots: i32::try_from(options.slots).unwrap_or(i32::MAX),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            lease_ttl: options.lease_ttl,
        };
        Arc::new(Registration {
            connection: self.store.lease_connection((options.lease_ttl / 4).max(MIN_LEASE_TIMEOUT)),
            runtime: Handle::current(),
            lease: self.lease.clone(),
            record,
            sessions: self.sessions.clone(),
            runs: self.runs.clone(),
            receipts: self.receipts.clone(),
            dispatcher,
            drain: self.drain.clone(),
            wakeups: self.wakeups.clone(),
            was_fenced: AtomicBool::new(false),
        })
    }

    fn janitor(&self, options: &Options, leases: Arc<SessionLeases>) -> Janitor {
        let decider = Decider {
            store: self.store.clone(),
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            root: self.root.clone(),
        };
        Janitor {
            decider: Arc::new(decider),
            leases,
            store: self.store.clone(),
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            runs: self.runs.clone(),
            slots: self.slots.clone(),
            root: self.root.clone(),
            backends: self.backends.clone(),
            removals: RemovalBackoff::default(),
            min_free_memory_bytes: options.min_free_memory_bytes,
        }
    }

    fn disk_reporter(&self) -> DiskReporter {
        DiskReporter {
            store: self.store.clone(),
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            disk: self.disk.clone(),
            space: self.space.clone(),
            memory: Mutex::default(),
        }
    }

    fn drainer(&self, options: &Options, poller: Arc<Poller>, dispatcher: Arc<Dispatcher>) -> Drainer {
        Drainer {
            store: self.store.clone(),
            lease: self.lease.clone(),
            sessions: self.sessions.clone(),
            runs: self.runs.clone(),
            poller,
            dispatcher,
            state: self.drain.clone(),
            flags: self.flags.clone(),
            grace: options.drain_grace,
            kill_grace: options.kill_grace,
        }
    }
}
