//! Deletes rows that are older than their retention, in transactions of bounded size.

use std::time::Duration;

use sqlx::PgConnection;
use uuid::Uuid;

use super::{Retention, retention::DAY};
use crate::{Error, Store, row};

/// Output that one transaction deletes; one run may have more.
pub(super) const MAX_BYTES: i64 = 64 * 1024 * 1024;
/// Runs that may refer to settings of days that are dropped.
const MAX_STRAY_RUNS: i64 = 5000;

/// A run to delete, with the tokens of its labels.
struct OldRun {
    id: Uuid,
    tokens: Vec<String>,
}

/// Deletes runs with their output, keys and labels.
async fn delete_runs(tx: &mut PgConnection, old: &[OldRun]) -> Result<(), Error> {
    let ids: Vec<Uuid> = old.iter().map(|run| run.id).collect();
    let (Some(first), Some(last)) = (ids.iter().min(), ids.iter().max()) else { return Ok(()) };
    sqlx::query_file!("src/sql/run_purge.sql", &ids, first, last).fetch_one(&mut *tx).await?;
    let labels = old.iter().flat_map(|run| run.tokens.iter().map(|token| (token.as_str(), run.id)));
    let (tokens, labeled): (Vec<&str>, Vec<Uuid>) = labels.unzip();
    if !tokens.is_empty() {
        sqlx::query!(
            "DELETE FROM run_labels l USING unnest($1::text[], $2::uuid[]) AS old (token, run_id)
             WHERE l.token = old.token AND l.run_id = old.run_id",
            &tokens as _,
            &labeled,
        )
        .execute(tx)
        .await?;
    }
    Ok(())
}

impl Store {
    /// Deletes ended runs that are older than their tenant keeps them, at most `limit`, and returns
    /// whether there may be more. Runs of tenants that keep them for the longest time are left to
    /// the removal of whole days, unless that time is shorter than a day.
    pub async fn run_purge_any_tenant(&self, keep: &Retention, limit: i64) -> Result<bool, Error> {
        let (longest, _) = self.retention_longest(keep).await?;
        let mut tx = self.pools.upkeep.begin().await?;
        let old = sqlx::query_file_as!(
            OldRun,
            "src/sql/run_purge_find.sql",
            row::interval(keep.runs),
            row::interval(longest),
            row::interval(longest.max(DAY)),
            limit,
            MAX_BYTES as _,
        )
        .fetch_all(&mut *tx)
        .await?;
        delete_runs(&mut tx, &old).await?;
        tx.commit().await?;
        Ok(!old.is_empty())
    }

    /// Deletes ended runs of deleted tenants, at most `limit`.
    pub(crate) async fn run_purge_deleted_any_tenant(&self, limit: i64) -> Result<(), Error> {
        let mut tx = self.pools.upkeep.begin().await?;
        let old =
            sqlx::query_file_as!(OldRun, "src/sql/run_purge_deleted.sql", limit, MAX_BYTES as _)
                .fetch_all(&mut *tx)
                .await?;
        delete_runs(&mut tx, &old).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Deletes ended sessions that are older than their tenant keeps them, at most `limit`, and
    /// returns how many. Their runs are deleted by their own age.
    pub async fn session_purge_any_tenant(&self, keep: Duration, limit: i64) -> Result<u64, Error> {
        let purged =
            sqlx::query_file_scalar!("src/sql/session_purge.sql", row::interval(keep), limit,)
                .fetch_one(&self.pools.upkeep)
                .await?;
        Ok(purged.unsigned_abs())
    }

    /// Deletes settings that no run refers to, at most `limit`, and returns how many. Deletes none
    /// while there are too many runs to look at one by one: live ones of days that are dropped, and
    /// ended ones without the partition of their day.
    pub async fn settings_purge_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let deleted = sqlx::query_file!("src/sql/run_settings_purge.sql", limit, MAX_STRAY_RUNS)
            .execute(&self.pools.upkeep)
            .await?;
        Ok(deleted.rows_affected())
    }

    /// The longest time that any tenant keeps runs and their output.
    pub(super) async fn retention_longest(
        &self,
        keep: &Retention,
    ) -> Result<(Duration, Duration), Error> {
        let longest = sqlx::query!(
            r#"SELECT greatest($1::interval, max(retention_runs)) AS "runs!",
                      greatest($2::interval, max(retention_output)) AS "output!" FROM tenants"#,
            row::interval(keep.runs),
            row::interval(keep.output),
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        Ok((row::duration(&longest.runs), row::duration(&longest.output)))
    }
}
