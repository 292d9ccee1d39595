//! Reading the audit.

use codelia_types::{SessionId, TenantId};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{event::AuditEvent, kind::EventKind, row::select_audit};
use crate::{Error, Store, id_time::first_id};

/// Which events to list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Of this session alone.
    pub session: Option<SessionId>,
    /// Of this kind alone.
    pub kind: Option<EventKind>,
    /// Recorded at this time or later.
    pub start: Option<OffsetDateTime>,
    /// Recorded before this time.
    pub end: Option<OffsetDateTime>,
    /// The oldest first, not the newest.
    pub oldest_first: bool,
    /// Only those that come after the one with this id in the list.
    pub after: Option<Uuid>,
}

impl AuditFilter {
    /// The ids that are listed: from the first on, and before the second. Ids begin with the time.
    fn ids(&self) -> (Uuid, Uuid) {
        let first = self.start.map_or(Uuid::nil(), first_id);
        let end = self.end.map_or(Uuid::max(), first_id);
        match (self.after, self.oldest_first) {
            (Some(after), true) => {
                (first.max(Uuid::from_u128(after.as_u128().saturating_add(1))), end)
            }
            (Some(after), false) => (first, end.min(after)),
            (None, _) => (first, end),
        }
    }
}

/// Reads events in an order of their ids.
macro_rules! list_events {
    ($store:ident, $filter:ident, $condition:literal, $limit:ident $(, $argument:expr)*) => {
        match $filter.oldest_first {
            true => list_events!($store, $filter, $condition, "ASC", $limit $(, $argument)*),
            false => list_events!($store, $filter, $condition, "DESC", $limit $(, $argument)*),
        }
    };
    ($store:ident, $filter:ident, $condition:literal, $order:literal, $limit:ident $(, $argument:expr)*) => {{
        let (first, end) = $filter.ids();
        select_audit!(
            "id >= $1 AND id < $2 AND ($3::text IS NULL OR kind = $3) AND "
                + $condition
                + " ORDER BY id "
                + $order
                + " LIMIT $4",
            first,
            end,
            $filter.kind.map(EventKind::as_str),
            $limit
            $(, $argument)*
        )
        .fetch_all(&$store.pools.reads)
        .await?
    }};
}

impl Store {
    /// Lists a tenant's events, or with `None` those that concern no tenant.
    pub async fn audit_list(
        &self,
        tenant: Option<&TenantId>,
        filter: &AuditFilter,
        limit: i64,
    ) -> Result<Vec<AuditEvent>, Error> {
        let rows = match (tenant.map(TenantId::as_str), filter.session.map(|session| session.0)) {
            (None, _) => list_events!(self, filter, "tenant_id IS NULL", limit),
            (Some(tenant), None) => list_events!(self, filter, "tenant_id = $5", limit, tenant),
            (Some(tenant), Some(session)) => {
                list_events!(
                    self,
                    filter,
                    "session_id = $6 AND tenant_id || '' = $5",
                    limit,
                    tenant,
                    session
                )
            }
        };
        rows.into_iter().map(|row| Ok(row.split()?.0)).collect()
    }
}
