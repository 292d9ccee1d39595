//! Changing an open session.

use std::{collections::BTreeMap, time::Duration};

use codelia_policy::NetworkPolicy;
use codelia_types::{SessionId, TenantId};
use sqlx::types::Json;

use super::record::{Session, SessionRef};
use crate::{Error, Store, error::is_unique_violation, row};

/// A change of a session. `None` keeps the current value.
#[derive(Debug, Clone, Default)]
pub struct SessionChange {
    /// The alias; `Some(None)` removes it.
    pub alias: Option<Option<String>>,
    /// All labels.
    pub labels: Option<BTreeMap<String, String>>,
    /// Time from now until it expires.
    pub ttl: Option<Duration>,
    /// How long it may be idle; `Some(None)` is without limit.
    pub idle_ttl: Option<Option<Duration>>,
    /// The network policy, for the runs that are being executed, too.
    pub network: Option<NetworkPolicy>,
}

/// The error of a statement that sets an alias.
pub(super) fn alias_error(error: sqlx::Error) -> Error {
    if is_unique_violation(&error, "sessions_by_alias") {
        return Error::AlreadyExists { what: "session alias" };
    }
    error.into()
}

impl Store {
    /// Changes an open session. Returns `None` if the tenant has no such open session.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] if another open session has the alias.
    pub async fn session_update(
        &self,
        tenant: &TenantId,
        session: &SessionRef,
        change: &SessionChange,
    ) -> Result<Option<Session>, Error> {
        let (id, alias) = session.columns();
        let updated = sqlx::query_scalar!(
            "UPDATE sessions SET
                 alias = CASE WHEN $4 THEN $5 ELSE alias END,
                 labels = coalesce($6, labels),
                 expires_at = coalesce(now() + $7::interval, expires_at),
                 idle_ttl = CASE WHEN $8 THEN $9 ELSE idle_ttl END,
                 network = coalesce($10, network),
                 check_at = now()
             WHERE tenant_id = $1 AND (id = $2 OR alias = $3) AND state = 'open' AND expires_at > now()
             RETURNING id",
            tenant.as_str(),
            id,
            alias,
            change.alias.is_some(),
            change.alias.clone().flatten(),
            change.labels.as_ref().map(Json) as _,
            change.ttl.map(row::interval) as _,
            change.idle_ttl.is_some(),
            change.idle_ttl.flatten().map(row::interval) as _,
            change.network.as_ref().map(Json) as _,
        )
        .fetch_optional(&self.pools.runs)
        .await;
        match updated {
            Ok(Some(id)) => self.session_get(tenant, &SessionRef::Id(SessionId(id))).await,
            Ok(None) => Ok(None),
            Err(error) => Err(alias_error(error)),
        }
    }
}
