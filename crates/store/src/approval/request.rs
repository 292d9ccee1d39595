//! Requesting approvals, for a run that is about to be inserted or for one that is running.

use std::time::Duration;

use codelia_types::{ApprovalId, KeyId, RunId, SessionId, TenantId};
use sqlx::PgConnection;

use super::{
    expire,
    record::{
        Approval, ApprovalKind, ApprovalReach, Grant, MAX_GRANTS, MAX_OF_RUN, MAX_PENDING_OF_RUN,
        MAX_PENDING_OF_TENANT, Reader, port, select_approvals, shortened,
    },
};
use crate::{Error, EventKind, Store, audit::AuditLog, row};

/// An approval that a run needs before it may start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewApproval {
    /// Identifies the request; the caller chooses it.
    pub id: ApprovalId,
    /// The kind of what is requested.
    pub kind: ApprovalKind,
    /// The host that it is about; empty if the kind has none.
    pub host: String,
    /// The port that it is about; 0 if the kind has none.
    pub port: u16,
    /// For the person who decides; cut after [`MAX_APPROVAL_TEXT`](crate::MAX_APPROVAL_TEXT) bytes.
    pub message: String,
    /// The key that starts the run.
    pub requested_by: KeyId,
    /// How long it waits for a decision.
    pub timeout: Duration,
}

/// A request of a running run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApprovalRequest {
    /// The tenant of the run.
    pub tenant: TenantId,
    /// The session of the run.
    pub session: SessionId,
    /// The run that asks.
    pub run: RunId,
    /// The kind of what is requested.
    pub kind: ApprovalKind,
    /// The host that it is about; empty if the kind has none.
    pub host: String,
    /// The port that it is about; 0 if the kind has none.
    pub port: u16,
    /// The file that it is about, at most 1024 bytes; empty if the kind has none.
    pub path: String,
    /// The process that asks for the file.
    pub reader: Reader,
    /// For the person who decides; cut after [`MAX_APPROVAL_TEXT`](crate::MAX_APPROVAL_TEXT) bytes.
    pub message: String,
    /// How long it waits for a decision.
    pub timeout: Duration,
}

/// Files that all runs of a session may read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadGrant {
    /// A file.
    pub path: String,
    /// Whether the grant is for the file, or for all files below its directory.
    pub reach: ApprovalReach,
}

impl Store {
    /// Requests an approval for a running run. Repeating it returns the pending request. What is
    /// granted to the session or the tenant, and what was decided for this run, is returned at
    /// once; a request that expired may be made again.
    ///
    /// # Errors
    /// [`Error::TooManyApprovals`] if the run or its tenant has too many, [`Error::Fenced`] if the
    /// run is not running, or its key is not known.
    pub async fn approval_request(&self, request: &ApprovalRequest) -> Result<Approval, Error> {
        if let Some(answer) = self.approval_answer(request).await? {
            return Ok(answer);
        }
        // One request at a time for each tenant: they cannot exceed its maximum together.
        let mut tx = self.tenant_lock(&request.tenant).await?;
        expire::of_run(&self.audit, &mut tx, request.run).await?;
        check_run(&mut tx, request.run).await?;
        check_tenant(&mut tx, &request.tenant).await?;
        let id = ApprovalId::generate();
        let inserted = sqlx::query!(
            "INSERT INTO approvals (id, tenant_id, session_id, run_id, kind, host, port, path, pid, exe, cwd, requested_by, message, expires_at)
             SELECT $1, r.tenant_id, r.session_id, r.id, $5, $6, $7, $10, $11, $12, $13, r.requested_by, $8, now() + $9::interval
             FROM live_runs r
             WHERE r.id = $4 AND r.tenant_id || '' = $2 AND r.session_id = $3 AND r.state = 'running'
               AND r.requested_by IS NOT NULL
             ON CONFLICT (run_id, kind, host, port, path) WHERE state = 'pending' DO NOTHING",
            id.0,
            request.tenant.as_str(),
            request.session.0,
            request.run.0,
            request.kind.as_str(),
            request.host,
            i32::from(request.port),
            shortened(&request.message),
            row::interval(request.timeout) as _,
            request.path,
            request.reader.pid.cast_signed(),
            request.reader.exe,
            request.reader.cwd,
        )
        .execute(&mut *tx)
        .await?;
        if inserted.rows_affected() == 0 {
            drop(tx);
            // Another request came first, or the run is not running.
            return self.approval_answer(request).await?.ok_or(Error::Fenced);
        }
        let approval = requested(&self.audit, &mut tx, id).await?;
        tx.commit().await?;
        Ok(approval)
    }

