//! The table `held_changes`: changes of transactional runs that wait for a decision. The row of the
//! run decides; its state is changed here, under the lease of the session.

use std::time::Duration;

use codelia_types::{ChangesState, KeyId, LeaseEpoch, LeaseToken, RunId, SessionId};
use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{Error, EventBody, EventKind, EventSubject, Store, row};

/// Changes that a session holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldChanges {
    /// The run that made them.
    pub run: RunId,
    /// The lease under which it was executed.
    pub epoch: LeaseEpoch,
    /// For how long they wait from now on.
    pub remaining: Duration,
}

/// A decision about held changes.
#[derive(Debug, Clone, Copy)]
pub struct ChangesDecision {
    /// The session that holds them.
    pub session: SessionId,
    /// The run that made them.
    pub run: RunId,
    /// Whether they are applied; else they are dropped.
    pub apply: bool,
    /// The key that decides; `None` if nobody did in time.
    pub key: Option<KeyId>,
}

impl Store {
    /// Decides about held changes. Returns what became of them, which an earlier decision may have
    /// determined; `None` if the run is not known any more.
    ///
    /// # Errors
    /// [`Error::Fenced`] if the worker does not hold the lease.
    pub async fn changes_decide(
        &self,
        decision: ChangesDecision,
        lease: &LeaseToken,
    ) -> Result<Option<ChangesState>, Error> {
        let ChangesDecision { session, run, apply, key } = decision;
        let state = if apply { ChangesState::Applied } else { ChangesState::Dropped };
        let mut tx = self.pools.runs.begin().await?;
        let decided = sqlx::query_file_scalar!(
            "src/sql/changes_decide.sql",
            session.0,
            run.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
            state.as_str(),
        )
        .fetch_optional(&mut *tx)
        .await?;
        if let Some(tenant) = &decided {
            let subject = EventSubject {
                tenant: Some(row::parse("ended_runs.tenant_id", tenant)?),
                session: Some(session),
                run: Some(run),
                key,
                worker: Some(lease.worker.clone()),
            };
            let detail = json!({ "state": state, "expired": key.is_none() });
            let body = EventBody::new(EventKind::ChangesDecided, detail);
            self.audit.insert(&mut *tx, &subject, &body).await?;
        }
        tx.commit().await?;
        if decided.is_some() {
            return Ok(Some(state));
        }
        match self.changes_state(run).await? {
            Some(ChangesState::Held) => Err(Error::Fenced),
            other => Ok(other),
        }
    }

    async fn changes_state(&self, run: RunId) -> Result<Option<ChangesState>, Error> {
        let word = sqlx::query_scalar!(
            r#"SELECT coalesce(changes ->> 'state', 'dropped') AS "state!" FROM ended_runs WHERE id = $1"#,
            run.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        word.map(|word| parse_state(&word)).transpose()
    }

    /// Returns the fate of the changes that a transactional run prepared under a lease. `None` if the
    /// run has not ended.
    pub async fn run_changes_state_any_tenant(
        &self,
        id: RunId,
        epoch: LeaseEpoch,
    ) -> Result<Option<ChangesState>, Error> {
        let is_live = sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT FROM live_runs WHERE id = $1) AS "is_live!""#,
            id.0
        )
        .fetch_one(&self.pools.runs)
        .await?;
        // A run that ends in between is found by the second statement.
        let state = sqlx::query_scalar!(
            r#"SELECT coalesce(changes ->> 'state', 'dropped') AS "state!" FROM ended_runs
               WHERE id = $1 AND lease_epoch = $2"#,
            id.0,
            epoch.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        match state {
            Some(word) => parse_state(&word).map(Some),
            None => Ok((!is_live).then_some(ChangesState::Dropped)),
        }
    }

    /// Sessions with files on this root that no live worker holds and whose held changes waited too
    /// long.
    pub async fn changes_list_expired_any_tenant(
        &self,
        root: Uuid,
        limit: i64,
    ) -> Result<Vec<SessionId>, Error> {
        let found = sqlx::query_scalar!(
            "SELECT h.session_id FROM held_changes h
             CROSS JOIN LATERAL (SELECT * FROM sessions WHERE id = h.session_id LIMIT 1) AS s
             WHERE h.root = $1 AND h.expires_at <= now() AND s.state = 'open'
               AND NOT EXISTS (SELECT 1 FROM workers w
                               WHERE w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
                                 AND w.lease_until > now())
             LIMIT $2",
            root,
            limit,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        Ok(found.into_iter().map(SessionId).collect())
    }

    /// Records that the changes which ended sessions held are dropped with them, for at most
    /// `limit` sessions, and returns how many. The worker that removes a session does the same for
    /// it.
    pub async fn changes_drop_ended_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let dropped = sqlx::query_scalar!(
            r#"WITH ended AS (
                   DELETE FROM held_changes WHERE session_id = ANY (ARRAY(
                       SELECT h.session_id FROM held_changes h
                       LEFT JOIN LATERAL (SELECT state FROM sessions WHERE id = h.session_id LIMIT 1) AS s ON true
                       WHERE s.state IS DISTINCT FROM 'open' LIMIT $1))
                   RETURNING run_id
               ),
               dropped AS (
                   UPDATE ended_runs r SET changes = jsonb_set(r.changes, '{state}', '"dropped"')
                   FROM ended WHERE r.id = ended.run_id AND r.changes ->> 'state' = 'held'
               )
               SELECT count(*) AS "count!" FROM ended"#,
            limit,
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        Ok(dropped.unsigned_abs())
    }
}

/// The changes that a session holds. The caller has locked the session.
pub(crate) async fn of_session(
    tx: &mut PgConnection,
    session: SessionId,
) -> Result<Option<HeldChanges>, Error> {
    let found = sqlx::query!(
        r#"SELECT run_id, lease_epoch, (extract(epoch FROM expires_at - now()) * 1000000)::bigint AS "micros!"
           FROM held_changes WHERE session_id = $1"#,
        session.0,
    )
    .fetch_optional(tx)
    .await?;
    Ok(found.map(|found| HeldChanges {
        run: RunId(found.run_id),
        epoch: LeaseEpoch(found.lease_epoch),
        remaining: row::micros(found.micros.max(0)),
    }))
}

fn parse_state(word: &str) -> Result<ChangesState, Error> {
    row::parse("ended_runs.changes.state", word)
}
