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
        let row = sqlx::query!(
            r#"WITH former AS (
                   SELECT until FROM upkeep_owner
               ),
               claimed AS (
                   UPDATE upkeep_owner SET holder = $1, until = now() + $2, queue_depth = coalesce($3, queue_depth),
                       queue_oldest_at = CASE WHEN $3::bigint IS NULL THEN queue_oldest_at ELSE $4 END,
                       -- See root_is_gone.
                       watching_since = CASE WHEN until <= now() - interval '30 seconds' OR watching_since > now()
                                             THEN now() ELSE watching_since END
                   -- No claim lasts longer than $2: one that seems to is from before the clock was set back.
                   WHERE holder = $1 OR until <= now() OR until > now() + 2 * $2::interval
                   RETURNING until, queue_depth, queue_oldest_at
               )
               SELECT claimed.until IS NOT NULL AS "is_owner!",
                      (SELECT until > now() + 2 * $2::interval FROM former) AS "is_set_back!",
                      coalesce(claimed.queue_depth, o.queue_depth) AS "queue_depth!",
                      coalesce(greatest(now() - CASE WHEN claimed.until IS NULL THEN o.queue_oldest_at
                                                     ELSE claimed.queue_oldest_at END, interval '0'),
                               interval '0') AS "queue_age!",
                      greatest(coalesce(claimed.until, o.until) - now(), interval '0') AS "expires_in!"
               FROM upkeep_owner o LEFT JOIN claimed ON true"#,
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
