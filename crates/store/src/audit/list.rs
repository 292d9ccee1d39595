//! Reading the audit.

use codelia_types::{SessionId, TenantId};
use uuid::Uuid;

use super::{AuditEvent, AuditRow};
use crate::{Error, EventKind, Store};

/// Which events to list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Of this session alone.
    pub session: Option<SessionId>,
    /// Of this kind alone.
    pub kind: Option<EventKind>,
    /// Only those with smaller ids.
    pub before: Option<Uuid>,
}

/// Reads events, newest first.
macro_rules! list_events {
    ($store:ident, $condition:literal, $filter:ident, $($argument:expr),*) => {
        sqlx::query_as!(
            AuditRow,
            "SELECT writer, id, at, kind, tenant_id, session_id, run_id, key_id, worker_id, field, detail, mac
             FROM audit
             WHERE id < $1 AND ($2::text IS NULL OR kind = $2) AND " + $condition + "
             ORDER BY id DESC LIMIT $3",
            $filter.before.unwrap_or(Uuid::max()),
            $filter.kind.map(EventKind::as_str),
            $($argument),*
        )
        .fetch_all(&$store.pools.reads)
        .await?
    };
}

impl Store {
    /// Lists a tenant's events, or with `None` those that concern no tenant, newest first.
    pub async fn audit_list(
        &self,
        tenant: Option<&TenantId>,
        filter: &AuditFilter,
        limit: i64,
    ) -> Result<Vec<AuditEvent>, Error> {
        let rows = match (tenant.map(TenantId::as_str), filter.session) {
            (None, _) => list_events!(self, "tenant_id IS NULL", filter, limit),
            (Some(tenant), None) => list_events!(self, "tenant_id = $4", filter, limit, tenant),
            (Some(tenant), Some(session)) => {
                list_events!(
                    self,
                    "session_id = $5 AND tenant_id || '' = $4",
                    filter,
                    limit,
                    tenant,
                    session.0
                )
            }
        };
        rows.into_iter().map(|row| Ok(row.split()?.0)).collect()
    }
}
