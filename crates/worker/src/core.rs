//! The state that the parts of a worker share. It does nothing by itself.

use std::sync::Arc;

use codelia_store::Store;
use tokio::sync::Notify;

use crate::{
    disk::Disk,
    lease::{drain_state::DrainState, worker_lease::LeaseHandle},
    run::registry::RunRegistry,
    sandbox::backends::Backends,
    session::table::Sessions,
    workspace::root::SessionRoot,
};

/// What a worker has and knows. Each part holds it and adds what only that part uses.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) store: Store,
    pub(crate) lease: LeaseHandle,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) runs: Arc<RunRegistry>,
    pub(crate) root: Arc<SessionRoot>,
    pub(crate) backends: Arc<Backends>,
    pub(crate) disk: Arc<Disk>,
    pub(crate) drain: Arc<DrainState>,
    pub(crate) wakeups: Wakeups,
}

/// Wakes loops before their interval is over.
#[derive(Debug, Default)]
pub(crate) struct Wakeups {
    pub(crate) poll: Notify,
    pub(crate) upkeep: Notify,
}
