//! The table `sessions`, except for its lease columns, which `lease.rs` owns.

mod create;
mod disk;
mod end;
mod network;
mod quarantine;
mod record;
mod update;

use std::collections::BTreeMap;

use codelia_policy::NetworkPolicy;
use codelia_types::{SessionId, TenantId};
use sqlx::types::Json;
use uuid::Uuid;

use self::record::select_sessions;
use crate::{Error, Store};

pub use self::{
    create::{NewSession, SessionCreated},
    disk::{DiskReport, DiskReported, TenantDisk},
    network::SessionNetwork,
    record::{
        Session, SessionDisk, SessionEndReason, SessionQuarantine, SessionRef, SessionSpec,
        SessionState,
    },
    update::SessionChange,
};

/// Reads sessions without their policies.
macro_rules! list_sessions {
    ($store:ident, $condition:literal, $($argument:expr),* $(,)?) => {
        select_sessions!("jsonb_set(s.spec, '{policy}', '{}')", $condition, $($argument),*)
            .fetch_all(&$store.pools.reads)
            .await?
    };
}

/// Sessions that are searched for labels before the index of labels is.
const LABEL_WINDOW: i64 = 2000;

/// Which sessions to list.
#[derive(Debug, Clone, Default)]
pub struct SessionFilter {
    /// Sessions in this state.
    pub state: Option<SessionState>,
    /// Sessions that have all these labels.
    pub labels: BTreeMap<String, String>,
    /// Sessions older than this one.
    pub before: Option<SessionId>,
}

impl Store {
    /// Returns the id and spec of a tenant's session, without the cost of [`Store::session_get`].
    pub async fn session_spec(
        &self,
        tenant: &TenantId,
        session: &SessionRef,
    ) -> Result<Option<(SessionId, SessionSpec)>, Error> {
        let (id, alias) = session.columns();
        let row = sqlx::query!(
            r#"SELECT id, spec AS "spec: Json<SessionSpec>" FROM sessions
               WHERE tenant_id = $1 AND (id = $2 OR (alias = $3 AND state = 'open'))"#,
            tenant.as_str(),
            id,
            alias,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        Ok(row.map(|row| (SessionId(row.id), row.spec.0)))
    }

    /// Returns a tenant's session.
    pub async fn session_get(
        &self,
        tenant: &TenantId,
        session: &SessionRef,
    ) -> Result<Option<Session>, Error> {
        let (id, alias) = session.columns();
        let found = select_sessions!(
            "s.spec",
            "s.tenant_id = $1 AND (s.id = $2 OR (s.alias = $3 AND s.state = 'open'))",
            tenant.as_str(),
            id,
            alias,
        );
        Ok(found.fetch_optional(&self.pools.runs).await?)
    }

    /// Returns the session with this alias that ended last.
    pub async fn session_last_ended(
        &self,
        tenant: &TenantId,
        alias: &str,
    ) -> Result<Option<Session>, Error> {
        let found = select_sessions!(
            "s.spec",
            "s.tenant_id = $1 AND s.alias = $2 AND s.state = 'ended' ORDER BY s.ended_at DESC LIMIT 1",
            tenant.as_str(),
            alias,
        );
        Ok(found.fetch_optional(&self.pools.runs).await?)
    }

    /// Lists a tenant's sessions, newest first. Leaves out their policies, which may be large. Each
    /// kind of filter has a statement that reads little more than the rows of the page.
    pub async fn session_list(
        &self,
        tenant: &TenantId,
        filter: &SessionFilter,
        limit: i64,
    ) -> Result<Vec<Session>, Error> {
        let before = filter.before.map_or(Uuid::max(), |id| id.0);
        let page = match filter.state {
            _ if !filter.labels.is_empty() => {
                return self.session_list_labeled(tenant, filter, limit).await;
            }
            None => list_sessions!(
                self,
                "s.tenant_id = $1 AND s.id < $2 ORDER BY s.id DESC LIMIT $3",
                tenant.as_str(),
                before,
                limit,
            ),
            Some(SessionState::Open) => list_sessions!(
                self,
                "s.open_tenant = $1 AND s.id < $2 ORDER BY s.id DESC LIMIT $3",
                tenant.as_str(),
                before,
                limit,
            ),
            Some(SessionState::Ended) => list_sessions!(
                self,
                "s.tenant_id = $1 AND s.id < $2 AND s.state = 'ended' ORDER BY s.id DESC LIMIT $3",
                tenant.as_str(),
                before,
                limit,
            ),
        };
        Ok(page)
    }

    /// Looks for labels among the next sessions in the order of the page, which suffices if many
    /// have them, and else by the index of labels, which is fast if few have them.
    async fn session_list_labeled(
        &self,
        tenant: &TenantId,
        filter: &SessionFilter,
        limit: i64,
    ) -> Result<Vec<Session>, Error> {
        let before = filter.before.map_or(Uuid::max(), |id| id.0);
        let states: Vec<&str> = match filter.state {
            Some(state) => vec![state.as_str()],
            None => vec![SessionState::Open.as_str(), SessionState::Ended.as_str()],
        };
        let next = list_sessions!(
            self,
            "s.id = ANY (ARRAY(
                 SELECT id FROM (SELECT id, state, labels FROM sessions
                                 WHERE tenant_id = $1 AND id < $2 ORDER BY id DESC LIMIT $6) AS next
                 WHERE state = ANY ($4) AND labels @> $5 ORDER BY id DESC LIMIT $3))
             ORDER BY s.id DESC",
            tenant.as_str(),
            before,
            limit,
            &states as _,
            Json(&filter.labels) as _,
            LABEL_WINDOW,
        );
        if i64::try_from(next.len()).is_ok_and(|found| found >= limit) {
            return Ok(next);
        }
        let found = list_sessions!(
            self,
            "s.id = ANY (ARRAY(SELECT id FROM sessions
                               WHERE label_tokens(tenant_id, labels) @> label_tokens($1, $5) AND labels <> '{}'))
               -- Not by the index of tenants, which has all other sessions too.
               AND s.tenant_id || '' = $1 AND s.id < $2 AND s.state = ANY ($4)
             ORDER BY s.id DESC LIMIT $3",
            tenant.as_str(),
            before,
            limit,
            &states as _,
            Json(&filter.labels) as _,
        );
        Ok(found)
    }

    /// Records that a file call uses an open session. Returns `false` if it is not open. Writes
    /// only if no use was recorded yet, or the last one is older than a tenth of the idle time.
    pub async fn session_touch(&self, tenant: &TenantId, id: SessionId) -> Result<bool, Error> {
        let open = sqlx::query_scalar!(
            r#"WITH touched AS (
                   UPDATE sessions SET used_at = now()
                   WHERE tenant_id = $1 AND id = $2 AND state = 'open' AND expires_at > now()
                     AND (used_at IS NULL OR used_at < now() - idle_ttl / 10)
               )
               SELECT state = 'open' AND expires_at > now() AS "open!"
               FROM sessions WHERE tenant_id = $1 AND id = $2"#,
            tenant.as_str(),
            id.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        Ok(open.unwrap_or(false))
    }
}
