//! The table `runs`: every run reaches exactly one outcome.

use std::{collections::BTreeMap, time::Duration};

use codelia_policy::{
    Incarnation, LeaseEpoch, Outcome, Receipt, RunId, RunSpec, SessionId, TenantId, Usage, WorkerId,
};
use time::OffsetDateTime;

use crate::{Chunk, Error, Quotas, SessionSpec, Store};

/// A run.
#[derive(Debug, Clone)]
pub struct Run {
    /// Its id.
    pub id: RunId,
    /// Its session.
    pub session: SessionId,
    /// Whose it is.
    pub tenant: TenantId,
    /// As it was admitted.
    pub spec: RunSpec,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Where it is in its life.
    pub state: RunState,
    /// Whether somebody asked for its end.
    pub cancel_requested: bool,
    /// Which attempt this is, from 1.
    pub attempt: i32,
    /// Who executes or executed it.
    pub worker: Option<WorkerId>,
    /// Under which lease.
    pub lease_epoch: Option<LeaseEpoch>,
    /// The session's directory on that worker.
    pub sandbox_root: Option<String>,
    /// When it was recorded.
    pub created_at: OffsetDateTime,
    /// When its command started.
    pub started_at: Option<OffsetDateTime>,
    /// When it ended.
    pub ended_at: Option<OffsetDateTime>,
    /// From the launch being asked for to the command's execve.
    pub setup_time: Option<Duration>,
    /// Whether its sandbox was prepared before it was needed.
    pub prepared: Option<bool>,
    /// Limits that its mode could not enforce.
    pub unenforced: Vec<String>,
    /// How it ended.
    pub outcome: Option<Outcome>,
    /// What it used.
    pub usage: Option<Usage>,
    /// What its sandbox left behind.
    pub receipt: Option<Receipt>,
    /// Bytes of output kept.
    pub output_bytes: i64,
    /// Whether output was cut.
    pub output_truncated: bool,
    /// Where an api reaches the worker, while it is running on a live one.
    pub worker_address: Option<String>,
}

/// Where a run is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// No worker may have begun it.
    Queued,
    /// The named worker may have begun it.
    Running,
    /// It has its outcome.
    Ended,
}

/// A run to be recorded.
#[derive(Debug)]
pub struct NewRun<'a> {
    /// Its id.
    pub id: RunId,
    /// Its session.
    pub session: SessionId,
    /// Whose it is.
    pub tenant: &'a TenantId,
    /// As it was admitted.
    pub spec: &'a RunSpec,
    /// Free-form labels.
    pub labels: &'a BTreeMap<String, String>,
    /// How often it may be started again.
    pub retries: i32,
    /// Idempotency key and hash of the request.
    pub idempotency: Option<(&'a str, &'a [u8])>,
}

/// What became of a run to be recorded.
#[derive(Debug)]
pub enum Admission {
    /// It is recorded: as running for the live holder of its session, else as queued.
    Recorded {
        /// The run.
        run: Box<Run>,
        /// The holder's incarnation, if it is recorded for one.
        incarnation: Option<Incarnation>,
    },
    /// The idempotency key is known, with the same request: the first run.
    Known(Box<Run>),
    /// The idempotency key is known, with another request.
    KeyReused,
    /// The session is not there.
    NoSession,
    /// The session takes no runs any more.
    SessionEnded,
    /// The tenant is at this quota: `concurrent_runs` or `queued_runs`.
    OverQuota(&'static str),
}

/// A run that a worker is to execute.
#[derive(Debug, Clone)]
pub struct Assigned {
    /// Its id.
    pub id: RunId,
    /// Its session.
    pub session: SessionId,
    /// Whose it is.
    pub tenant: TenantId,
    /// As it was admitted.
    pub spec: RunSpec,
    /// Under which lease.
    pub epoch: LeaseEpoch,
    /// Which attempt this is.
    pub attempt: i32,
    /// Whether somebody asked for its end.
    pub cancel_requested: bool,
}

/// A run's result.
#[derive(Debug, Clone)]
pub struct Committed {
    /// How it ended.
    pub outcome: Outcome,
    /// What it used.
    pub usage: Usage,
    /// What its sandbox left behind.
    pub receipt: Receipt,
    /// The session's directory.
    pub sandbox_root: String,
    /// How long ago its command started; `None` if it never did.
    pub started_ago: Option<Duration>,
    /// From the launch being asked for to the command's execve.
    pub setup_time: Option<Duration>,
    /// Whether its sandbox was prepared before it was needed.
    pub prepared: bool,
    /// Limits that its mode could not enforce.
    pub unenforced: Vec<String>,
    /// All bytes of output kept, flushed before or in `tail`.
    pub output_bytes: i64,
    /// Whether output was cut.
    pub output_truncated: bool,
    /// Output that was not flushed before.
    pub tail: Vec<Chunk>,
}

/// Which runs to list.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    /// Of this session.
    pub session: Option<SessionId>,
    /// In this state.
    pub state: Option<RunState>,
    /// Recorded at or after.
    pub created_after: Option<OffsetDateTime>,
    /// Recorded before.
    pub created_before: Option<OffsetDateTime>,
    /// Older than this one.
    pub before: Option<RunId>,
}

