//! The table `events`: refusals, blocked calls, decisions and alerts. Rows are inserted and, when they are
//! old, purged. They never change.

use std::str::FromStr;

use codelia_types::{KeyId, RunId, SessionId, TenantId, WorkerId};
use serde_json::Value;
use sqlx::{PgExecutor, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    Error, Store,
    audit::{self, AuditLog, EventColumns, Tables},
    row,
};

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A run was not admitted, or its sandbox could not be prepared.
    RunRefused,
    /// A session was not admitted.
    SessionRefused,
    /// A file call violated the session's policy, or would have left its workspace.
    FileRefused,
    /// A command made a system call that its policy forbids.
    SyscallBlocked,
    /// A command connected to a host through the egress proxy.
    NetworkConnected,
    /// The egress proxy refused a connection, a request or a name.
    NetworkRefused,
    /// The egress proxy of a worker died and was started again.
    EgressRestarted,
    /// A run got near one of its limits, a session near those of its files, or a tenant near its quota of them.
    LimitNear,
    /// The files of a session reached their limit, or those of a tenant its quota.
    LimitReached,
    /// A sandbox left something behind.
    SandboxReceiptUnclean,
    /// A worker lost its leases and killed its sandboxes.
    WorkerFenced,
    /// A worker stopped taking sessions because of a fault.
    WorkerOutOfRotation,
    /// An administrator set the isolation floor of a tenant.
    IsolationFloorSet,
    /// An operator set or cleared the policy of a tenant.
    TenantPolicySet,
    /// A key set or deleted the policy of a project or user.
    ScopePolicySet,
    /// An operator suspended a tenant.
    TenantSuspended,
    /// An operator ended the suspension of a tenant.
    TenantResumed,
    /// An operator deleted a tenant, which `detail` names.
    TenantDeleted,
    /// An operator listed the runs of a tenant, or of all of them.
    RunsListedByOperator,
    /// An operator canceled a tenant's run.
    RunCanceledByOperator,
    /// An operator set how long the rows of a tenant are kept.
    RetentionSet,
    /// A run requested an approval.
    ApprovalRequested,
    /// A key allowed what a run requested.
    ApprovalAllowed,
    /// A key denied what a run requested.
    ApprovalDenied,
    /// Nobody decided about an approval in time.
    ApprovalExpired,
    /// A key revoked an approval that held for later runs.
    ApprovalRevoked,
    /// An operator set a mode flag.
    FlagSet,
    /// An operator rolled a mode flag back.
    FlagRolledBack,
    /// A mode flag exceeded its limits and rolled itself back.
    FlagGuardTripped,
    /// An administrator registered a version of a tool.
    ToolRegistered,
    /// An administrator deleted a tool.
    ToolDeleted,
    /// An operator approved the isolation level of a tool, or withdrew that.
    ToolLevelApproved,
    /// An administrator, or Codelia because of a run, quarantined a tool.
    ToolQuarantined,
    /// An administrator ended the quarantine of a tool.
    ToolReleased,
    /// A key created a volume.
    VolumeCreated,
    /// A volume was deleted: by a key, or because it was not used for long or the tenant's have too much.
    VolumeDeleted,
    /// A command tried to leave its sandbox, or a file call its workspace. The store carries out a part of
    /// the response.
    EscapeAttempt,
    /// Held changes of a run were applied or dropped: by a key, or because they waited too long.
    ChangesDecided,
    /// Signals and file operations of a run, where its policy logs them.
    OperationsLogged,
    /// A pattern in what was logged of a run is suspicious. The store queues an alert.
    SuspiciousOperations,
    /// Codelia quarantined a session because of an attempt to escape.
    SessionQuarantined,
    /// An administrator ended the quarantine of a session.
    SessionReleased,
    /// A run was admitted. In the audit alone.
    RunAdmitted,
    /// A run ended. In the audit alone.
    RunEnded,
    /// A session was created. In the audit alone.
    SessionCreated,
    /// A caller creates a key. In the audit alone.
    KeyCreated,
    /// A caller revokes a key. In the audit alone.
    KeyRevoked,
    /// An operator creates a tenant. In the audit alone.
    TenantCreated,
    /// An operator sets quotas or limits of a tenant. In the audit alone.
    QuotasSet,
    /// An operator drains a worker, or takes that back. In the audit alone.
    WorkerDrained,
    /// The audit of a day was deleted after its retention. In the audit alone.
    AuditExpired,
    /// A key was used from an address, for the first time in an hour.
    KeyUsed,
    /// Calls with keys that are unknown, expired or of a suspended tenant were refused.
    KeyRefused,
}

