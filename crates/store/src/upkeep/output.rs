//! Deletes the output of runs whose record is kept for longer.

use std::time::Instant;

use sqlx::{PgConnection, postgres::types::PgInterval};
use uuid::Uuid;

use super::{Retention, purge::MAX_BYTES, retention::DAY};
use crate::{Error, Store, row};

/// Runs of a tenant that had not ended for long enough. With more of them the tenant waits.
const MAX_LATE: usize = 1000;

impl Store {
    /// Deletes output of tenants that keep it for a shorter time than others, and than their runs,
    /// until `deadline`, and returns whether there may be more.
    pub async fn output_purge_any_tenant(
        &self,
        keep: &Retention,
        limit: i64,
        deadline: Instant,
    ) -> Result<bool, Error> {
        let (_, longest) = self.retention_longest(keep).await?;
        let tenants = sqlx::query!(
            r#"SELECT id, output AS "output!" FROM (
                   SELECT id, coalesce(retention_output, $2) AS output, coalesce(retention_runs, $1) AS runs FROM tenants
               ) AS t WHERE output < runs AND output < $3"#,
            row::interval(keep.runs),
            row::interval(keep.output),
            row::interval(longest.max(DAY)),
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        let mut has_more = false;
        for tenant in tenants {
            if Instant::now() >= deadline {
                return Ok(true);
            }
            let mut tx = self.pools.upkeep.begin().await?;
            has_more |= purge(&mut tx, &tenant.id, &tenant.output, limit).await?;
            tx.commit().await?;
        }
        Ok(has_more)
    }
}

/// Deletes output of one tenant in the order of the runs' ids, and returns whether there may be
/// more.
async fn purge(
    tx: &mut PgConnection,
    tenant: &str,
    keep: &PgInterval,
    limit: i64,
) -> Result<bool, Error> {
    let progress = sqlx::query!(
        r#"INSERT INTO output_purges (tenant_id) VALUES ($1)
           ON CONFLICT (tenant_id) DO UPDATE SET tenant_id = excluded.tenant_id
           RETURNING done, late, run_id_at(now() - $2::interval) AS "bound!""#,
        tenant,
        keep,
    )
    .fetch_one(&mut *tx)
    .await?;
    let found = sqlx::query!(
        "SELECT id, output_bytes FROM ended_runs
         WHERE tenant_id = $1 AND id > $2 AND id < $3 ORDER BY id LIMIT $4",
        tenant,
        progress.done,
        progress.bound,
        limit,
    )
    .fetch_all(&mut *tx)
    .await?;
    let mut bytes = 0;
    let fitting = found.iter().take_while(|run| {
        bytes += run.output_bytes;
        bytes - run.output_bytes < MAX_BYTES
    });
    let next: Vec<Uuid> = fitting.map(|run| run.id).collect();
    let has_more =
        next.len() < found.len() || i64::try_from(found.len()).is_ok_and(|count| count >= limit);
    let done =
        if has_more { next.last().copied().unwrap_or(progress.done) } else { progress.bound };
    let live = sqlx::query_scalar!(
        "SELECT id FROM live_runs WHERE tenant_id = $1 AND state IN ('held', 'queued', 'running') AND id > $2 AND id <= $3",
        tenant,
        progress.done,
        done,
    )
    .fetch_all(&mut *tx)
    .await?;
    let candidates: Vec<Uuid> = next.into_iter().chain(progress.late).chain(live).collect();
    let late = delete_due(tx, tenant, keep, &candidates).await?;
    if late.len() > MAX_LATE {
        tracing::warn!(tenant, "too many runs are still live to delete the output of later ones");
        return Ok(false);
    }
    sqlx::query!(
        "UPDATE output_purges SET done = $2, late = $3 WHERE tenant_id = $1",
        tenant,
        done,
        &late
    )
    .execute(tx)
    .await?;
    Ok(has_more)
}

/// Deletes the output of those runs that ended long enough ago, and returns those that did not.
async fn delete_due(
    tx: &mut PgConnection,
    tenant: &str,
    keep: &PgInterval,
    candidates: &[Uuid],
) -> Result<Vec<Uuid>, Error> {
    let due = sqlx::query_scalar!(
        "SELECT id FROM ended_runs WHERE id = ANY ($1) AND ended_at < now() - $2::interval",
        candidates,
        keep,
    )
    .fetch_all(&mut *tx)
    .await?;
    if let (Some(first), Some(last)) = (due.iter().min(), due.iter().max()) {
        sqlx::query!(
            "WITH deleted AS (
                 DELETE FROM run_output WHERE run_id = ANY ($1) AND run_id >= $2 AND run_id <= $3
                 RETURNING run_id, coalesce(length, octet_length(data)) AS bytes, object
             ),
             removed_objects AS (
                 INSERT INTO output_removals SELECT DISTINCT object FROM deleted WHERE object IS NOT NULL
                 ON CONFLICT DO NOTHING
             )
             INSERT INTO output_changes (tenant_id, day, bytes)
             SELECT $4, run_day(run_id), -sum(bytes) FROM deleted GROUP BY run_day(run_id)",
            &due,
            first,
            last,
            tenant,
        )
        .execute(&mut *tx)
        .await?;
    }
    let waiting = sqlx::query_scalar!(
        r#"SELECT id AS "id!" FROM runs WHERE id = ANY ($1) AND NOT id = ANY ($2)"#,
        candidates,
        &due,
    )
    .fetch_all(tx)
    .await?;
    Ok(waiting)
}
