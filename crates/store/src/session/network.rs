//! The lists of hosts and ports of a session, which may change while its runs are being executed.

use codelia_policy::NetworkPolicy;
use codelia_types::SessionId;
use sqlx::types::Json;

use crate::{Error, Store};

/// Changes of the network of a session since it was created.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionNetwork {
    /// The session whose runs are concerned.
    pub session: SessionId,
    /// The present network policy of the session, if it was changed.
    pub network: Option<NetworkPolicy>,
    /// The version of its tenant's policy, if the tenant ever had one.
    pub tenant_version: Option<i64>,
}

impl Store {
    /// Returns what has changed for those of the sessions for which something may have: their
    /// network policy, or the policy of their tenant. For the worker that holds them.
    pub async fn session_networks(
        &self,
        sessions: &[SessionId],
    ) -> Result<Vec<SessionNetwork>, Error> {
        let ids: Vec<_> = sessions.iter().map(|session| session.0).collect();
        let changed = sqlx::query!(
            r#"SELECT s.id, s.network AS "network: Json<NetworkPolicy>", p.version AS "version?"
               FROM sessions s
               LEFT JOIN LATERAL (
                   SELECT version FROM tenant_policies WHERE tenant_id = s.tenant_id ORDER BY version DESC LIMIT 1
               ) AS p ON true
               WHERE s.id = ANY ($1) AND (s.network IS NOT NULL OR p.version IS NOT NULL)"#,
            &ids,
        )
        .map(|row| SessionNetwork {
            session: SessionId(row.id),
            network: row.network.map(|network| network.0),
            tenant_version: row.version,
        });
        Ok(changed.fetch_all(&self.pools.runs).await?)
    }
}