impl EventKind {
    const ALL: [Self; 53] = [
        Self::RunRefused,
        Self::SessionRefused,
        Self::FileRefused,
        Self::SyscallBlocked,
        Self::NetworkConnected,
        Self::NetworkRefused,
        Self::EgressRestarted,
        Self::LimitNear,
        Self::LimitReached,
        Self::SandboxReceiptUnclean,
        Self::WorkerFenced,
        Self::WorkerOutOfRotation,
        Self::IsolationFloorSet,
        Self::TenantPolicySet,
        Self::ScopePolicySet,
        Self::TenantSuspended,
        Self::TenantResumed,
        Self::TenantDeleted,
        Self::RunsListedByOperator,
        Self::RunCanceledByOperator,
        Self::RetentionSet,
        Self::ApprovalRequested,
        Self::ApprovalAllowed,
        Self::ApprovalDenied,
        Self::ApprovalExpired,
        Self::ApprovalRevoked,
        Self::FlagSet,
        Self::FlagRolledBack,
        Self::FlagGuardTripped,
        Self::ToolRegistered,
        Self::ToolDeleted,
        Self::ToolLevelApproved,
        Self::ToolQuarantined,
        Self::ToolReleased,
        Self::VolumeCreated,
        Self::VolumeDeleted,
        Self::EscapeAttempt,
        Self::ChangesDecided,
        Self::OperationsLogged,
        Self::SuspiciousOperations,
        Self::SessionQuarantined,
        Self::SessionReleased,
        Self::RunAdmitted,
        Self::RunEnded,
        Self::SessionCreated,
        Self::KeyCreated,
        Self::KeyRevoked,
        Self::TenantCreated,
        Self::QuotasSet,
        Self::WorkerDrained,
        Self::AuditExpired,
        Self::KeyUsed,
        Self::KeyRefused,
    ];

    /// Whether it is kept for audits: a decision of an operator or about an approval, or what a command
    /// tried against its policy.
    fn is_audited(self) -> bool {
        match self {
            Self::RunRefused | Self::SessionRefused | Self::WorkerFenced | Self::WorkerOutOfRotation => false,
            Self::NetworkConnected | Self::EgressRestarted | Self::LimitNear => false,
            Self::LimitReached | Self::OperationsLogged => false,
            Self::FileRefused
            | Self::SyscallBlocked
            | Self::NetworkRefused
            | Self::SandboxReceiptUnclean
            | Self::IsolationFloorSet
            | Self::TenantPolicySet
            | Self::ScopePolicySet
            | Self::TenantSuspended
            | Self::TenantResumed
            | Self::TenantDeleted
            | Self::RunsListedByOperator
            | Self::RunCanceledByOperator
            | Self::RetentionSet
            | Self::ApprovalRequested
            | Self::ApprovalAllowed
            | Self::ApprovalDenied
            | Self::ApprovalExpired
            | Self::ApprovalRevoked
            | Self::FlagSet
            | Self::FlagRolledBack
            | Self::FlagGuardTripped
            | Self::ToolRegistered
            | Self::ToolDeleted
            | Self::ToolLevelApproved
            | Self::ToolQuarantined
            | Self::ToolReleased
            | Self::VolumeCreated
            | Self::VolumeDeleted
            | Self::EscapeAttempt
            | Self::ChangesDecided
            | Self::SuspiciousOperations
            | Self::SessionQuarantined
            | Self::SessionReleased
            | Self::RunAdmitted
            | Self::RunEnded
            | Self::SessionCreated
            | Self::KeyCreated
            | Self::KeyRevoked
            | Self::TenantCreated
            | Self::QuotasSet
            | Self::WorkerDrained
            | Self::AuditExpired
            | Self::KeyUsed
            | Self::KeyRefused => true,
        }
    }

