//! Suspended and deleted tenants. Marking a tenant is one statement; a sweep does the rest, so that
//! what was admitted just before is found as well.

use codelia_types::{KeyId, Outcome, TenantId};
use serde_json::json;

use crate::{
    Error, EventBody, EventKind, EventSubject, Store, Tenant,
    audit::{RunEnd, RunEnds},
};

/// The reason of canceled runs, which their tenant reads.
const CANCEL_REASON: &str = "the tenant is suspended";
const DELETED: &str = "deleted";

/// The answer to a request to delete a tenant.
#[derive(Debug)]
pub enum TenantDeletion {
    /// The tenant does not exist.
    NotFound,
    /// The tenant has this many open sessions.
    HasSessions(i64),
    /// The tenant is being removed.
    Begun(Box<Tenant>),
}

impl Store {
    /// Suspends a tenant and records an event. A suspended one keeps its reason. For operators.
    pub async fn tenant_suspend(
        &self,
        id: &TenantId,
        reason: &str,
        key: KeyId,
    ) -> Result<Option<Tenant>, Error> {
        let mut tx = self.pools.runs.begin().await?;
        let suspended = sqlx::query!(
            "UPDATE tenants SET suspended_at = now(), suspend_reason = $2
             WHERE id = $1 AND suspended_at IS NULL",
            id.as_str(),
            reason,
        )
        .execute(&mut *tx)
        .await?;
        if suspended.rows_affected() > 0 {
            let body = EventBody::new(EventKind::TenantSuspended, json!({ "reason": reason }));
            self.audit.commit(tx, &EventSubject::by(key, Some(id)), &body).await?;
        }
        self.tenant_get(id).await
    }

    /// Ends the suspension of a tenant, unless it is deleted, and records an event. For operators.
    pub async fn tenant_resume(&self, id: &TenantId, key: KeyId) -> Result<Option<Tenant>, Error> {
        let mut tx = self.pools.runs.begin().await?;
        let resumed = sqlx::query!(
            "UPDATE tenants SET suspended_at = NULL, suspend_reason = NULL
             WHERE id = $1 AND suspended_at IS NOT NULL AND deleted_at IS NULL",
            id.as_str(),
        )
        .execute(&mut *tx)
        .await?;
        if resumed.rows_affected() > 0 {
            let body = EventBody::new(EventKind::TenantResumed, json!({}));
            self.audit.commit(tx, &EventSubject::by(key, Some(id)), &body).await?;
        }
        self.tenant_get(id).await
    }

    /// Begins to delete a tenant: suspends it for good and records an event that outlives it.
    /// Refused while it has open sessions, unless `force` is set. For operators.
    pub async fn tenant_delete(
        &self,
        id: &TenantId,
        force: bool,
        key: KeyId,
    ) -> Result<TenantDeletion, Error> {
        let usage = self.tenant_usage(id).await?;
        if usage.sessions > 0 && !force {
            return Ok(TenantDeletion::HasSessions(usage.sessions));
        }
        let mut tx = self.pools.runs.begin().await?;
        let deleted = sqlx::query!(
            "UPDATE tenants SET deleted_at = now(), suspended_at = coalesce(suspended_at, now()),
                                suspend_reason = coalesce(suspend_reason, $2)
             WHERE id = $1 AND deleted_at IS NULL",
            id.as_str(),
            DELETED,
        )
        .execute(&mut *tx)
        .await?;
        if deleted.rows_affected() > 0 {
            let body = EventBody::new(EventKind::TenantDeleted, json!({ "tenant": id }));
            self.audit.commit(tx, &EventSubject::by(key, None), &body).await?;
        }
        let found = self.tenant_get(id).await?;
        Ok(found.map_or(TenantDeletion::NotFound, |tenant| TenantDeletion::Begun(Box::new(tenant))))
    }

