//! The token that proves a worker's lease on a session.

use crate::{Incarnation, LeaseEpoch, WorkerId};

/// Identifies one lease: its worker, the worker's incarnation, and the epoch.
///
/// Every write that a lease protects carries a token. The store compares all three fields, so a
/// worker that lost its lease cannot write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseToken {
    /// The worker that holds the lease.
    pub worker: WorkerId,
    /// The incarnation of the worker.
    pub incarnation: Incarnation,
    /// The epoch of the lease.
    pub epoch: LeaseEpoch,
}
