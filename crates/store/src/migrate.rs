//! Applies migrations without blocking callers for long.

use std::{
    sync::LazyLock,
    time::{Duration, Instant},
};

use sqlx::{
    AssertSqlSafe, Connection, PgConnection,
    migrate::{MigrateError, Migrator},
};

use crate::{Error, Pooler, Store, error::LOCK_NOT_AVAILABLE};

static MIGRATIONS: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrations = sqlx::migrate!("../../migrations");
    // `lock` does it.
    migrations.set_locking(false);
    migrations
});

/// Grants to each role what its part of Codelia does.
const ROLES: &str = include_str!("sql/roles.sql");
/// SQLSTATE of a query on a table that does not exist.
const UNDEFINED_TABLE: &str = "42P01";
/// A migration that waits for a lock blocks everyone behind it, so it gives up and starts again.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// Identifies the advisory lock of migrations.
const LOCK: i64 = 0x0063_6f64_656c_6961;
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// How long a migration tries to get its locks.
const MAX_WAIT: Duration = Duration::from_secs(120);

impl Store {
    /// Applies missing migrations under an advisory lock and returns how many there were.
    ///
    /// # Errors
    /// If a migration fails, or one that is already applied was edited.
    /// [`Error::MigrateThroughPooler`] if one is missing and the connection is not to a server.
    pub async fn migrate(&self) -> Result<usize, Error> {
        self.migrate_to(i64::MAX).await
    }

    /// As [`Store::migrate`], up to this version. For tests.
    ///
    /// # Errors
    /// As [`Store::migrate`].
    pub async fn migrate_to(&self, version: i64) -> Result<usize, Error> {
        let before = self.migrations_applied().await?;
        if self.pools.pooler == Pooler::Transaction {
            let is_current = before >= MIGRATIONS.iter().count();
            return if is_current { Ok(0) } else { Err(Error::MigrateThroughPooler) };
        }
        let mut connection = PgConnection::connect_with(&self.pools.connect).await?;
        lock(&mut connection).await?;
        // The end of the connection releases the lock, after a failure as well.
        let mut applied = apply(&mut connection, version).await;
        if applied.is_ok() && version == i64::MAX {
            applied =
                sqlx::raw_sql(ROLES).execute(&mut connection).await.map(drop).map_err(Into::into);
        }
        connection.close().await?;
        applied.map_err(Error::Migrate)?;
        Ok(self.migrations_applied().await?.saturating_sub(before))
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

    /// Group roles that the migrating user could not create.
    ///
    /// # Errors
    /// If the database does not answer.
    pub async fn roles_missing(&self) -> Result<Vec<String>, Error> {
        let missing =
            "SELECT name FROM unnest(ARRAY['codelia_api', 'codelia_worker', 'codelia_auditor']) AS name
                       WHERE to_regrole(name) IS NULL";
        Ok(sqlx::query_scalar(missing).fetch_all(&self.pools.upkeep).await?)
    }

    /// Whether the role of this process may do the periodic work of the installation.
    ///
    /// # Errors
    /// If the database does not answer.
    pub async fn upkeep_is_permitted(&self) -> Result<bool, Error> {
        let permitted = "SELECT has_table_privilege('upkeep_owner', 'UPDATE')";
        Ok(sqlx::query_scalar(permitted).fetch_one(&self.pools.upkeep).await?)
    }

    async fn migrations_applied(&self) -> Result<usize, Error> {
        // Not a checked query: the table exists only after the first migration.
        let count: Result<i64, _> =
            sqlx::query_scalar("SELECT count(*) FROM _sqlx_migrations WHERE success")
                .fetch_one(&self.pools.upkeep)
                .await;
        match count {
            Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
            Err(sqlx::Error::Database(error))
                if error.code().as_deref() == Some(UNDEFINED_TABLE) =>
            {
                Ok(0)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Waits until no other process migrates. Asks again and again: `CREATE INDEX CONCURRENTLY` of the
/// other process waits for every statement that has begun, also for one that waits for the lock.
async fn lock(connection: &mut PgConnection) -> Result<(), Error> {
    let try_lock = "SELECT pg_try_advisory_lock($1)";
    while !sqlx::query_scalar(try_lock).bind(LOCK).fetch_one(&mut *connection).await? {
        tokio::time::sleep(RETRY_DELAY).await;
    }
    Ok(())
}

/// Applies the migrations up to `target`. Those without a transaction wait for locks as long as
/// they need: they take none that blocks others, and cannot be repeated.
async fn apply(connection: &mut PgConnection, target: i64) -> Result<(), MigrateError> {
    for group in MIGRATIONS.iter().as_slice().chunk_by(|one, next| one.no_tx == next.no_tx) {
        let Some(last) = group.last() else { continue };
        let timeout = if last.no_tx { Duration::ZERO } else { LOCK_TIMEOUT };
        let set = format!("SET lock_timeout = {}", timeout.as_millis());
        sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *connection).await?;
        apply_to(connection, last.version.min(target)).await?;
    }
    Ok(())
}

async fn apply_to(connection: &mut PgConnection, version: i64) -> Result<(), MigrateError> {
    let deadline = Instant::now() + MAX_WAIT;
    loop {
        match MIGRATIONS.run_to(version, &mut *connection).await {
            Err(error) if is_lock_timeout(&error) && Instant::now() < deadline => {
                tracing::info!(%error, "a migration waits for a lock, retrying");
                tokio::time::sleep(RETRY_DELAY).await;
            }
            result => return result,
        }
    }
}

fn is_lock_timeout(error: &MigrateError) -> bool {
    matches!(error,
        MigrateError::Execute(sqlx::Error::Database(detail))
        | MigrateError::ExecuteMigration(sqlx::Error::Database(detail), _)
            if detail.code().as_deref() == Some(LOCK_NOT_AVAILABLE))
}
