//! The safeguards of the protocol, each with a variant that leaves it out.

/// The protocol, or the protocol without one of its safeguards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// The whole protocol.
    Correct,

    // Leases.
    /// A worker that cannot renew keeps its sandboxes.
    NoSelfFencing,
    /// A worker counts its lease from the answer to a renewal, not from the request.
    LeaseFromAnswer,
    /// A worker's lease ends for itself when it ends in the database.
    NoMargin,
    /// A sandbox does not end by itself when its worker stops to extend its time.
    NoKeepAlive,
    /// A late answer to a renewal revives a lease that the worker considered expired.
    RevivedLease,
    /// An expired worker is replaced without marking its row, so a renewal in flight can revive it.
    NoExpiryMark,
    /// A registration replaces any incarnation, also a newer one of the same worker.
    UnguardedRegistration,
    /// A worker leaves by its id alone, whatever incarnation is registered.
    UnguardedLeave,
    /// An insert assigns a run without locking the session.
    NoInsertLock,
    /// An insert locks the session so weakly that the end of the session does not wait for it.
    WeakInsertLock,
    /// A session that loses its holder is not offered to other workers.
    NoWaitingRow,

    // Runs.
    /// A commit checks only that the run is running.
    NoCommitGuard,
    /// A worker accepts a push for a run that it already handled.
    NoPushMemory,
    /// A hand-back does not check the turn.
    NoTurnGuard,
    /// A started run is queued again although its caller allowed no retries.
    UnrequestedRetry,
    /// A canceled run is queued again when its worker dies.
    RetriedCancel,
    /// A worker drops a result that the database rejects and leaves the run as it is.
    NoAbandon,

    // Live runs and history.
    /// One statement deletes a live run, and another one adds it to the history.
    EndInTwoStatements,
    /// A repeated commit looks for its run in the history with the snapshot of its first look.
    OneSnapshotCommit,
    /// The idempotency key of a run is forgotten when the run ends.
    KeyOfLiveRunsOnly,
    /// The idempotency key is looked up and stored without a lock.
    UnlockedKey,

    // Output.
    /// Output is appended to a run whatever lease it runs under.
    UnguardedAppend,
    /// Output is appended without locking the run.
    UnlockedAppend,
    /// A retry keeps the output of the attempt before.
    KeptOutput,

    // Sessions.
    /// Expiry looks for unfinished runs before it locks the session.
    OneSnapshotExpiry,
    /// A command may start while its ended session is being removed.
    StartWhileClosing,
    /// The holder of a used session does not check that its directory exists.
    NoFilesCheck,
    /// A worker may take a session whose files are on another root.
    NoHomeCheck,

    // Upkeep.
    /// The upkeep belongs to its first owner for good.
    NoUpkeepExpiry,
    /// A sweep changes the rows that it found, although it has not locked them.
    UnlockedSweep,
}