    /// Cancels runs of suspended tenants, closes sessions of deleted ones, and deletes the rows of
    /// those whose sandboxes and directories are gone. Changes at most `limit` rows of a table at
    /// once.
    pub async fn tenant_sweep_any_tenant(&self, limit: i64) -> Result<(), Error> {
        let found = sqlx::query!(
            r#"SELECT EXISTS (SELECT 1 FROM tenants WHERE suspended_at IS NOT NULL) AS "suspended!",
                      EXISTS (SELECT 1 FROM tenants WHERE suspended_at IS NOT NULL AND deleted_at IS NOT NULL) AS "deleted!""#
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        if found.suspended {
            self.cancel_runs_of_suspended(limit).await?;
        }
        if found.deleted {
            self.close_sessions_of_deleted(limit).await?;
            self.purge_deleted(limit).await?;
        }
        Ok(())
    }

    async fn cancel_runs_of_suspended(&self, limit: i64) -> Result<(), Error> {
        let ending = sqlx::query!(
            r#"SELECT r.id, r.session_id, r.tenant_id FROM tenants t JOIN live_runs r ON r.tenant_id = t.id
               WHERE t.suspended_at IS NOT NULL AND (r.state <> 'running' OR r.cancel_requested_at IS NULL)
               LIMIT $1"#,
            limit,
        )
        .try_map(|row| {
            Ok(RunEnd::new(row.id, row.session_id, &row.tenant_id, None, Outcome::Canceled)?)
        })
        .fetch_all(&self.pools.upkeep)
        .await?;
        let RunEnds { runs, events, .. } = self.audit.run_ends(&ending);
        sqlx::query_file!(
            "src/sql/tenant_cancel_runs.sql",
            &runs,
            CANCEL_REASON,
            events.writer,
            &events.ids,
            &events.times,
            &events.details,
            &events.macs as _,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(())
    }

    async fn close_sessions_of_deleted(&self, limit: i64) -> Result<(), Error> {
        sqlx::query!(
            "WITH due AS (
                 SELECT s.id FROM tenants t JOIN sessions s ON s.open_tenant = t.id
                 WHERE t.suspended_at IS NOT NULL AND t.deleted_at IS NOT NULL
                 LIMIT $1 FOR UPDATE OF s SKIP LOCKED
             )
             UPDATE sessions s SET state = 'ended', end_reason = 'closed', ended_at = now(),
                 removed_at = CASE WHEN s.home_root IS NULL THEN now() END
             FROM due WHERE s.id = due.id",
            limit,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(())
    }

    /// A session whose root is gone is deleted as well: a worker that returns there removes the
    /// directories of sessions that it does not find here.
    async fn purge_deleted(&self, limit: i64) -> Result<(), Error> {
        sqlx::query!(
            "WITH old AS MATERIALIZED (
                 SELECT s.id FROM tenants t JOIN sessions s ON s.tenant_id = t.id
                 WHERE t.suspended_at IS NOT NULL AND t.deleted_at IS NOT NULL AND s.state = 'ended'
                   AND (s.removed_at IS NOT NULL OR root_is_gone(s.home_root))
                   AND NOT EXISTS (SELECT 1 FROM live_runs r WHERE r.session_id = s.id)
                 LIMIT $1
             ),
             deleted_keys AS (DELETE FROM run_keys WHERE session_id = ANY (ARRAY(SELECT id FROM old)))
             DELETE FROM sessions WHERE id = ANY (ARRAY(SELECT id FROM old))",
            limit,
        )
        .execute(&self.pools.upkeep)
        .await?;
        self.run_purge_deleted_any_tenant(limit).await?;
        sqlx::query!(
            "DELETE FROM approvals WHERE id = ANY (ARRAY(
                 SELECT a.id FROM tenants t JOIN approvals a ON a.tenant_id = t.id
                 WHERE t.suspended_at IS NOT NULL AND t.deleted_at IS NOT NULL LIMIT $1))",
            limit,
        )
        .execute(&self.pools.upkeep)
        .await?;
        // Keys last: until then a call is refused with a reason.
        sqlx::query!(
            "WITH empty AS (
                 SELECT t.id FROM tenants t
                 WHERE t.suspended_at IS NOT NULL AND t.deleted_at IS NOT NULL
                   AND NOT EXISTS (SELECT 1 FROM sessions s WHERE s.tenant_id = t.id)
                   AND NOT EXISTS (SELECT 1 FROM live_runs r WHERE r.tenant_id = t.id)
                   AND NOT EXISTS (SELECT 1 FROM ended_runs r WHERE r.tenant_id = t.id)
                   AND NOT EXISTS (SELECT 1 FROM approvals a WHERE a.tenant_id = t.id)
                 LIMIT $1 FOR UPDATE OF t SKIP LOCKED
             ),
             deleted_keys AS (DELETE FROM api_keys USING empty WHERE api_keys.tenant_id = empty.id)
             DELETE FROM tenants USING empty WHERE tenants.id = empty.id",
            limit,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(())
    }
}
