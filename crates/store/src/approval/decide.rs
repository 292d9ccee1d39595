//! Deciding about approvals, and revoking grants.

use codelia_types::{ApprovalId, KeyId, Mode, Outcome, Reason, Refusal, SessionId, TenantId};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{
    expire,
    list::get,
    permitted::{Permitted, Withdrawn},
    record::{Approval, ApprovalReach, ApprovalScope, ApprovalState, MAX_GRANTS, shortened},
    request,
};
use crate::{Error, EventKind, Store, row};

/// A person's decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The scope that it is allowed for; `None` denies it.
    pub allow: Option<ApprovalScope>,
    /// Which files it holds for; `None` for the file that it is about, if it has a path.
    pub reach: Option<ApprovalReach>,
    /// The key that decides.
    pub key: KeyId,
    /// Why; cut after [`MAX_APPROVAL_TEXT`](crate::MAX_APPROVAL_TEXT) bytes.
    pub reason: Option<String>,
    /// The limits of what the installation permits now.
    pub permitted: Permitted,
}

/// The answer to [`Store::approval_decide`] and [`Store::approval_revoke`].
#[derive(Debug)]
pub enum DecisionResult {
    /// The decision counts.
    Decided {
        /// The approval.
        approval: Box<Approval>,
        /// The run that may start now, if one waited.
        run: Option<RunToWake>,
    },
    /// Nothing changed.
    NotDecided(NotDecided),
}

/// Why a decision was not accepted.
#[derive(Debug)]
pub enum NotDecided {
    /// The tenant has no such approval.
    NotFound,
    /// The deciding key requested it.
    OwnRequest,
    /// Such an approval can only be allowed once.
    OnceOnly,
    /// Such an approval is about no file.
    NoPath,
    /// The session has no project, or its user is not known.
    NoSubject(ApprovalScope),
    /// The scopes above do not leave the field to the one that it was to hold for.
    NotDelegated {
        /// The field that was to be widened.
        field: &'static str,
        /// Whom it was to hold for.
        scope: ApprovalScope,
    },
    /// The installation or the tenant does not permit it any more.
    NotPermitted(Withdrawn),
    /// Another decision came first, or it expired.
    Before(Box<Approval>),
    /// The approval is not a grant that holds.
    NotGranted(Box<Approval>),
}

/// A run that was held and is queued now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunToWake {
    /// The session to wake.
    pub session: SessionId,
    /// The mode of the session.
    pub mode: Mode,
    /// Address of the live worker that holds the session, if one does.
    pub holder: Option<String>,
}

/// Which key revokes a grant, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revocation {
    /// The key that revokes.
    pub key: KeyId,
    /// Why; cut after [`MAX_APPROVAL_TEXT`](crate::MAX_APPROVAL_TEXT) bytes.
    pub reason: Option<String>,
}

impl Store {
    /// Decides about an approval. Of several decisions the first one counts. A run that waits for
    /// it is queued, or ends as refused, in the same transaction. What was permitted when the run
    /// was admitted and is not any more cannot be allowed.
    ///
    /// # Errors
    /// [`Error::TooManyApprovals`] if too much is granted already.
    pub async fn approval_decide(
        &self,
        tenant: &TenantId,
        id: ApprovalId,
        decision: &Decision,
    ) -> Result<DecisionResult, Error> {
        // Decisions that are grants are counted under the lock of the tenant.
        let mut tx = self.tenant_lock(tenant).await?;
        let Some(found) = get(&mut *tx, tenant, id).await? else {
            return Ok(DecisionResult::NotDecided(NotDecided::NotFound));
        };
        if found.requested_by == decision.key {
            return Ok(DecisionResult::NotDecided(NotDecided::OwnRequest));
        }
        if found.kind.is_once_only()
            && decision.allow.is_some_and(|scope| scope != ApprovalScope::Once)
        {
            return Ok(DecisionResult::NotDecided(NotDecided::OnceOnly));
        }
        if found.path.is_empty() && decision.reach.is_some() {
            return Ok(DecisionResult::NotDecided(NotDecided::NoPath));
        }
        let subject = match subject(&mut tx, &found, decision.allow).await? {
            Ok(subject) => subject,
            Err(why) => return Ok(DecisionResult::NotDecided(why)),
        };
        check_grants(&mut tx, &found, decision.allow).await?;
        let permitted = decision.permitted.under_tenant(&mut tx, tenant).await?;
        let held = lock_run(&mut tx, &found).await?;
        let mode = held.as_ref().map(|(_, mode)| *mode);
        if decision.allow.is_some()
            && let Some(withdrawn) = mode.and_then(|mode| permitted.refuses(found.kind, mode))
        {
            return Ok(DecisionResult::NotDecided(NotDecided::NotPermitted(withdrawn)));
        }
        if !update(&mut tx, id, decision, subject.as_deref()).await? {
            let current = get(&mut *tx, tenant, id).await?.unwrap_or(found);
            return Ok(DecisionResult::NotDecided(NotDecided::Before(Box::new(current))));
        }
        let approval =
            get(&mut *tx, tenant, id).await?.ok_or(Error::RowMissing { what: "approval" })?;
        let kind = match decision.allow {
            Some(_) => EventKind::ApprovalAllowed,
            None => EventKind::ApprovalDenied,
        };
        let body = approval.event(kind, approval.reason.as_deref());
        let subject = approval.event_subject(Some(decision.key));
        self.audit.insert(&mut *tx, &subject, &body).await?;
        let run = match (held, decision.allow) {
            (Some((run, _)), Some(_)) => queue_held(&mut tx, &approval).await?.then_some(run),
            (Some(_), None) => {
                let outcome = denied_outcome(&approval);
                expire::end_held(&self.audit, &mut tx, &[(&approval, outcome)]).await?;
                None
            }
            (None, _) => None,
        };
        tx.commit().await?;
        Ok(DecisionResult::Decided { approval: Box::new(approval), run })
    }

