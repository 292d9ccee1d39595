//! Reading approvals for callers.

use std::collections::HashMap;

use codelia_types::{ApprovalId, RunId, SessionId, TenantId};
use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use super::record::{Approval, ApprovalKind, select_approvals};
use crate::{Error, Store};

/// Which approvals to list.
#[derive(Debug, Clone, Default)]
pub struct ApprovalFilter {
    /// Which states.
    pub status: ApprovalStatus,
    /// Only approvals of this session.
    pub session: Option<SessionId>,
    /// Only approvals that are older than this one.
    pub before: Option<ApprovalId>,
}

/// Which states of approvals to list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ApprovalStatus {
    /// Approvals that wait for a decision.
    #[default]
    Pending,
    /// Approvals that hold for later runs.
    Granted,
    /// All.
    Any,
}

impl Store {
    /// Returns a tenant's approval.
    pub async fn approval_get(
        &self,
        tenant: &TenantId,
        id: ApprovalId,
    ) -> Result<Option<Approval>, Error> {
        get(&self.pools.runs, tenant, id).await
    }

    /// Returns the approval that a run needed before it could start, if it needed one of its own.
    pub async fn approval_of_start(
        &self,
        tenant: &TenantId,
        run: RunId,
    ) -> Result<Option<Approval>, Error> {
        let found = select_approvals!(
            "a.run_id = $1 AND a.tenant_id || '' = $2 AND a.kind <> ALL ($3) ORDER BY a.id DESC LIMIT 1",
            run.0,
            tenant.as_str(),
            &ApprovalKind::OF_RUNNING.map(|kind| kind.as_str().to_owned()),
        );
        Ok(found.fetch_optional(&self.pools.reads).await?)
    }

    /// Lists a tenant's approvals, newest first.
    pub async fn approval_list(
        &self,
        tenant: &TenantId,
        filter: &ApprovalFilter,
        limit: i64,
    ) -> Result<Vec<Approval>, Error> {
        let before = filter.before.map_or(Uuid::max(), |id| id.0);
        let tenant = tenant.as_str();
        let session = filter.session.map(|id| id.0);
        macro_rules! page {
            ($condition:literal) => {
                select_approvals!(
                    "a.tenant_id = $1 AND a.id < $2 AND a.session_id = coalesce($3, a.session_id) "
                        + $condition,
                    tenant,
                    before,
                    session,
                    limit,
                )
                .fetch_all(&self.pools.reads)
                .await?
            };
        }
        let page = match filter.status {
            ApprovalStatus::Pending => {
                page!(
                    "AND a.state = 'pending' AND a.expires_at > now() ORDER BY a.id DESC LIMIT $4"
                )
            }
            ApprovalStatus::Granted => page!(
                "AND a.state = 'allowed' AND a.scope <> 'once' AND a.revoked_at IS NULL
                 ORDER BY a.id DESC LIMIT $4"
            ),
            ApprovalStatus::Any => page!("ORDER BY a.tenant_id DESC, a.id DESC LIMIT $4"),
        };
        Ok(page)
    }

    /// Lists a tenant's approvals that changed since a time of the database, in this order.
    pub async fn approval_changes(
        &self,
        tenant: &TenantId,
        since: OffsetDateTime,
        limit: i64,
    ) -> Result<Vec<(OffsetDateTime, Approval)>, Error> {
        let changed = sqlx::query!(
            "SELECT id, changed_at FROM approvals WHERE tenant_id = $1 AND changed_at >= $2
             ORDER BY tenant_id, changed_at LIMIT $3",
            tenant.as_str(),
            since,
            limit,
        )
        .fetch_all(&self.pools.reads)
        .await?;
        if changed.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<Uuid> = changed.iter().map(|row| row.id).collect();
        let found =
            select_approvals!("a.id = ANY ($1) AND a.tenant_id || '' = $2", &ids, tenant.as_str())
                .fetch_all(&self.pools.reads)
                .await?;
        let mut found: HashMap<Uuid, Approval> =
            found.into_iter().map(|approval| (approval.id.0, approval)).collect();
        let in_order =
            changed.into_iter().filter_map(|row| Some((row.changed_at, found.remove(&row.id)?)));
        Ok(in_order.collect())
    }

    /// The time of the database, to read changes from.
    pub async fn database_now(&self) -> Result<OffsetDateTime, Error> {
        let now =
            sqlx::query_scalar!(r#"SELECT now() AS "now!""#).fetch_one(&self.pools.reads).await?;
        Ok(now)
    }
}

/// Reads a tenant's approval, also inside a transaction.
pub(super) async fn get(
    executor: impl PgExecutor<'_>,
    tenant: &TenantId,
    id: ApprovalId,
) -> Result<Option<Approval>, Error> {
    let found = select_approvals!("a.tenant_id || '' = $1 AND a.id = $2", tenant.as_str(), id.0);
    Ok(found.fetch_optional(executor).await?)
}
