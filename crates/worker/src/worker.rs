//! Builds the parts of a worker and connects them.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use codelia_store::{FlagTally, NewWorker, Retention, Store};
use codelia_types::{ByteSize, Incarnation};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::{
    core::{Core, Wakeups},
    disk::{Disk, Space},
    drain::Drainer,
    egress::Egress,
    files::{FileService, Workspaces},
    lease::{
        drain_state::DrainState,
        progress::Progress,
        worker_lease::{LeaseHandle, LeaseTerm, WorkerLease},
    },
    options::Options,
    registration::Registration,
    rpc::service::RunService,
    run::{
        changes::held::Decider, dispatch::Dispatcher, executor::Executor, poll::Poller,
        registry::RunRegistry, signs::canary::CanaryResponder,
    },
    sandbox::{backends::Backends, receipts::Receipts, spare_pool::SparePool},
    session::{
        acquire::SessionLeases, disk_report::DiskReporter, spare_maker::SpareMaker, table::Sessions,
    },
    slots::Slots,
    upkeep::Upkeep,
    workspace::{removal_backoff::RemovalBackoff, root::SessionRoot},
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

/// The parts of a worker that its loops and services call.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) core: Arc<Core>,
    pub(crate) address: String,
    pub(crate) term: LeaseTerm,
    pub(crate) poll_interval: Duration,
    pub(crate) retention: Retention,
    file_call_timeout: Duration,
    pub(crate) progress: Arc<Progress>,
    pub(crate) receipts: Arc<Receipts>,
    pub(crate) registration: Registration,
    pub(crate) leases: Arc<SessionLeases>,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) poller: Arc<Poller>,
    pub(crate) upkeep: Upkeep,
    pub(crate) drainer: Drainer,
    pub(crate) egress: Arc<Egress>,
    pub(crate) canaries: Arc<CanaryResponder>,
    pub(crate) flags: Arc<FlagTally>,
    pub(crate) disk_reporter: DiskReporter,
}

impl Worker {
    pub(crate) fn new(
        options: &Options,
        store: Store,
        backends: Backends,
        root: SessionRoot,
        address: String,
    ) -> Arc<Self> {
        let settings = &options.worker;
        let escape = Arc::new(options.escape.clone());
        let receipts = Arc::<Receipts>::default();
        let egress = Egress::new(options, store.clone());
        let core = core(options, store, backends, root, &receipts);
        let slots = Arc::new(Mutex::new(Slots::new(settings.slots(), MAX_WAITING)));
        let space = Arc::new(Space::new(&options.root, settings.disk_reserve.map(ByteSize::bytes)));
        let flags = Arc::<FlagTally>::default();
        let canaries = Arc::new(CanaryResponder::new(core.clone(), escape.clone()));
        let spares = Arc::new(SpareMaker {
            core: core.clone(),
            slots: slots.clone(),
            egress: egress.clone(),
        });
        let executor = Arc::new(Executor {
            core: core.clone(),
            spares: spares.clone(),
            receipts: receipts.clone(),
            egress: egress.clone(),
            flags: flags.clone(),
            space: space.clone(),
            canaries: canaries.clone(),
            kill_grace: options.kill_grace,
            read_timeout: options.read_timeout,
            escape,
            secret_key: options.secret_key.clone(),
        });
        let dispatcher =
            Arc::new(Dispatcher { core: core.clone(), slots: slots.clone(), executor });
        let leases = Arc::new(SessionLeases { core: core.clone(), spares, space: space.clone() });
        let poller = Arc::new(Poller {
            core: core.clone(),
            leases: leases.clone(),
            dispatcher: dispatcher.clone(),
            last: Mutex::default(),
        });
        let registration = Registration {
            connection: core
                .store
                .lease_connection((settings.lease_ttl / 4).max(MIN_LEASE_TIMEOUT)),
            runtime: Handle::current(),
            record: record(options, &core, &address),
            receipts: receipts.clone(),
            dispatcher: dispatcher.clone(),
            was_fenced: AtomicBool::new(false),
            core: core.clone(),
        };
        let upkeep = Upkeep {
            core: core.clone(),
            slots,
            removals: RemovalBackoff::default(),
            decider: Arc::new(Decider { core: core.clone() }),
            leases: leases.clone(),
            min_free_memory_bytes: settings.min_free_memory.bytes(),
        };
        let drainer = Drainer {
            core: core.clone(),
            poller: poller.clone(),
            dispatcher: dispatcher.clone(),
            flags: flags.clone(),
            grace: settings.drain_grace(),
            kill_grace: options.kill_grace,
        };
        let term = LeaseTerm { ttl: settings.lease_ttl, margin: settings.lease_margin() };
        Arc::new(Self {
            disk_reporter: DiskReporter { core: core.clone(), space, memory: Mutex::default() },
            core,
            address,
            term,
            poll_interval: settings.poll_interval,
            retention: options.retention,
            file_call_timeout: settings.file_call_timeout,
            progress: Arc::new(Progress::new(term)),
            receipts,
            registration,
            leases,
            dispatcher,
            poller,
            upkeep,
            drainer,
            egress,
            canaries,
            flags,
        })
    }

    /// The service through which apis start and attach to runs.
    pub(crate) fn run_service(&self) -> RunService {
        RunService {
            core: self.core.clone(),
            leases: self.leases.clone(),
            dispatcher: self.dispatcher.clone(),
        }
    }

    /// The service through which apis read and write the files of sessions.
    pub(crate) fn file_service(&self) -> FileService {
        let workspaces =
            Workspaces { core: self.core.clone(), call_timeout: self.file_call_timeout };
        let (decider, space) = (self.upkeep.decider.clone(), self.disk_reporter.space.clone());
        FileService::new(workspaces, decider, self.leases.clone(), space)
    }
}

fn core(
    options: &Options,
    store: Store,
    backends: Backends,
    root: SessionRoot,
    receipts: &Arc<Receipts>,
) -> Arc<Core> {
    let spares = SparePool::new(max_spares(options), receipts.clone());
    let disk = Arc::new(Disk::new(root.path(), root.quota()));
    Arc::new(Core {
        store,
        lease: LeaseHandle::new(options.id.clone(), WorkerLease::none()),
        sessions: Arc::new(Sessions::new(spares, disk.clone())),
        runs: Arc::new(RunRegistry::new()),
        root: Arc::new(root),
        backends: Arc::new(backends),
        disk,
        drain: Arc::new(DrainState::new(receipts.clone())),
        wakeups: Wakeups::default(),
    })
}

fn max_spares(options: &Options) -> usize {
    let by_descriptors = options.open_files / 4 / DESCRIPTORS_PER_SANDBOX;
    (options.worker.slots() * 2 + EXTRA_SPARES)
        .min(usize::try_from(by_descriptors).unwrap_or(usize::MAX))
}

/// What the worker registers.
fn record(options: &Options, core: &Core, address: &str) -> NewWorker {
    NewWorker {
        id: options.id.clone(),
        incarnation: Incarnation::generate(),
        previous: None,
        root_id: core.root.id,
        address: address.to_owned(),
        modes: core.backends.modes(),
        watched_modes: core.backends.watched_modes(),
        slots: i32::try_from(options.worker.slots()).unwrap_or(i32::MAX),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        lease_ttl: options.worker.lease_ttl,
    }
}