    /// Revokes a grant to a session or a tenant. Runs that have started keep what they have until
    /// they ask again.
    pub async fn approval_revoke(
        &self,
        tenant: &TenantId,
        id: ApprovalId,
        revocation: &Revocation,
    ) -> Result<DecisionResult, Error> {
        let mut tx = self.pools.runs.begin().await?;
        let revoked = sqlx::query!(
            "UPDATE approvals SET revoked_at = now(), revoked_by = $3, revoke_reason = $4, changed_at = now()
             WHERE tenant_id || '' = $1 AND id = $2 AND state = 'allowed' AND scope <> 'once' AND revoked_at IS NULL",
            tenant.as_str(),
            id.0,
            revocation.key.0,
            revocation.reason.as_deref().map(shortened),
        )
        .execute(&mut *tx)
        .await?;
        let Some(approval) = get(&mut *tx, tenant, id).await? else {
            return Ok(DecisionResult::NotDecided(NotDecided::NotFound));
        };
        if revoked.rows_affected() == 0 {
            return Ok(DecisionResult::NotDecided(NotDecided::NotGranted(Box::new(approval))));
        }
        let body = approval.event(EventKind::ApprovalRevoked, approval.revoke_reason.as_deref());
        self.audit.commit(tx, &approval.event_subject(Some(revocation.key)), &body).await?;
        Ok(DecisionResult::Decided { approval: Box::new(approval), run: None })
    }
}