    /// Returns those of the approvals that are not pending any more.
    pub async fn approvals_decided(&self, ids: &[ApprovalId]) -> Result<Vec<Approval>, Error> {
        let ids: Vec<_> = ids.iter().map(|id| id.0).collect();
        let decided = select_approvals!(
            "a.id = ANY ($1) AND (a.state <> 'pending' OR a.expires_at <= now())",
            &ids
        );
        Ok(decided.fetch_all(&self.pools.runs).await?)
    }

    /// Lists what is granted to all runs of a session.
    pub async fn approval_grants(
        &self,
        tenant: &TenantId,
        session: SessionId,
    ) -> Result<Vec<Grant>, Error> {
        let grants = sqlx::query!(
            "SELECT DISTINCT kind, host, port FROM approvals a
             WHERE tenant_id = $1 AND state = 'allowed' AND scope <> 'once' AND revoked_at IS NULL
               AND grant_holds(a, $2)
             LIMIT $3",
            tenant.as_str(),
            session.0,
            4 * MAX_GRANTS,
        )
        .try_map(|row| {
            let kind = row::parse("approvals.kind", &row.kind)?;
            Ok(Grant { kind, host: row.host, port: port(row.port) })
        });
        Ok(grants.fetch_all(&self.pools.runs).await?)
    }

    /// Lists the files that all runs of a session may read.
    pub async fn approval_read_grants(
        &self,
        tenant: &TenantId,
        session: SessionId,
    ) -> Result<Vec<ReadGrant>, Error> {
        let grants = sqlx::query!(
            r#"SELECT DISTINCT path, coalesce(reach, 'file') AS "reach!" FROM approvals a
               WHERE tenant_id = $1 AND kind = $3 AND state = 'allowed' AND scope <> 'once'
                 AND revoked_at IS NULL AND grant_holds(a, $2)
               LIMIT $4"#,
            tenant.as_str(),
            session.0,
            ApprovalKind::FileRead.as_str(),
            4 * MAX_GRANTS,
        )
        .try_map(|row| {
            Ok(ReadGrant { path: row.path, reach: row::parse("approvals.reach", &row.reach)? })
        });
        Ok(grants.fetch_all(&self.pools.runs).await?)
    }

    /// Returns a grant to all runs of a session, if there is one.
    pub async fn approval_granted(
        &self,
        tenant: &TenantId,
        session: SessionId,
        grant: &Grant,
    ) -> Result<Option<Approval>, Error> {
        self.granted(tenant, session, grant, "").await
    }

    async fn granted(
        &self,
        tenant: &TenantId,
        session: SessionId,
        grant: &Grant,
        path: &str,
    ) -> Result<Option<Approval>, Error> {
        let found = select_approvals!(
            "a.tenant_id = $1 AND a.kind = $3 AND a.host = $4 AND a.port = $5 AND a.path = $6
               AND a.state = 'allowed' AND a.scope <> 'once' AND a.revoked_at IS NULL
               AND grant_holds(a, $2)
             LIMIT 1",
            tenant.as_str(),
            session.0,
            grant.kind.as_str(),
            grant.host,
            i32::from(grant.port),
            path,
        );
        Ok(found.fetch_optional(&self.pools.runs).await?)
    }

