//! Checkpoints: signed lists of the rows that a writer stored, each chained to the one before.

use std::{
    collections::HashSet,
    mem,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use tokio::time::sleep;
use uuid::Uuid;

use super::{
    AuditLog,
    event::{AuditKeys, HASH_LEN, Hash, Hasher, micros},
};
use crate::{Error, Store};

/// Time between two checkpoints of a writer that stored something.
const INTERVAL: Duration = Duration::from_secs(1);
/// Rows that one checkpoint covers.
const MAX_EVENTS: usize = 1000;
/// An event that is not stored by then never will be: longer than any statement takes.
const STORED_WITHIN: Duration = Duration::from_secs(120);
/// Rows that wait for a checkpoint. Further ones have a MAC alone.
const MAX_WAITING: usize = 100_000;
/// Other writers that one checkpoint names.
const MAX_OTHERS: i64 = 100;

/// The chain of a writer.
#[derive(Debug, Default)]
pub(super) struct Chain {
    /// Events that no checkpoint covers: stored, about to be stored, or given up.
    waiting: Vec<Waiting>,
    /// A checkpoint that may or may not be stored: it is stored again as it is.
    unsure: Option<Checkpoint>,
    number: i64,
    previous: Hash,
    others: Vec<Head>,
}

/// An event that waits for a checkpoint.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    id: Uuid,
    content: Hash,
    since: Instant,
}

impl Chain {
    pub(super) fn add(&mut self, id: Uuid, content: Hash) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push(Waiting { id, content, since: Instant::now() });
        }
    }

    /// The event will not be stored. It is one of the last that were added.
    pub(super) fn forget(&mut self, id: Uuid) {
        if let Some(place) = self.waiting.iter().rposition(|event| event.id == id) {
            self.waiting.remove(place);
        }
    }

    /// Events that wait for a checkpoint, after the first `skipped`. Forgets those that were not
    /// stored.
    fn waiting(&mut self, skipped: usize) -> Vec<Uuid> {
        self.waiting.retain(|event| event.since.elapsed() < STORED_WITHIN);
        self.waiting.iter().skip(skipped).take(MAX_EVENTS).map(|event| event.id).collect()
    }

    /// Makes the next checkpoint, of the waiting events that are stored.
    fn next(&mut self, stored: &HashSet<Uuid>, writer: Uuid, keys: &AuditKeys) {
        let (events, waiting): (Vec<_>, Vec<_>) =
            mem::take(&mut self.waiting).into_iter().partition(|event| stored.contains(&event.id));
        self.waiting = waiting;
        if events.is_empty() {
            return;
        }
        let now = OffsetDateTime::now_utc();
        let mut checkpoint = Checkpoint {
            writer,
            number: self.number + 1,
            at: now.replace_nanosecond(now.microsecond() * 1000).unwrap_or(now),
            events: events.iter().map(|event| event.id).collect(),
            others: serde_json::json!(mem::take(&mut self.others)).to_string(),
            previous: self.previous.to_vec(),
            hash: Vec::new(),
            signature: Vec::new(),
        };
        let hash = checkpoint.covered(events.iter().map(|event| &event.content));
        checkpoint.signature = keys.sign(&hash);
        checkpoint.hash = hash.to_vec();
        self.unsure = Some(checkpoint);
    }

    fn stored(&mut self, checkpoint: &Checkpoint, others: Vec<Head>) {
        self.unsure = None;
        self.number = checkpoint.number;
        self.previous = to_hash(&checkpoint.hash);
        self.others = others;
    }
}

fn to_hash(bytes: &[u8]) -> Hash {
    bytes.try_into().unwrap_or([0; HASH_LEN])
}

/// The last checkpoint of a writer, as another one saw it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) writer: Uuid,
    pub(super) number: i64,
}

/// A row of `audit_checkpoints`.
#[derive(Debug, Clone)]
pub(super) struct Checkpoint {
    pub(super) writer: Uuid,
    pub(super) number: i64,
    pub(super) at: OffsetDateTime,
    pub(super) events: Vec<Uuid>,
    pub(super) others: String,
    pub(super) previous: Vec<u8>,
    pub(super) hash: Vec<u8>,
    pub(super) signature: Vec<u8>,
}

impl Checkpoint {
    /// The hash of a checkpoint whose rows have this content.
    pub(super) fn covered<'a>(&self, contents: impl Iterator<Item = &'a Hash>) -> Hash {
        let mut hash = Hasher::new("codelia audit checkpoint 1");
        hash.bytes(self.writer.as_bytes());
        hash.bytes(&self.number.to_be_bytes());
        hash.bytes(&micros(self.at).to_be_bytes());
        hash.bytes(&self.previous);
        hash.bytes(self.others.as_bytes());
        for (id, content) in self.events.iter().zip(contents) {
            hash.bytes(id.as_bytes());
            hash.bytes(content);
        }
        hash.finish()
    }
}

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
        let rows = sqlx::query!(
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
        Ok(rows.into_iter().map(|row| Head { writer: row.writer, number: row.number }).collect())
    }
}
