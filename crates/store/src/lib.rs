//! The Postgres store: all state that outlives a process, and the only SQL in Codelia. Large output
//! may be in objects outside the database, which rows name.
//!
//! One file for each table. A state change is a single guarded statement: when it matches no row,
//! the caller no longer has the right to make the change. Every query filters by tenant, or its
//! name ends in `any_tenant`, or it belongs to a worker and filters by lease.

#![forbid(unsafe_code)]

mod alert;
mod approval;
mod audit;
mod error;
mod flag;
mod group;
mod key;
mod lease;
mod lease_connection;
mod local_postgres;
mod migrate;
mod objects;
mod output;
mod output_usage;
mod pools;
mod recent_map;
mod row;
mod run;
mod scope_policy;
mod secret;
mod session;
mod tenant;
mod tenant_lifecycle;
mod tenant_policy;
mod tool;
mod upkeep;
mod volume;
mod worker;

use std::{sync::Arc, time::Duration};

use audit::AuditLog;
use group::{Group, Writer};
use objects::Objects;
use pools::Pools;
use run::{CommitCall, InsertCall, KnownSettings};
use tokio::time::timeout;

pub use alert::Alert;
pub use approval::{
    Approval, ApprovalFilter, ApprovalKind, ApprovalReach, ApprovalRequest, ApprovalScope,
    ApprovalState, ApprovalStatus, Decision, DecisionResult, Grant, MAX_APPROVAL_TEXT, MAX_GRANTS,
    MAX_OF_RUN, MAX_PENDING_OF_RUN, MAX_PENDING_OF_TENANT, NewApproval, NotDecided, Permitted,
    ReadGrant, Reader, Revocation, RunToWake, Withdrawn,
};
pub use audit::{
    AuditEvent, AuditFilter, AuditProblem, AuditReport, EventBody, EventKind, EventSubject,
};
pub use error::Error;
pub use flag::{
    Flag, FlagAction, FlagRollback, FlagTally, MAX_FLAGS, NewFlagRevision, RolledBack, TrippedFlag,
};
pub use key::{Caller, FoundKey, Key, KeyStanding, KeyVersion, NewKey, OperatorBootstrap, Scope};
pub use lease::{Lease, ReleaseOutcome, SweepReport, WantedSessions};
pub use lease_connection::LeaseConnection;
pub use local_postgres::{LocalPostgres, LocalPostgresError};
pub use objects::{ObjectProblem, OutputLocation, OutputOptions};
pub use output::{OutputChunk, OutputStream};
pub use pools::{DatabaseUrl, Options, Pooler};
pub use recent_map::RecentMap;
pub use run::{
    ActiveRuns, AssignedRun, Cancellation, ChangesDecision, HeldChanges, HeldSessions, NewRun,
    Queue, RecordedRun, Run, RunAdmission, RunCommit, RunFilter, RunRef, RunState, RunSummary,
    SpecSummary, WaitReason,
};
pub use scope_policy::{
    MAX_POLICY_NAMES, MAX_POLICY_VERSIONS, NewPolicyVersion, PolicyChange, PolicyVersion,
    ScopePolicySet, ScopeRef,
};
pub use secret::{SealedEnv, SecretError, SecretKey, SecretOptions, read_private};
pub use session::{
    DiskReport, DiskReported, NewSession, Session, SessionChange, SessionCreated, SessionDisk,
    SessionEndReason, SessionFilter, SessionNetwork, SessionQuarantine, SessionRef, SessionSpec,
    SessionState, TenantDisk,
};
pub use tenant::{
    FloorDecision, IsolationFloor, Quotas, QuotasChange, StoredBytes, Tenant, TenantUsage,
};
pub use tenant_lifecycle::TenantDeletion;
pub use tool::{
    MAX_TOOLS, Tool, ToolApproval, ToolChange, ToolChanged, ToolNotChanged, ToolQuarantine,
    ToolWithdrawn,
};
pub use upkeep::{Retention, TenantRetention, Upkeep, UpkeepPass};
pub use volume::{
    MAX_VOLUMES, MAX_VOLUMES_BYTES, MountedVolume, NewVolume, SessionVolumes, Volume,
    VolumeNotCreated, VolumeNotDeleted, VolumesMounted,
};
pub use worker::{
    DiskSpace, DrainedBy, Heartbeat, NewWorker, Worker, WorkerCandidate, WorkerState,
};

