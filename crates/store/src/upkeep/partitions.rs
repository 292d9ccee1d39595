//! The partitions of past and coming days.

use std::time::Duration;

use time::Date;

use super::Retention;
use crate::{Error, Store, row};

/// Days ahead for which there are partitions.
const DAYS_AHEAD: i32 = 7;
/// Rows that one statement deletes or counts.
const MAX_ROWS: i64 = 5000;

impl Store {
    /// Makes the partitions of the next days. Rows of a day without one go to the default
    /// partitions.
    pub(super) async fn run_partitions_create(&self) -> Result<(), Error> {
        for ahead in 0..=DAYS_AHEAD {
            sqlx::query!(
                "SELECT create_run_partitions((now() AT TIME ZONE 'UTC')::date + $1::integer)",
                ahead
            )
            .execute(&self.pools.upkeep)
            .await?;
            sqlx::query!(
                "SELECT create_audit_partition((now() AT TIME ZONE 'UTC')::date + $1::integer)",
                ahead
            )
            .execute(&self.pools.upkeep)
            .await?;
        }
        Ok(())
    }

    /// Drops the partitions of days that no tenant keeps any more.
    pub(super) async fn run_partitions_drop(&self, keep: &Retention) -> Result<(), Error> {
        self.audit_partitions_drop(keep.audit).await?;
        let (runs, output) = self.retention_longest(keep).await?;
        for (parent, day) in self.run_partitions_due(runs, output).await? {
            if parent == "ended_runs" {
                self.run_keys_delete(day).await?;
            }
            sqlx::query_scalar!("SELECT drop_run_partition($1, $2)", parent, day)
                .fetch_one(&self.pools.upkeep)
                .await?;
            if parent == "run_output" {
                sqlx::query!("DELETE FROM tenant_output WHERE day <= $1", day)
                    .execute(&self.pools.upkeep)
                    .await?;
            }
            tracing::info!(parent, %day, "dropped the runs of a day");
        }
        Ok(())
    }

    /// Partitions to drop, the oldest first. A run may take a day, and its time counts from its
    /// end: so a day is kept for one more.
    async fn run_partitions_due(
        &self,
        runs: Duration,
        output: Duration,
    ) -> Result<Vec<(String, Date)>, Error> {
        let due = sqlx::query!(
            r#"SELECT parent AS "parent!", day AS "day!" FROM (
                   SELECT p.relname::text AS parent,
                          to_date(right(c.relname, 8), 'YYYYMMDD') AS day
                   FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_class p ON p.oid = i.inhparent
                   WHERE p.oid IN ('ended_runs'::regclass, 'run_output'::regclass, 'run_labels'::regclass)
                     AND c.relname <> p.relname || '_default'
               ) AS partition
               WHERE day <= ((now() - CASE parent WHEN 'run_output' THEN $2::interval ELSE $1::interval END)
                             AT TIME ZONE 'UTC')::date - 2
               -- The record of a run last.
               ORDER BY day, parent DESC"#,
            row::interval(runs),
            row::interval(output),
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        Ok(due.into_iter().map(|partition| (partition.parent, partition.day)).collect())
    }

    /// Deletes the idempotency keys of the runs up to a day, except of those that are still kept.
    async fn run_keys_delete(&self, day: Date) -> Result<(), Error> {
        loop {
            let deleted = sqlx::query!(
                "DELETE FROM run_keys WHERE run_id = ANY (ARRAY(
                     SELECT k.run_id FROM run_keys k
                     WHERE k.run_id < run_id_at(($1::date + 1)::timestamp AT TIME ZONE 'UTC')
                       AND NOT EXISTS (SELECT 1 FROM live_runs r WHERE r.id = k.run_id)
                       AND NOT EXISTS (SELECT 1 FROM ended_runs_default r WHERE r.id = k.run_id)
                     ORDER BY k.run_id LIMIT $2))",
                day,
                MAX_ROWS,
            )
            .execute(&self.pools.upkeep)
            .await?;
            if deleted.rows_affected() == 0 {
                return Ok(());
            }
        }
    }

    /// Rows in the default partitions, counted up to a limit.
    pub(super) async fn run_default_rows(&self) -> Result<i64, Error> {
        let rows = sqlx::query_scalar!(
            r#"SELECT (SELECT count(*) FROM (SELECT 1 FROM ended_runs_default LIMIT $1) AS r)
                    + (SELECT count(*) FROM (SELECT 1 FROM run_output_default LIMIT $1) AS o) AS "rows!""#,
            MAX_ROWS,
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        Ok(rows)
    }
}