    /// Finds an answer without a new request: a grant, or the run's own request that is pending or
    /// decided.
    async fn approval_answer(&self, request: &ApprovalRequest) -> Result<Option<Approval>, Error> {
        let ApprovalRequest { tenant, session, kind, host, port, path, .. } = request;
        let grant = Grant { kind: *kind, host: host.clone(), port: *port };
        if let Some(granted) = self.granted(tenant, *session, &grant, path).await? {
            return Ok(Some(granted));
        }
        let found = select_approvals!(
            "a.tenant_id || '' = $1 AND a.run_id = $2 AND a.kind = $3 AND a.host = $4 AND a.port = $5
               AND a.path = $6 AND (a.state IN ('allowed', 'denied') OR (a.state = 'pending' AND a.expires_at > now()))
               AND a.revoked_at IS NULL
             ORDER BY a.id DESC LIMIT 1",
            tenant.as_str(),
            request.run.0,
            kind.as_str(),
            host,
            i32::from(*port),
            path,
        );
        Ok(found.fetch_optional(&self.pools.runs).await?)
    }
}

/// Inserts the approval that a run waits for, which the same transaction inserts. The caller holds
/// the lock of the tenant.
pub(crate) async fn insert_for_run(
    log: &AuditLog,
    tx: &mut PgConnection,
    tenant: &TenantId,
    session: SessionId,
    run: RunId,
    new: &NewApproval,
) -> Result<(), Error> {
    check_tenant(&mut *tx, tenant).await?;
    sqlx::query!(
        "INSERT INTO approvals (id, tenant_id, session_id, run_id, kind, host, port, requested_by, message, expires_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, now() + $10::interval)",
        new.id.0,
        tenant.as_str(),
        session.0,
        run.0,
        new.kind.as_str(),
        new.host,
        i32::from(new.port),
        new.requested_by.0,
        shortened(&new.message),
        row::interval(new.timeout) as _,
    )
    .execute(&mut *tx)
    .await?;
    requested(log, tx, new.id).await.map(drop)
}

/// Records the event of a request that was just inserted, and returns it.
async fn requested(
    log: &AuditLog,
    tx: &mut PgConnection,
    id: ApprovalId,
) -> Result<Approval, Error> {
    let approval = select_approvals!("a.id = $1", id.0).fetch_one(&mut *tx).await?;
    let subject = approval.event_subject(Some(approval.requested_by));
    log.insert(tx, &subject, &approval.event(EventKind::ApprovalRequested, None)).await?;
    Ok(approval)
}

async fn check_tenant(tx: &mut PgConnection, tenant: &TenantId) -> Result<(), Error> {
    let pending = sqlx::query_scalar!(
        r#"SELECT count(*) AS "count!" FROM approvals
           WHERE tenant_id = $1 AND state = 'pending' AND expires_at > now()"#,
        tenant.as_str(),
    )
    .fetch_one(tx)
    .await?;
    within(pending, MAX_PENDING_OF_TENANT, "the tenant has", "pending approvals")
}

async fn check_run(tx: &mut PgConnection, run: RunId) -> Result<(), Error> {
    let counted = sqlx::query!(
        r#"SELECT count(*) AS "all!", count(*) FILTER (WHERE state = 'pending') AS "pending!"
           FROM approvals WHERE run_id = $1"#,
        run.0,
    )
    .fetch_one(tx)
    .await?;
    within(counted.pending, MAX_PENDING_OF_RUN, "the run has", "pending approvals")?;
    within(counted.all, MAX_OF_RUN, "the run has requested", "approvals")
}

/// Fails if there are as many as allowed.
pub(super) fn within(
    count: i64,
    limit: i64,
    subject: &'static str,
    what: &'static str,
) -> Result<(), Error> {
    if count < limit { Ok(()) } else { Err(Error::TooManyApprovals { subject, limit, what }) }
}
