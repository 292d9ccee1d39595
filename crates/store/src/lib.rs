//! The Postgres store: all state that outlives a process, and the only SQL in Codelia.
//!
//! One file for each table. A state change is a single guarded statement: when it matches no row,
//! the caller no longer has the right to make the change. Every query filters by tenant, or its
//! name ends in `any_tenant`, or it belongs to a worker and filters by lease.

#![forbid(unsafe_code)]

mod error;
mod event;
mod key;
mod lease;
mod lease_connection;
mod local_postgres;
mod output;
mod pools;
mod row;
mod run;
mod secret;
mod session;
mod tenant;
mod tenant_lifecycle;
mod worker;

use std::time::Duration;

use sqlx::postgres::PgConnectOptions;

use pools::Pools;

pub use error::Error;
pub use event::{Event, EventBody, EventKind, EventSubject};
pub use key::{Caller, FoundKey, Key, KeyStanding, NewKey, Scope};
pub use lease::{Lease, ReleaseOutcome, SweepReport};
pub use lease_connection::LeaseConnection;
pub use local_postgres::{LocalPostgres, LocalPostgresError};
pub use output::{OutputChunk, OutputStream};
pub use run::{
    AssignedRun, Cancellation, NewRun, Run, RunAdmission, RunCommit, RunFilter, RunState, RunSummary,
    SpecSummary, WaitReason,
};
pub use secret::{SealedEnv, SecretError, SecretKey};
pub use session::{
    NewSession, Session, SessionChange, SessionCreated, SessionEndReason, SessionFilter, SessionRef,
    SessionSpec, SessionState,
};
pub use tenant::{FloorDecision, IsolationFloor, Quotas, QuotasChange, Tenant, TenantUsage};
pub use tenant_lifecycle::TenantDeletion;
pub use worker::{DrainedBy, Heartbeat, NewWorker, Worker, WorkerCandidate, WorkerState};

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../../migrations");

/// SQLSTATE of a query on a table that does not exist.
const UNDEFINED_TABLE: &str = "42P01";

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
///         match store.run_commit(assigned.id, &lease.token, &commit).await {
///             Ok(_) => return Ok(()),
///             // Fenced: drop the result and stop everything that runs under this lease.
///             Err(Error::Fenced) => return Ok(()),
///             // The commit may have happened. Repeating it under the same lease is safe.
///             Err(Error::Unavailable(_)) => continue,
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
}

/// How to connect to the database.
#[derive(Debug, Clone)]
pub struct Options {
    /// Address, user and database.
    pub connect: PgConnectOptions,
    /// Size of the connection pool.
    pub max_connections: u32,
    /// How long a call waits for a free connection.
    pub acquire_timeout: Duration,
}

impl Options {
    /// Parses a `postgres://` URL.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`] if it is malformed.
    pub fn from_url(url: &str) -> Result<Self, Error> {
        let connect = url.parse().map_err(|_| Error::InvalidUrl)?;
        Ok(Self { connect, max_connections: 16, acquire_timeout: Duration::from_secs(5) })
    }
}

impl Store {
    /// Connects to the database.
    ///
    /// # Errors
    /// If the server does not accept a connection.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        Ok(Self { pools: Pools::connect(options).await? })
    }

    /// Applies missing migrations under an advisory lock and returns how many there were.
    ///
    /// # Errors
    /// If a migration fails, or one that is already applied was edited.
    pub async fn migrate(&self) -> Result<usize, Error> {
        let before = self.migrations_applied().await?;
        MIGRATIONS.run(&self.pools.upkeep).await.map_err(Error::Migrate)?;
        Ok(MIGRATIONS.iter().count().saturating_sub(before))
    }

    /// Checks that every migration of this program is applied.
    ///
    /// # Errors
    /// [`Error::NotMigrated`] if one is missing.
    pub async fn check_migrated(&self) -> Result<(), Error> {
        if self.migrations_applied().await? < MIGRATIONS.iter().count() {
            return Err(Error::NotMigrated);
        }
        Ok(())
    }

    async fn migrations_applied(&self) -> Result<usize, Error> {
        // Not a checked query: the table exists only after the first migration.
        let count: Result<i64, _> = sqlx::query_scalar("SELECT count(*) FROM _sqlx_migrations WHERE success")
            .fetch_one(&self.pools.upkeep)
            .await;
        match count {
            Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(UNDEFINED_TABLE) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// Checks that the database answers.
    ///
    /// # Errors
    /// If it does not.
    pub async fn ping(&self) -> Result<(), Error> {
        sqlx::query("SELECT 1").execute(&self.pools.runs).await?;
        Ok(())
    }

    /// Closes all connections.
    pub async fn close(&self) {
        self.pools.close().await;
    }
}
