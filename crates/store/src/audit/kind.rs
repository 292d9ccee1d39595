//! The kinds of events.

use crate::words::words;

words! {
    /// The kind of an event.
    EventKind {
        /// A run was not admitted, or its sandbox could not be prepared.
        RunRefused = "RUN_REFUSED",
        /// A session was not admitted.
        SessionRefused = "SESSION_REFUSED",
        /// A file call violated the session's policy, or would have left its workspace.
        FileRefused = "FILE_REFUSED",
        /// A command made a system call that its policy forbids.
        SyscallBlocked = "SYSCALL_BLOCKED",
        /// A command connected to a host through the egress proxy.
        NetworkConnected = "NETWORK_CONNECTED",
        /// The egress proxy refused a connection, a request or a name.
        NetworkRefused = "NETWORK_REFUSED",
        /// The egress proxy of a worker died and was started again.
        EgressRestarted = "EGRESS_RESTARTED",
        /// A run got near one of its limits, a session near those of its files, or a tenant near its
        /// quota of them.
        LimitNear = "LIMIT_NEAR",
        /// The files of a session reached their limit, or those of a tenant its quota.
        LimitReached = "LIMIT_REACHED",
        /// A sandbox left something behind.
        SandboxReceiptUnclean = "SANDBOX_RECEIPT_UNCLEAN",
        /// A worker lost its leases and killed its sandboxes.
        WorkerFenced = "WORKER_FENCED",
        /// A worker stopped taking sessions because of a fault.
        WorkerOutOfRotation = "WORKER_OUT_OF_ROTATION",
        /// An administrator set the isolation floor of a tenant.
        IsolationFloorSet = "ISOLATION_FLOOR_SET",
        /// An operator set or cleared the policy of a tenant.
        TenantPolicySet = "TENANT_POLICY_SET",
        /// A key set or deleted the policy of a project or user.
        ScopePolicySet = "SCOPE_POLICY_SET",
        /// An operator suspended a tenant.
        TenantSuspended = "TENANT_SUSPENDED",
        /// An operator ended the suspension of a tenant.
        TenantResumed = "TENANT_RESUMED",
        /// An operator deleted a tenant, which `detail` names.
        TenantDeleted = "TENANT_DELETED",
        /// An operator listed the runs of a tenant, or of all of them.
        RunsListedByOperator = "RUNS_LISTED_BY_OPERATOR",
        /// An operator canceled a tenant's run.
        RunCanceledByOperator = "RUN_CANCELED_BY_OPERATOR",
        /// An operator set how long the rows of a tenant are kept.
        RetentionSet = "RETENTION_SET",
        /// A run requested an approval.
        ApprovalRequested = "APPROVAL_REQUESTED",
        /// A key allowed what a run requested.
        ApprovalAllowed = "APPROVAL_ALLOWED",
        /// A key denied what a run requested.
        ApprovalDenied = "APPROVAL_DENIED",
        /// Nobody decided about an approval in time.
        ApprovalExpired = "APPROVAL_EXPIRED",
        /// A key revoked an approval that held for later runs.
        ApprovalRevoked = "APPROVAL_REVOKED",
        /// An operator set a mode flag.
        FlagSet = "FLAG_SET",
        /// An operator rolled a mode flag back.
        FlagRolledBack = "FLAG_ROLLED_BACK",
        /// A mode flag exceeded its limits and rolled itself back.
        FlagGuardTripped = "FLAG_GUARD_TRIPPED",
        /// An administrator registered a version of a tool.
        ToolRegistered = "TOOL_REGISTERED",
        /// An administrator deleted a tool.
        ToolDeleted = "TOOL_DELETED",
        /// An operator approved the isolation level of a tool, or withdrew that.
        ToolLevelApproved = "TOOL_LEVEL_APPROVED",
        /// An administrator, or Codelia because of a run, quarantined a tool.
        ToolQuarantined = "TOOL_QUARANTINED",
        /// An administrator ended the quarantine of a tool.
        ToolReleased = "TOOL_RELEASED",
        /// A key created a volume.
        VolumeCreated = "VOLUME_CREATED",
        /// A volume was deleted: by a key, or because it was not used for long or the tenant's have too
        /// much.
        VolumeDeleted = "VOLUME_DELETED",
        /// A command tried to leave its sandbox, or a file call its workspace. The store carries out a
        /// part of the response.
        EscapeAttempt = "ESCAPE_ATTEMPT",
        /// Held changes of a run were applied or dropped: by a key, or because they waited too long.
        ChangesDecided = "CHANGES_DECIDED",
        /// Signals and file operations of a run, where its policy logs them.
        OperationsLogged = "OPERATIONS_LOGGED",
        /// A pattern in what was logged of a run is suspicious. The store queues an alert.
        SuspiciousOperations = "SUSPICIOUS_OPERATIONS",
        /// Codelia quarantined a session because of an attempt to escape.
        SessionQuarantined = "SESSION_QUARANTINED",
        /// An administrator ended the quarantine of a session.
        SessionReleased = "SESSION_RELEASED",
        /// A run was admitted.
        RunAdmitted = "RUN_ADMITTED",
        /// A run ended.
        RunEnded = "RUN_ENDED",
        /// A session was created.
        SessionCreated = "SESSION_CREATED",
        /// A caller creates a key.
        KeyCreated = "KEY_CREATED",
        /// A caller revokes a key.
        KeyRevoked = "KEY_REVOKED",
        /// An operator creates a tenant.
        TenantCreated = "TENANT_CREATED",
        /// An operator sets quotas or limits of a tenant.
        QuotasSet = "QUOTAS_SET",
        /// An operator drains a worker, or takes that back.
        WorkerDrained = "WORKER_DRAINED",
        /// The audit of a day was deleted after its retention.
        AuditExpired = "AUDIT_EXPIRED",
        /// A key was used from an address, for the first time in an hour.
        KeyUsed = "KEY_USED",
        /// Calls with keys that are unknown, expired or of a suspended tenant were refused.
        KeyRefused = "KEY_REFUSED",
    }
}
