//! Postgres: the only truth, and the only SQL.
//!
//! One file for each table. A state change is one guarded statement; zero rows means that the
//! caller no longer has the right to make it. Every query filters by tenant, or its name says
//! `any_tenant`, or it is a worker's and filters by lease.

#![forbid(unsafe_code)]

mod assignment;
mod error;
mod event;
mod key;
mod lease;
mod local_postgres;
mod output;
mod row;
mod run;

mod session;
mod tenant;
mod worker;

use std::time::Duration;

use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

pub use assignment::{AssignedRun, RunCommit};
pub use error::Error;
pub use event::{Event, EventBody, EventKind, EventSubject};
pub use key::{Caller, Key, NewKey, Scope};
pub use lease::{Lease, ReleaseOutcome, SweepReport};
pub use local_postgres::{LocalPostgres, LocalPostgresError};
pub use output::{OutputChunk, OutputStream};
pub use run::{NewRun, Run, RunAdmission, RunFilter, RunState};
pub use session::{
    NewSession, Session, SessionCreated, SessionEndReason, SessionRef, SessionSpec, SessionState,
};
pub use tenant::{FloorDecision, IsolationFloor, Quotas, QuotasChange, Tenant, TenantUsage};
pub use worker::{Heartbeat, NewWorker, Worker, WorkerCandidate, WorkerState};

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../../migrations");

const UNDEFINED_TABLE: &str = "42P01";

/// A handle on the database; cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    pool: PgPool,
}

/// How to reach the database.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it is and as whom.
    pub connect: PgConnectOptions,
    /// Most connections at once.
    pub max_connections: u32,
    /// How long a caller waits for one.
    pub acquire_timeout: Duration,
}

impl Options {
    /// Reads a `postgres://` address.
    ///
    /// # Errors
    /// If it is none.
    pub fn from_url(url: &str) -> Result<Self, Error> {
        let connect = url.parse().map_err(|_| Error::InvalidUrl)?;
        Ok(Self { connect, max_connections: 16, acquire_timeout: Duration::from_secs(5) })
    }
}

/// Every statement finds its rows by an index, whatever the values: it is planned once for each
/// connection, not once for each run. A plan made while a table was small must not scan it for ever.
const PLANNING: [(&str, &str); 3] =
    [("plan_cache_mode", "force_generic_plan"), ("enable_seqscan", "off"), ("jit", "off")];

impl Store {
    /// Connects; fails if the server does not answer.
    ///
    /// # Errors
    /// If no connection can be made.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout)
            .connect_with(options.connect.application_name("codelia").options(PLANNING))
            .await?;
        Ok(Self { pool })
    }

    /// Applies the migrations that are missing, under an advisory lock, and tells how many.
    ///
    /// # Errors
    /// If one fails, or one that was applied has been edited since.
    pub async fn migrate(&self) -> Result<usize, Error> {
        let before = self.migrations_applied().await?;
        MIGRATIONS.run(&self.pool).await.map_err(Error::Migrate)?;
        Ok(MIGRATIONS.iter().count().saturating_sub(before))
    }

    /// Fails unless every migration of this program is applied.
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
        // The table is there after the first migration alone, so this is not a checked query.
        let count: Result<i64, _> = sqlx::query_scalar("SELECT count(*) FROM _sqlx_migrations WHERE success")
            .fetch_one(&self.pool)
            .await;
        match count {
            Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(UNDEFINED_TABLE) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the database answers.
    ///
    /// # Errors
    /// If it does not.
    pub async fn ping(&self) -> Result<(), Error> {
        sqlx::query("SELECT 1").execute(&self.pool).await?;
        Ok(())
    }

    /// Closes all connections.
    pub async fn close(&self) {
        self.pool.close().await;
    }
}
