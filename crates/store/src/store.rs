//! The handle on the database, which all other modules extend by the statements of their tables.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use crate::{
    Error, Options,
    audit::AuditLog,
    group::{Group, Writer},
    objects::Objects,
    pools::Pools,
    run::{CommitCall, InsertCall, KnownSettings},
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
    pub(crate) pools: Pools,
    pub(crate) known_settings: Arc<KnownSettings>,
    /// `None` if all output is in the database.
    pub(crate) objects: Option<Arc<Objects>>,
    pub(crate) audit: Arc<AuditLog>,
    pub(crate) inserts: Arc<Group<InsertCall>>,
    pub(crate) commits: Arc<Group<CommitCall>>,
}

impl Store {
    /// Connects to the database.
    ///
    /// # Errors
    /// If the server does not accept a connection.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let pools = Pools::connect(options).await?;
        Ok(Self {
            pools,
            known_settings: Arc::default(),
            objects: None,
            audit: Arc::new(AuditLog::unsigned()),
            inserts: Arc::default(),
            commits: Arc::default(),
        })
    }

    /// The pool and audit log for statements that serve several runs.
    pub(crate) fn group_writer(&self) -> Writer {
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
    /// Connections that the server does not answer are dropped.
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