impl Store {
    /// Records a run, in one statement that also checks the session, the quotas and the
    /// idempotency key. If a live worker holds the session the run is recorded as running for it.
    pub async fn run_insert(&self, new: NewRun<'_>, quotas: Quotas) -> Result<Admission, Error> {
        todo!()
    }

    /// What a run of this session starts from; `None` if the tenant has no such session.
    pub async fn run_session(
        &self,
        tenant: &TenantId,
        which: &crate::SessionRef,
    ) -> Result<Option<(SessionId, SessionSpec)>, Error> {
        todo!()
    }

    /// Returns a tenant's run.
    pub async fn run_get(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, Error> {
        todo!()
    }

    /// Lists a tenant's runs, newest first.
    pub async fn run_list(&self, tenant: &TenantId, filter: &RunFilter, limit: i64) -> Result<Vec<Run>, Error> {
        todo!()
    }

    /// Asks for a run's end. A queued one ends as canceled at once; an ended one stays as it is.
    pub async fn run_cancel(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, Error> {
        todo!()
    }

    /// Lets the lease holder begin a queued run. `None` if it may not: it is not queued any more,
    /// or the lease is not the caller's.
    pub async fn run_begin(
        &self,
        id: RunId,
        worker: &WorkerId,
        incarnation: Incarnation,
        epoch: LeaseEpoch,
    ) -> Result<Option<Assigned>, Error> {
        todo!()
    }

    /// Hands a run back that was recorded for this worker and that it has not begun. `false` if
    /// it was not there to hand back.
    pub async fn run_hand_back(&self, id: RunId, worker: &WorkerId, incarnation: Incarnation) -> Result<bool, Error> {
        todo!()
    }

    /// Stores a run's result.
    ///
    /// # Errors
    /// [`Error::Fenced`] if the lease is not live, or not the caller's under this epoch, or the run
    /// is not running for it: the result must be dropped.
    pub async fn run_commit(
        &self,
        id: RunId,
        worker: &WorkerId,
        incarnation: Incarnation,
        epoch: LeaseEpoch,
        result: &Committed,
    ) -> Result<(), Error> {
        todo!()
    }

    /// Runs recorded as running for this incarnation: pushes that were lost are among them.
    pub async fn run_list_assigned(&self, worker: &WorkerId, incarnation: Incarnation) -> Result<Vec<Assigned>, Error> {
        todo!()
    }

    /// Queued runs of the sessions this incarnation holds, oldest first: `(run, session, tenant)`.
    pub async fn run_list_queued(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        limit: i64,
    ) -> Result<Vec<(RunId, SessionId, TenantId)>, Error> {
        todo!()
    }

    /// How many runs of any tenant are queued.
    pub async fn run_queue_depth_any_tenant(&self) -> Result<i64, Error> {
        todo!()
    }
}