    /// The kinds that are not kept for audits.
    pub(crate) fn ordinary() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|kind| !kind.is_audited())
    }

    /// The name in the database and in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RunRefused => "RUN_REFUSED",
            Self::SessionRefused => "SESSION_REFUSED",
            Self::FileRefused => "FILE_REFUSED",
            Self::SyscallBlocked => "SYSCALL_BLOCKED",
            Self::NetworkConnected => "NETWORK_CONNECTED",
            Self::NetworkRefused => "NETWORK_REFUSED",
            Self::EgressRestarted => "EGRESS_RESTARTED",
            Self::LimitNear => "LIMIT_NEAR",
            Self::LimitReached => "LIMIT_REACHED",
            Self::SandboxReceiptUnclean => "SANDBOX_RECEIPT_UNCLEAN",
            Self::WorkerFenced => "WORKER_FENCED",
            Self::WorkerOutOfRotation => "WORKER_OUT_OF_ROTATION",
            Self::IsolationFloorSet => "ISOLATION_FLOOR_SET",
            Self::TenantPolicySet => "TENANT_POLICY_SET",
            Self::ScopePolicySet => "SCOPE_POLICY_SET",
            Self::TenantSuspended => "TENANT_SUSPENDED",
            Self::TenantResumed => "TENANT_RESUMED",
            Self::TenantDeleted => "TENANT_DELETED",
            Self::RunsListedByOperator => "RUNS_LISTED_BY_OPERATOR",
            Self::RunCanceledByOperator => "RUN_CANCELED_BY_OPERATOR",
            Self::RetentionSet => "RETENTION_SET",
            Self::ApprovalRequested => "APPROVAL_REQUESTED",
            Self::ApprovalAllowed => "APPROVAL_ALLOWED",
            Self::ApprovalDenied => "APPROVAL_DENIED",
            Self::ApprovalExpired => "APPROVAL_EXPIRED",
            Self::ApprovalRevoked => "APPROVAL_REVOKED",
            Self::FlagSet => "FLAG_SET",
            Self::FlagRolledBack => "FLAG_ROLLED_BACK",
            Self::FlagGuardTripped => "FLAG_GUARD_TRIPPED",
            Self::ToolRegistered => "TOOL_REGISTERED",
            Self::ToolDeleted => "TOOL_DELETED",
            Self::ToolLevelApproved => "TOOL_LEVEL_APPROVED",
            Self::ToolQuarantined => "TOOL_QUARANTINED",
            Self::ToolReleased => "TOOL_RELEASED",
            Self::VolumeCreated => "VOLUME_CREATED",
            Self::VolumeDeleted => "VOLUME_DELETED",
            Self::EscapeAttempt => "ESCAPE_ATTEMPT",
            Self::ChangesDecided => "CHANGES_DECIDED",
            Self::OperationsLogged => "OPERATIONS_LOGGED",
            Self::SuspiciousOperations => "SUSPICIOUS_OPERATIONS",
            Self::SessionQuarantined => "SESSION_QUARANTINED",
            Self::SessionReleased => "SESSION_RELEASED",
            Self::RunAdmitted => "RUN_ADMITTED",
            Self::RunEnded => "RUN_ENDED",
            Self::SessionCreated => "SESSION_CREATED",
            Self::KeyCreated => "KEY_CREATED",
            Self::KeyRevoked => "KEY_REVOKED",
            Self::TenantCreated => "TENANT_CREATED",
            Self::QuotasSet => "QUOTAS_SET",
            Self::WorkerDrained => "WORKER_DRAINED",
            Self::AuditExpired => "AUDIT_EXPIRED",
            Self::KeyUsed => "KEY_USED",
            Self::KeyRefused => "KEY_REFUSED",
        }
    }
}

impl FromStr for EventKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or(())
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub struct EventBody {
    /// The kind.
    pub kind: EventKind,
    /// The field of the request or policy at fault.
    pub field: Option<String>,
    /// Details that depend on the kind.
    pub detail: Value,
}

impl EventBody {
    /// What happened, with details and without a field at fault.
    pub(crate) fn new(kind: EventKind, detail: Value) -> Self {
        Self { kind, field: None, detail }
    }
}

/// Who or what an event is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventSubject {
    /// The tenant.
    pub tenant: Option<TenantId>,
    /// The session. Requires `tenant`.
    pub session: Option<SessionId>,
    /// The run. Requires `session`.
    pub run: Option<RunId>,
    /// The key that made the call.
    pub key: Option<KeyId>,
    /// The worker.
    pub worker: Option<WorkerId>,
}

