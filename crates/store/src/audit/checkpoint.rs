//! Checkpoints: signed lists of the rows that a writer stored, each chained to the one before.

use std::{collections::HashSet, time::Duration};

use tokio::time::sleep;
use uuid::Uuid;

use super::{
    chain::{Checkpoint, Head},
    log::AuditLog,
};
use crate::{Error, Store};

/// Time between two checkpoints of a writer that stored something.
const INTERVAL: Duration = Duration::from_secs(1);
/// Other writers that one checkpoint names.
const MAX_OTHERS: i64 = 100;

impl Store {
    /// Writes checkpoints of this process's part of the audit until it is dropped.
    pub async fn audit_checkpoints_run(&self) {
        loop {
            sleep(INTERVAL).await;
            if let Err(error) = self.audit_checkpoint().await {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "audit checkpoint failed, retrying"
                );
            }
        }
    }

    /// Covers everything that this process has stored in the audit by checkpoints.
    pub async fn audit_checkpoint(&self) -> Result<(), Error> {
        let AuditLog { writer, keys: Some(keys), .. } = &*self.audit else { return Ok(()) };
        let _one_at_a_time = self.audit.checkpoint.lock().await;
        // Events that are not stored yet, or never will be, do not keep later ones from their
        // checkpoint.
        let mut skipped = 0;
        loop {
            let unsure = self.audit.chain().unsure.clone();
            if let Some(checkpoint) = unsure {
                let others = self.checkpoint_insert(&checkpoint).await?;
                self.audit.chain().stored(&checkpoint, others);
            }
            let waiting = self.audit.chain().waiting(skipped);
            if waiting.is_empty() {
                return Ok(());
            }
            let stored = self.audit_stored(*writer, &waiting).await?;
            self.audit.chain().next(&stored, *writer, keys);
            skipped += waiting.len() - stored.len();
        }
    }

    /// Which of these events are stored.
    async fn audit_stored(&self, writer: Uuid, events: &[Uuid]) -> Result<HashSet<Uuid>, Error> {
        if events.is_empty() {
            return Ok(HashSet::new());
        }
        let stored = sqlx::query_scalar!(
            "SELECT id FROM audit WHERE writer = $1 AND id = ANY ($2)",
            writer,
            events
        )
        .fetch_all(&self.pools.runs)
        .await?;
        Ok(stored.into_iter().collect())
    }

    /// Stores a checkpoint and returns the last ones of writers that were active recently.
    async fn checkpoint_insert(&self, checkpoint: &Checkpoint) -> Result<Vec<Head>, Error> {
        let heads = sqlx::query_as!(
            Head,
            r#"WITH stored AS (
                   INSERT INTO audit_checkpoints (writer, number, at, entries, others, previous, hash, signature)
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
                   ON CONFLICT (writer, number) DO NOTHING
               )
               SELECT writer AS "writer!", max(number) AS "number!" FROM (
                   SELECT writer, number FROM audit_checkpoints
                   WHERE at > now() - interval '1 minute' AND writer <> $1 ORDER BY at DESC LIMIT $9
               ) AS recent GROUP BY writer"#,
            checkpoint.writer,
            checkpoint.number,
            checkpoint.at,
            &checkpoint.events,
            checkpoint.others,
            &checkpoint.previous,
            &checkpoint.hash,
            &checkpoint.signature,
            MAX_OTHERS,
        )
        .fetch_all(&self.pools.runs)
        .await?;
        Ok(heads)
    }
}
