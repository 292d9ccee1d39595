//! The quarantine of sessions. A trigger on `audit` begins it, see `migrations/0013_audit.sql`.

use codelia_types::{KeyId, SessionId, TenantId};
use serde_json::json;

use super::record::{Session, SessionRef};
use crate::{Error, EventBody, EventKind, EventSubject, Store};

impl Store {
    /// Has workers end the runs of a session that was quarantined.
    pub async fn session_cancel_runs(&self, tenant: &TenantId, id: SessionId) -> Result<(), Error> {
        sqlx::query!(
            "WITH running AS MATERIALIZED (
                 SELECT id FROM live_runs WHERE tenant_id || '' = $1 AND session_id = $2 AND state = 'running'
                 ORDER BY id FOR UPDATE
             )
             UPDATE live_runs r SET cancel_requested_at = now(), cancel_reason = 'the session was quarantined',
                                    cancel_grace = interval '0'
             FROM running WHERE r.id = running.id AND r.cancel_requested_at IS NULL",
            tenant.as_str(),
            id.0,
        )
        .execute(&self.pools.runs)
        .await?;
        Ok(())
    }

    /// Ends the quarantine of a session. One that is not quarantined stays as it is. Returns `None`
    /// if the tenant has no such session.
    pub async fn session_release(
        &self,
        tenant: &TenantId,
        session: &SessionRef,
        key: KeyId,
        reason: &str,
    ) -> Result<Option<Session>, Error> {
        let Some(found) = self.session_get(tenant, session).await? else { return Ok(None) };
        if found.quarantine.is_none() {
            return Ok(Some(found));
        }
        // Runs that were queued before are refused, and not those that follow.
        self.run_end_queue(found.id).await?;
        let mut tx = self.pools.runs.begin().await?;
        let released = sqlx::query!(
            "UPDATE sessions SET quarantined_at = NULL, quarantine_reason = NULL, quarantine_run = NULL
             WHERE tenant_id = $1 AND id = $2 AND quarantined_at IS NOT NULL",
            tenant.as_str(),
            found.id.0,
        )
        .execute(&mut *tx)
        .await?;
        if released.rows_affected() > 0 {
            let subject =
                EventSubject { session: Some(found.id), ..EventSubject::by(key, Some(tenant)) };
            let body = EventBody::new(EventKind::SessionReleased, json!({ "reason": reason }));
            self.audit.commit(tx, &subject, &body).await?;
        }
        self.session_get(tenant, &SessionRef::Id(found.id)).await
    }
}
