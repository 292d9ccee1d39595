//! The table `alerts`: what a webhook is to be told of. A trigger on `audit` queues them.

use std::time::Duration;

use serde_json::Value;
use sqlx::types::Json;
use uuid::Uuid;

use crate::{Error, Store, row};

/// An alert that is to be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Alert {
    /// The id of its event.
    pub id: Uuid,
    /// The event as the webhook gets it.
    pub body: Value,
    /// How often it was taken, this time included.
    pub attempts: i32,
}

impl Store {
    /// Takes alerts that are due. Nobody else takes them for `delay`, which doubles with each
    /// attempt.
    pub async fn alert_take_any_tenant(
        &self,
        limit: i64,
        delay: Duration,
    ) -> Result<Vec<Alert>, Error> {
        let due = sqlx::query!(
            r#"UPDATE alerts SET attempts = attempts + 1, next_at = now() + $2::interval * power(2, least(attempts, 10))
               WHERE id IN (SELECT id FROM alerts WHERE next_at <= now() ORDER BY next_at LIMIT $1 FOR UPDATE SKIP LOCKED)
               RETURNING id, body AS "body: Json<Value>", attempts"#,
            limit,
            row::interval(delay) as _,
        )
        .map(|row| Alert { id: row.id, body: row.body.0, attempts: row.attempts });
        Ok(due.fetch_all(&self.pools.upkeep).await?)
    }

    /// Removes an alert that was sent or given up.
    pub async fn alert_remove_any_tenant(&self, id: Uuid) -> Result<(), Error> {
        sqlx::query!("DELETE FROM alerts WHERE id = $1", id).execute(&self.pools.upkeep).await?;
        Ok(())
    }
}
