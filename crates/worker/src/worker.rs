//! Builds the parts of a worker and connects them.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use codelia_store::{FlagTally, NewWorker, Store};
use codelia_types::{ByteSize, Incarnation};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::{
    core::{Core, Wakeups},
    disk::{Disk, Space},
    drain::Drainer,
    egress::Egress,
    files::FileService,
    lease::{
        drain_state::DrainState,
        progress::Progress,
        worker_lease::{LeaseHandle, LeaseTerm, WorkerLease},
    },
    options::Options,
    registration::Registration,
    rpc::service::RunService,
    run::{dispatch::Dispatcher, executor::Executor, poll::Poller, registry::RunRegistry},
    sandbox::{backends::Backends, receipts::Receipts, spare_pool::SparePool},
    session::{acquire::SessionLeases, disk_report::DiskReporter, table::Sessions},
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
    pub(crate) progress: Arc<Progress>,
    pub(crate) registration: Registration,
    pub(crate) leases: SessionLeases,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) poller: Arc<Poller>,
    pub(crate) upkeep: Upkeep,
    pub(crate) drainer: Drainer,
    pub(crate) disk_reporter: DiskReporter,
}

impl Worker {
    pub(crate) fn new(
        options: Options,
        store: Store,
        backends: Backends,
        root: SessionRoot,
        address: String,
    ) -> Arc<Self> {
        let settings = &options.worker;
        let term = LeaseTerm { ttl: settings.lease_ttl, margin: settings.lease_margin() };
        let connection = store.lease_connection((settings.lease_ttl / 4).max(MIN_LEASE_TIMEOUT));
        let core = core(options, store, backends, root);
        let leases = SessionLeases { core: core.clone() };
        let executor = Executor { core: core.clone() };
        let dispatcher = Arc::new(Dispatcher { core: core.clone(), executor });
        let poller = Arc::new(Poller {
            core: core.clone(),
            leases: leases.clone(),
            dispatcher: dispatcher.clone(),
            last: Mutex::default(),
        });
        let registration = Registration {
            connection,
            runtime: Handle::current(),
            record: record(&core, &address),
            dispatcher: dispatcher.clone(),
            was_fenced: AtomicBool::new(false),
            core: core.clone(),
        };
        let upkeep = Upkeep {
            core: core.clone(),
            removals: RemovalBackoff::default(),
            leases: leases.clone(),
        };
        let drainer =
            Drainer { core: core.clone(), poller: poller.clone(), dispatcher: dispatcher.clone() };
        Arc::new(Self {
            disk_reporter: DiskReporter { core: core.clone(), memory: Mutex::default() },
            core,
            address,
            term,
            progress: Arc::new(Progress::new(term)),
            registration,
            leases,
            dispatcher,
            poller,
            upkeep,
            drainer,
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
        FileService::new(self.core.clone(), self.leases.clone())
    }
}

fn core(options: Options, store: Store, backends: Backends, root: SessionRoot) -> Arc<Core> {
    let receipts = Arc::<Receipts>::default();
    let spares = SparePool::new(max_spares(&options), receipts.clone());
    let disk = Arc::new(Disk::new(root.path(), root.quota()));
    let reserve = options.worker.disk_reserve.map(ByteSize::bytes);
    Arc::new(Core {
        lease: LeaseHandle::new(options.id.clone(), WorkerLease::none()),
        sessions: Arc::new(Sessions::new(spares, disk.clone())),
        runs: Arc::new(RunRegistry::new()),
        slots: Mutex::new(Slots::new(options.worker.slots(), MAX_WAITING)),
        root: Arc::new(root),
        backends: Arc::new(backends),
        egress: Egress::new(&options, store.clone()),
        disk,
        space: Arc::new(Space::new(&options.root, reserve)),
        flags: FlagTally::default(),
        drain: Arc::new(DrainState::new(receipts.clone())),
        receipts,
        wakeups: Wakeups::default(),
        store,
        options,
    })
}

fn max_spares(options: &Options) -> usize {
    let by_descriptors = options.open_files / 4 / DESCRIPTORS_PER_SANDBOX;
    (options.worker.slots() * 2 + EXTRA_SPARES)
        .min(usize::try_from(by_descriptors).unwrap_or(usize::MAX))
}

/// The record that the worker registers.
fn record(core: &Core, address: &str) -> NewWorker {
    let options = &core.options;
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
