//! The table `upkeep_owner`, which has one row.

use std::time::Duration;

use uuid::Uuid;

use crate::{Error, Queue, Store, row};

/// The answer to a claim.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) is_owner: bool,
    /// Until the claim of the owner ends.
    pub(super) expires_in: Duration,
    pub(super) queue_depth: i64,
    /// Since the oldest queued run was created.
    pub(super) queue_age: Duration,
    /// Whether the clock was set back since the last claim.
    pub(super) is_set_back: bool,
}

impl Store {
    /// Claims or renews the ownership for `ttl`. The owner stores what it counted.
    pub(super) async fn upkeep_claim(
        &self,
        holder: Uuid,
        ttl: Duration,
        queue: Option<Queue>,
    ) -> Result<Claim, Error> {
        let row = sqlx::query_file!(
            "src/sql/upkeep_claim.sql",
            holder,
            row::interval(ttl),
            queue.map(|queue| queue.depth),
            queue.and_then(|queue| queue.oldest_at),
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        Ok(Claim {
            is_owner: row.is_owner,
            expires_in: row::duration(&row.expires_in),
            queue_depth: row.queue_depth,
            queue_age: row::duration(&row.queue_age),
            is_set_back: row.is_set_back,
        })
    }

    pub(super) async fn upkeep_release(&self, holder: Uuid) -> Result<(), Error> {
        sqlx::query!("UPDATE upkeep_owner SET until = now() WHERE holder = $1", holder)
            .execute(&self.pools.upkeep)
            .await?;
        Ok(())
    }
}
