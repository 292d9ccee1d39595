//! The specs of ended runs, newest first, to try a policy on them.

use codelia_policy::PolicyScope;
use codelia_types::{RunId, SessionId};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Error, ScopeRef, Store, id_time::first_id};

/// An ended run as it was admitted.
#[derive(Debug, Clone)]
pub struct RecordedRun {
    /// Identifies the run, and is the cursor of the list.
    pub id: RunId,
    /// The session that it ran in.
    pub session: SessionId,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// The spec, as JSON text: reading many costs too much for the async runtime.
    pub spec: String,
    /// The scopes of its session, as JSON text, if the session still exists.
    pub scopes: Option<String>,
}

impl Store {
    /// Lists the ended runs of a scope that were created after a time, older than `before`, newest
    /// first. Those of a project or user are found as long as their session is kept.
    pub async fn run_recorded(
        &self,
        of: &ScopeRef,
        since: OffsetDateTime,
        before: Option<RunId>,
        limit: i64,
    ) -> Result<Vec<RecordedRun>, Error> {
        let is = |scope| Some(of.name.as_str()).filter(|_| of.scope == scope);
        let mut tx = self.pools.reads.begin_in_order().await?;
        let runs = sqlx::query!(
            r#"SELECT r.id, r.session_id, r.created_at,
                      (r.spec || coalesce((SELECT s.settings FROM run_settings s WHERE s.hash = r.settings_hash), '{}'))::text
                          AS "spec!",
                      (SELECT s.spec ->> 'scopes' FROM sessions s WHERE s.id = r.session_id) AS scopes
               FROM ended_runs r
               WHERE (r.tenant_id, r.id) < ($1, $2) AND (r.tenant_id, r.id) >= ($1, $3) AND r.id < $2 AND r.id >= $3
                 AND r.created_at > $4
                 AND ($5::text IS NULL
                      OR (SELECT s.spec #>> '{scopes,project}' FROM sessions s WHERE s.id = r.session_id) = $5)
                 AND ($6::text IS NULL
                      OR (SELECT s.created_by::text FROM sessions s WHERE s.id = r.session_id) = $6)
               ORDER BY r.tenant_id DESC, r.id DESC LIMIT $7"#,
            of.tenant.as_str(),
            before.map_or(Uuid::max(), |id| id.0),
            first_id(since - time::Duration::seconds(10)),
            since,
            is(PolicyScope::Project),
            is(PolicyScope::User),
            limit,
        )
        .map(|row| RecordedRun {
            id: RunId(row.id),
            session: SessionId(row.session_id),
            created_at: row.created_at,
            spec: row.spec,
            scopes: row.scopes,
        })
        .fetch_all(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(runs)
    }
}
