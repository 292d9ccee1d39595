//! The lists of hosts and ports of a session, which may change while its runs are being executed.

use codelia_policy::NetworkPolicy;
use codelia_types::SessionId;
use sqlx::types::Json;

use crate::{Error, Store};

impl Store {
    /// Returns the present network policy of those of the sessions whose policy was changed since they
    /// were created. For the worker that holds them.
    pub async fn session_networks(
        &self,
        sessions: &[SessionId],
    ) -> Result<Vec<(SessionId, NetworkPolicy)>, Error> {
        let ids: Vec<_> = sessions.iter().map(|session| session.0).collect();
        let rows = sqlx::query!(
            r#"SELECT id, network AS "network!: Json<NetworkPolicy>" FROM sessions
               WHERE id = ANY ($1) AND network IS NOT NULL"#,
            &ids,
        )
        .fetch_all(&self.pools.runs)
        .await?;
        Ok(rows.into_iter().map(|row| (SessionId(row.id), row.network.0)).collect())
    }
}
