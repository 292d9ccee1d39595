//! The end of approvals that nobody decides about: expiry, runs that ended, and deletion of old
//! rows.

use codelia_types::{ApprovalId, Outcome, Reason, Refusal, RunId};
use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use super::record::{Approval, select_approvals};
use crate::{Error, EventKind, Retention, RunRef, Store, audit::AuditLog, row};

impl Store {
    /// Records that pending approvals have expired, at most `limit`, and ends the runs that wait
    /// for them. Returns how many.
    pub async fn approval_expire_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let due = sqlx::query!(
            "SELECT id, run_id FROM approvals WHERE state = 'pending' AND expires_at <= now()
             ORDER BY expires_at LIMIT $1",
            limit,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        if due.is_empty() {
            return Ok(0);
        }
        let (ids, runs): (Vec<Uuid>, Vec<Option<Uuid>>) =
            due.into_iter().map(|row| (row.id, row.run_id)).unzip();
        let mut tx = self.pools.upkeep.begin().await?;
        // Runs before approvals, as in every transaction.
        sqlx::query!(
            "SELECT id FROM live_runs WHERE id = ANY ($1) AND state = 'held' ORDER BY id FOR UPDATE",
            &runs as _,
        )
        .fetch_all(&mut *tx)
        .await?;
        let expired = mark(&self.audit, &mut tx, &ids).await?;
        let outcomes: Vec<_> =
            expired.iter().map(|approval| (approval, expired_outcome(approval.id))).collect();
        end_held(&self.audit, &mut tx, &outcomes).await?;
        tx.commit().await?;
        Ok(u64::try_from(expired.len()).unwrap_or(0))
    }

    /// Ends the pending approvals of a run that needs none of them any more.
    pub async fn approval_withdraw(&self, run: RunId) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE approvals SET state = 'expired', decided_at = now(), changed_at = now(), reason = $2
             WHERE run_id = $1 AND state = 'pending'",
            run.0,
            RUN_ENDED,
        )
        .execute(&self.pools.runs)
        .await?;
        Ok(())
    }

    /// Deletes approvals that are older than their tenant keeps what audits need, at most `limit`,
    /// and returns how many. A grant stays while it holds.
    pub async fn approval_purge_any_tenant(
        &self,
        keep: &Retention,
        limit: i64,
    ) -> Result<u64, Error> {
        let deleted = sqlx::query!(
            "DELETE FROM approvals WHERE id = ANY (ARRAY(
                 SELECT old.id FROM tenants t CROSS JOIN LATERAL (
                     SELECT a.id FROM approvals a
                     WHERE a.tenant_id = t.id AND a.id < id_at(now() - coalesce(t.retention_audit, $1))
                       AND a.state <> 'pending'
                       AND NOT (a.state = 'allowed' AND a.revoked_at IS NULL
                                AND (a.scope IN ('tenant', 'project', 'user')
                                     OR (a.scope = 'session'
                                         AND EXISTS (SELECT 1 FROM sessions s
                                                     WHERE s.id = a.session_id AND s.state = 'open'))))
                     ORDER BY a.id LIMIT $2) AS old
                 LIMIT $2))",
            row::interval(keep.audit),
            limit,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(deleted.rows_affected())
    }
}

/// Why an approval whose run ended has expired. SQL files that end held runs have the same text.
const RUN_ENDED: &str = "the run ended";

/// Records that pending approvals of a run have expired.
pub(super) async fn of_run(log: &AuditLog, tx: &mut PgConnection, run: RunId) -> Result<(), Error> {
    let ids = sqlx::query_scalar!(
        "SELECT id FROM approvals WHERE run_id = $1 AND state = 'pending' AND expires_at <= now()
         FOR UPDATE SKIP LOCKED",
        run.0,
    )
    .fetch_all(&mut *tx)
    .await?;
    if ids.is_empty() { Ok(()) } else { mark(log, tx, &ids).await.map(drop) }
}

/// Marks those of the approvals that have expired, with an event for each, and returns them.
async fn mark(log: &AuditLog, tx: &mut PgConnection, ids: &[Uuid]) -> Result<Vec<Approval>, Error> {
    let marked = sqlx::query_scalar!(
        "WITH due AS MATERIALIZED (
             SELECT id FROM approvals WHERE id = ANY ($1) AND state = 'pending' AND expires_at <= now()
             ORDER BY id FOR UPDATE
         )
         UPDATE approvals a SET state = 'expired', decided_at = a.expires_at, changed_at = now()
         FROM due WHERE a.id = due.id
         RETURNING a.id",
        ids,
    )
    .fetch_all(&mut *tx)
    .await?;
    let expired = select_approvals!("a.id = ANY ($1)", &marked).fetch_all(&mut *tx).await?;
    for approval in &expired {
        let body = approval.event(EventKind::ApprovalExpired, None);
        log.insert(&mut *tx, &approval.event_subject(None), &body).await?;
    }
    Ok(expired)
}

/// Ends runs that wait for these approvals, each with its outcome.
pub(super) async fn end_held(
    log: &AuditLog,
    tx: &mut PgConnection,
    ends: &[(&Approval, Outcome)],
) -> Result<(), Error> {
    let mut approvals = Vec::new();
    let mut runs = Vec::new();
    let mut outcomes = Vec::new();
    let mut events = log.columns();
    for (approval, outcome) in ends {
        let Some(id) = approval.run else { continue };
        let run = RunRef { id, session: approval.session, tenant: &approval.tenant };
        approvals.push(approval.id.0);
        runs.push(id.0);
        outcomes.push(Json(outcome));
        events.push(log.run_end(run, None, outcome));
    }
    sqlx::query_file!(
        "src/sql/held_runs_end.sql",
        &approvals,
        &runs,
        &outcomes as _,
        events.writer,
        &events.ids,
        &events.times,
        &events.details,
        &events.macs as _,
    )
    .execute(tx)
    .await?;
    Ok(())
}

fn expired_outcome(id: ApprovalId) -> Outcome {
    let message = format!("nobody decided about approval {id} in time; start the run again");
    Outcome::Refused(Refusal { reason: Reason::ApprovalExpired, message })
}