/// The project or user that a decision is to hold for; `None` for another scope. The scopes above
/// must leave the field to it. The caller holds the lock of the tenant, so that no policy changes
/// meanwhile.
async fn subject(
    tx: &mut PgConnection,
    approval: &Approval,
    scope: Option<ApprovalScope>,
) -> Result<Result<Option<String>, NotDecided>, Error> {
    let Some(scope @ (ApprovalScope::User | ApprovalScope::Project)) = scope else {
        return Ok(Ok(None));
    };
    let field = approval.kind.field();
    let found = sqlx::query!(
        r#"SELECT created_by::text AS "user", spec #>> '{scopes,project}' AS project,
                  scope_delegates(tenant_id, $3, spec #>> '{scopes,project}', $4) AS "is_delegated!"
           FROM sessions WHERE id = $1 AND tenant_id = $2"#,
        approval.session.0,
        approval.tenant.as_str(),
        scope.as_str(),
        field,
    )
    .fetch_optional(tx)
    .await?;
    let is_delegated = found.as_ref().is_some_and(|found| found.is_delegated);
    let subject =
        found.and_then(|it| if scope == ApprovalScope::User { it.user } else { it.project });
    Ok(match subject {
        None => Err(NotDecided::NoSubject(scope)),
        Some(_) if !is_delegated => Err(NotDecided::NotDelegated { field, scope }),
        subject => Ok(subject),
    })
}

/// Makes the one decision. The clock is read after all locks were waited for.
async fn update(
    tx: &mut PgConnection,
    id: ApprovalId,
    decision: &Decision,
    subject: Option<&str>,
) -> Result<bool, Error> {
    let state =
        if decision.allow.is_some() { ApprovalState::Allowed } else { ApprovalState::Denied };
    let updated = sqlx::query!(
        "UPDATE approvals SET state = $2, scope = $3, subject = $7, decided_by = $4, reason = $5,
                              reach = CASE WHEN path <> '' THEN coalesce($6, 'file') END,
                              decided_at = clock_timestamp(), changed_at = clock_timestamp()
         WHERE id = $1 AND state = 'pending' AND expires_at > clock_timestamp() AND requested_by <> $4",
        id.0,
        state.as_str(),
        decision.allow.map(ApprovalScope::as_str),
        decision.key.0,
        decision.reason.as_deref().map(shortened),
        decision.reach.map(ApprovalReach::as_str),
        subject,
    )
    .execute(tx)
    .await?;
    Ok(updated.rows_affected() > 0)
}

/// Locks the session and the run that wait for an approval, if there are any, so that neither ends
/// nor changes its holder meanwhile. Returns the mode of the run, too.
async fn lock_run(
    tx: &mut PgConnection,
    approval: &Approval,
) -> Result<Option<(RunToWake, Mode)>, Error> {
    let Some(run) = approval.run else { return Ok(None) };
    let session = sqlx::query!(
        r#"SELECT s.spec ->> 'mode' AS "mode!", w.address AS "holder?"
           FROM sessions s
           LEFT JOIN workers w ON w.id = s.lease_worker AND w.incarnation = s.lease_incarnation AND w.lease_until > now()
           WHERE s.id = $1 FOR SHARE OF s"#,
        approval.session.0,
    )
    .fetch_optional(&mut *tx)
    .await?;
    let Some(session) = session else { return Ok(None) };
    let held = sqlx::query_scalar!(
        r#"SELECT coalesce(spec ->> 'mode', (SELECT settings ->> 'mode' FROM run_settings WHERE hash = settings_hash)) AS "mode!"
           FROM live_runs WHERE id = $1 AND state = 'held' AND approval_id = $2 FOR UPDATE"#,
        run.0,
        approval.id.0,
    )
    .fetch_optional(tx)
    .await?;
    let Some(held) = held else { return Ok(None) };
    let mode = row::parse("sessions.spec", &session.mode)?;
    let wake = RunToWake { session: approval.session, mode, holder: session.holder };
    Ok(Some((wake, row::parse("live_runs.spec", &held)?)))
}

/// Queues the run that waited. Its queue timeout begins now.
async fn queue_held(tx: &mut PgConnection, approval: &Approval) -> Result<bool, Error> {
    let queued = sqlx::query_file_scalar!(
        "src/sql/held_run_queue.sql",
        approval.run.map(|run| run.0),
        approval.id.0
    )
    .fetch_one(tx)
    .await?;
    Ok(queued > 0)
}

async fn check_grants(
    tx: &mut PgConnection,
    approval: &Approval,
    scope: Option<ApprovalScope>,
) -> Result<(), Error> {
    let (scope, session, subject) = match scope {
        None | Some(ApprovalScope::Once) => return Ok(()),
        Some(ApprovalScope::Session) => ("session", Some(approval.session.0), "the session has"),
        Some(ApprovalScope::User) => ("user", None, "the users of the tenant have"),
        Some(ApprovalScope::Project) => ("project", None, "the projects of the tenant have"),
        Some(ApprovalScope::Tenant) => ("tenant", None, "the tenant has"),
    };
    let count = sqlx::query_scalar!(
        r#"SELECT count(*) AS "count!" FROM approvals
           WHERE tenant_id = $1 AND state = 'allowed' AND scope <> 'once' AND revoked_at IS NULL
             AND scope = $2 AND session_id = coalesce($3, session_id)"#,
        approval.tenant.as_str(),
        scope,
        session as Option<Uuid>,
    )
    .fetch_one(tx)
    .await?;
    request::within(count, MAX_GRANTS, subject, "approvals that hold for later runs; revoke some")
}

fn denied_outcome(approval: &Approval) -> Outcome {
    let mut message = format!("approval {} was denied", approval.id);
    if let Some(reason) = &approval.reason {
        message = format!("{message}: {reason}");
    }
    Outcome::Refused(Refusal { reason: Reason::ApprovalDenied, message })
}
