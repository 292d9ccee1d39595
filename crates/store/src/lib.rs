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
mod id_time;
mod key;
mod lease;
mod lease_connection;
mod local_postgres;
mod migrate;
mod objects;
mod output;
mod pools;
mod recent_map;
mod row;
mod run;
mod scope_policy;
mod secret;
mod session;
mod store;
mod tenant;
mod tenant_lifecycle;
mod tool;
mod upkeep;
mod volume;
mod words;
mod worker;

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
pub use store::Store;
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
