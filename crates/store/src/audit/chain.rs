//! The chain of checkpoints of a writer, and the events that wait for the next one.

use std::{
    collections::HashSet,
    mem,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use super::event::{AuditKeys, HASH_LEN, Hash, Hasher, micros};

/// Rows that one checkpoint covers.
const MAX_EVENTS: usize = 1000;
/// An event that is not stored by then never will be: longer than any statement takes.
const STORED_WITHIN: Duration = Duration::from_secs(120);
/// Rows that wait for a checkpoint. Further ones have a MAC alone.
const MAX_WAITING: usize = 100_000;

/// The chain of a writer.
#[derive(Debug, Default)]
pub(super) struct Chain {
    /// Events that no checkpoint covers: stored, about to be stored, or given up.
    waiting: Vec<Waiting>,
    /// A checkpoint that may or may not be stored: it is stored again as it is.
    pub(super) unsure: Option<Checkpoint>,
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
    pub(super) fn waiting(&mut self, skipped: usize) -> Vec<Uuid> {
        self.waiting.retain(|event| event.since.elapsed() < STORED_WITHIN);
        self.waiting.iter().skip(skipped).take(MAX_EVENTS).map(|event| event.id).collect()
    }

    /// Makes the next checkpoint, of the waiting events that are stored.
    pub(super) fn next(&mut self, stored: &HashSet<Uuid>, writer: Uuid, keys: &AuditKeys) {
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

    pub(super) fn stored(&mut self, checkpoint: &Checkpoint, others: Vec<Head>) {
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
