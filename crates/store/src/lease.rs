//! The lease columns of `sessions`, and what happens to runs when a lease changes hands.

use codelia_policy::{Incarnation, LeaseEpoch, SessionId, TenantId, WorkerId};

use crate::{Error, SessionSpec, Store};

/// A worker's right to a session.
#[derive(Debug, Clone)]
pub struct Lease {
    /// The session.
    pub session: SessionId,
    /// Whose it is.
    pub tenant: TenantId,
    /// This acquisition.
    pub epoch: LeaseEpoch,
    /// What the session was created with.
    pub spec: SessionSpec,
    /// Whether the session's files may be there already.
    pub has_files: bool,
}

/// What became of leases whose worker is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Sessions that nobody holds now.
    pub sessions: u64,
    /// Started runs that are queued again, because their caller allowed it.
    pub retried: u64,
    /// Started runs that ended as lost.
    pub lost: u64,
}

/// What became of a lease that was to be released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// It is.
    Yes,
    /// A run of the session has not ended.
    Busy,
    /// It was not the caller's any more.
    NotHeld,
}

impl Store {
    /// Takes an open session that nobody live holds, or that an earlier incarnation of this
    /// worker held; its started runs become lost or queued again. `None` if it may not be taken.
    pub async fn lease_acquire(
        &self,
        session: SessionId,
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<Option<Lease>, Error> {
        todo!()
    }

    /// Gives a session back, if none of its runs is running.
    pub async fn lease_release(
        &self,
        session: SessionId,
        worker: &WorkerId,
        incarnation: Incarnation,
        epoch: LeaseEpoch,
    ) -> Result<Released, Error> {
        todo!()
    }

    /// Open sessions with queued runs that nobody live holds and this worker may take: fairly,
    /// at most one for each tenant first.
    pub async fn lease_list_wanted(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        limit: i64,
    ) -> Result<Vec<SessionId>, Error> {
        todo!()
    }

    /// Ends the leases of workers that are gone: started runs become lost, or queued again if
    /// their caller allowed retries. Idempotent; any api or worker may call it.
    pub async fn lease_sweep_any_tenant(&self, limit: i64) -> Result<Swept, Error> {
        todo!()
    }
}
