//! The state that the parts of a worker share. It does nothing by itself.

use std::sync::Arc;

use codelia_store::{FlagTally, Store};
use tokio::sync::Notify;

use crate::{
    disk::{Disk, Space},
    egress::Egress,
    lease::{drain_state::DrainState, worker_lease::LeaseHandle},
    options::Options,
    run::registry::RunRegistry,
    sandbox::{backends::Backends, receipts::Receipts},
    session::table::Sessions,
    slots::SlotQueue,
    workspace::root::SessionRoot,
};

/// State and settings of a worker. Each part holds it and adds what only that part uses.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: Options,
    pub(crate) store: Store,
    pub(crate) lease: LeaseHandle,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) runs: Arc<RunRegistry>,
    pub(crate) slots: SlotQueue,
    pub(crate) root: Arc<SessionRoot>,
    pub(crate) backends: Arc<Backends>,
    pub(crate) receipts: Arc<Receipts>,
    pub(crate) egress: Arc<Egress>,
    pub(crate) disk: Arc<Disk>,
    pub(crate) space: Arc<Space>,
    /// How the runs of sessions ended whose mode a flag chose.
    pub(crate) flags: FlagTally,
    pub(crate) drain: Arc<DrainState>,
    pub(crate) wakeups: Wakeups,
}

/// Wakes loops before their interval is over.
#[derive(Debug, Default)]
pub(crate) struct Wakeups {
    pub(crate) poll: Arc<Notify>,
    pub(crate) upkeep: Arc<Notify>,
}