impl EventSubject {
    /// A call with this key about a tenant.
    pub(crate) fn by(key: KeyId, tenant: Option<&TenantId>) -> Self {
        Self { key: Some(key), tenant: tenant.cloned(), ..Self::default() }
    }
}

/// A recorded event.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The id. Later events have greater ids.
    pub id: Uuid,
    /// When it was recorded.
    pub created_at: OffsetDateTime,
    /// Who or what it is about.
    pub subject: EventSubject,
    /// What happened.
    pub body: EventBody,
}

/// Event bodies as arrays of columns, to insert them in one statement.
pub(crate) struct Columns<'a> {
    pub(crate) ids: &'a [Uuid],
    pub(crate) kinds: Vec<&'static str>,
    pub(crate) fields: Vec<Option<&'a str>>,
    pub(crate) details: Vec<&'a Value>,
}

impl<'a> Columns<'a> {
    /// The rows have the ids of their rows in the audit.
    pub(crate) fn new(bodies: &'a [EventBody], events: &'a EventColumns) -> Self {
        Self {
            ids: &events.ids[..bodies.len()],
            kinds: bodies.iter().map(|body| body.kind.as_str()).collect(),
            fields: bodies.iter().map(|body| body.field.as_deref()).collect(),
            details: bodies.iter().map(|body| &body.detail).collect(),
        }
    }
}

/// Reads a tenant's events, newest first.
macro_rules! list_events {
    ($store:ident, $condition:literal, $($argument:expr),*) => {
        sqlx::query_as!(
            EventRow,
            r#"SELECT id, created_at, kind, tenant_id, session_id, run_id, key_id, worker_id, field,
                      detail AS "detail: Json<Value>"
               FROM events WHERE tenant_id = $1 AND id < $2 "#
                + $condition
                + " ORDER BY id DESC LIMIT $3",
            $($argument),*
        )
        .fetch_all(&$store.pools.reads)
        .await?
    };
}

impl Store {
    /// Records an event.
    pub async fn event_insert(&self, subject: &EventSubject, body: &EventBody) -> Result<(), Error> {
        insert(&self.audit, &self.pools.runs, subject, body).await
    }

    /// Lists a tenant's events older than `before`, newest first, optionally of one kind.
    pub async fn event_list(
        &self,
        tenant: &TenantId,
        kind: Option<EventKind>,
        before: Option<Uuid>,
        limit: i64,
    ) -> Result<Vec<Event>, Error> {
        let before = before.unwrap_or(Uuid::max());
        let rows = match kind {
            None => list_events!(self, "", tenant.as_str(), before, limit),
            Some(kind) => list_events!(self, "AND kind = $4", tenant.as_str(), before, limit, kind.as_str()),
        };
        rows.into_iter().map(Event::try_from).collect()
    }
}

/// Inserts an event, in the audit too.
pub(crate) async fn insert(
    log: &AuditLog,
    executor: impl PgExecutor<'_>,
    subject: &EventSubject,
    body: &EventBody,
) -> Result<(), Error> {
    audit::insert_into(Tables::AuditAndEvents, log, executor, subject, body).await
}

struct EventRow {
    id: Uuid,
    created_at: OffsetDateTime,
    kind: String,
    tenant_id: Option<String>,
    session_id: Option<Uuid>,
    run_id: Option<Uuid>,
    key_id: Option<Uuid>,
    worker_id: Option<String>,
    field: Option<String>,
    detail: Json<Value>,
}

impl TryFrom<EventRow> for Event {
    type Error = Error;

    fn try_from(row: EventRow) -> Result<Self, Error> {
        let subject = EventSubject {
            tenant: row.tenant_id.map(|text| row::parse("events.tenant_id", &text)).transpose()?,
            session: row.session_id.map(SessionId),
            run: row.run_id.map(RunId),
            key: row.key_id.map(KeyId),
            worker: row.worker_id.map(|text| row::parse("events.worker_id", &text)).transpose()?,
        };
        let kind = row::parse("events.kind", &row.kind)?;
        let body = EventBody { kind, field: row.field, detail: row.detail.0 };
        Ok(Self { id: row.id, created_at: row.created_at, subject, body })
    }
}