/// How long [`Store::close`] waits for the server.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A handle on the database. Cheap to clone.
///
/// # Guarded transitions
///
/// A worker acquires the lease on a session, begins a run and commits its result. Each step
/// carries the [`LeaseToken`] of the lease, and the store compares worker, incarnation and epoch
/// in the statement that makes the change. [`Error::Fenced`] means that the lease expired or
/// another worker acquired the session: the worker must drop the result, because the run was or
/// will be ended as lost or queued again.
///
/// ```no_run
/// use codelia_policy::RunSpec;
/// use codelia_store::{Error, RunCommit, Store};
/// use codelia_types::{Incarnation, RunId, SessionId, WorkerId};
///
/// async fn run_once(
///     store: &Store,
///     worker: &WorkerId,
///     incarnation: Incarnation,
///     session: SessionId,
///     run: RunId,
///     execute: impl Fn(&RunSpec) -> RunCommit,
/// ) -> Result<(), Error> {
///     // `None`: another live worker holds the session, or this worker may not take it.
///     let Some(lease) = store.lease_acquire(session, worker, incarnation).await? else {
///         return Ok(());
///     };
///     // `None`: the run is no longer queued, or the lease is already lost.
///     let Some(assigned) = store.run_begin(run, &lease.token).await? else {
///         return Ok(());
///     };
///     let commit = execute(&assigned.spec);
///     loop {
///         match store.run_commit(assigned.names(), &lease.token, &commit).await {
///             Ok(_) => return Ok(()),
///             // Fenced: drop the result and stop everything that runs under this lease.
///             Err(Error::Fenced) => return Ok(()),
///             // The commit may have happened. Repeating it under the same lease is safe.
///             Err(error) if error.is_transient() => continue,
///             Err(error) => return Err(error),
///         }
///     }
/// }
/// ```
///
/// [`LeaseToken`]: codelia_types::LeaseToken
#[derive(Debug, Clone)]
pub struct Store {
    pools: Pools,
    known_settings: Arc<KnownSettings>,
    /// `None` if all output is in the database.
    objects: Option<Arc<Objects>>,
    audit: Arc<AuditLog>,
    inserts: Arc<Group<InsertCall>>,
    commits: Arc<Group<CommitCall>>,
}

impl Store {
    /// Connects to the database.
    ///
    /// # Errors
    /// If the server does not accept a connection.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let pools = Pools::connect(options).await?;
        let audit = Arc::new(AuditLog::unsigned());
        let (inserts, commits) = (Arc::default(), Arc::default());
        Ok(Self { pools, known_settings: Arc::default(), objects: None, audit, inserts, commits })
    }

    /// What a statement for several runs is executed with.
    fn group_writer(&self) -> Writer {
        Writer { pool: self.pools.runs.clone(), audit: self.audit.clone() }
    }

    /// Checks that the database answers.
    ///
    /// # Errors
    /// If it does not.
    pub async fn ping(&self) -> Result<(), Error> {
        sqlx::query("SELECT 1").execute(&self.pools.runs).await?;
        Ok(())
    }

    /// Covers what this process added to the audit by a checkpoint, and closes all connections.
    /// Those that the server does not answer are dropped.
    pub async fn close(&self) {
        let close = async {
            if let Err(error) = self.audit_checkpoint().await {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "last events of the audit have no checkpoint"
                );
            }
            self.pools.close().await;
        };
        if timeout(CLOSE_TIMEOUT, close).await.is_err() {
            tracing::warn!("the database does not answer, its connections are dropped");
        }
    }
}
