//! Deletes rows that are older than their retention, in transactions of bounded size.

use std::time::Duration;

use crate::{Error, EventKind, Store, row};

/// How long rows are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Records of runs, and ended sessions, after their end.
    pub runs: Duration,
    /// Output of runs, after their end.
    pub output: Duration,
    /// Events that are not kept for audits.
    pub events: Duration,
    /// Decisions of operators, and what commands tried against their policy.
    pub audit: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        Self { runs: DAY, output: DAY, events: 7 * DAY, audit: 90 * DAY }
    }
}

impl Store {
    /// Deletes events that are older than their tenant keeps them, at most `limit` of each class, and
    /// returns how many of the class with the most.
    pub async fn event_purge_any_tenant(&self, keep: &Retention, limit: i64) -> Result<u64, Error> {
        let (events, audit) = (row::interval(keep.events), row::interval(keep.audit));
        let kinds: Vec<&str> = EventKind::ordinary().map(EventKind::as_str).collect();
        let ordinary = sqlx::query!(
            "DELETE FROM events WHERE id = ANY (ARRAY(
                 SELECT old.id FROM tenants t CROSS JOIN unnest($3::text[]) AS k (kind) CROSS JOIN LATERAL (
                     SELECT e.id FROM events e
                     WHERE e.tenant_id = t.id AND e.kind = k.kind
                       AND e.id < id_at(now() - coalesce(t.retention_events, $1))
                     ORDER BY e.id LIMIT $2) AS old
                 LIMIT $2))",
            events,
            limit,
            &kinds as _,
        )
        .execute(&self.pools.upkeep)
        .await?;
        let audited = sqlx::query!(
            "DELETE FROM events WHERE id = ANY (ARRAY(
                 SELECT old.id FROM tenants t CROSS JOIN LATERAL (
                     SELECT e.id FROM events e
                     WHERE e.tenant_id = t.id AND e.id < id_at(now() - coalesce(t.retention_audit, $1))
                     ORDER BY e.id LIMIT $2) AS old
                 LIMIT $2))",
            audit,
            limit,
        )
        .execute(&self.pools.upkeep)
        .await?;
        let without_tenant = sqlx::query!(
            "DELETE FROM events WHERE id = ANY (ARRAY(
                 (SELECT old.id FROM unnest($4::text[]) AS k (kind) CROSS JOIN LATERAL (
                      SELECT e.id FROM events e
                      WHERE e.tenant_id IS NULL AND e.kind = k.kind AND e.id < id_at(now() - $1::interval)
                      ORDER BY e.id LIMIT $3) AS old)
                 UNION
                 (SELECT id FROM events WHERE tenant_id IS NULL AND id < id_at(now() - $2::interval)
                  ORDER BY id LIMIT $3)))",
            events,
            audit,
            limit,
            &kinds as _,
        )
        .execute(&self.pools.upkeep)
        .await?;
        let deleted = [ordinary, audited, without_tenant].map(|result| result.rows_affected());
        Ok(deleted.into_iter().max().unwrap_or(0))
    }
}
