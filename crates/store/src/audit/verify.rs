//! Checks that the audit is as its writers left it.

use std::collections::{BTreeMap, HashMap};

use serde_json::Value;
use uuid::Uuid;

use super::{
    chain::{Checkpoint, Head},
    event::{AuditKeys, Hash},
    kind::EventKind,
    row::{AuditRow, select_audit},
};
use crate::{Error, Store};

/// Problems that a report lists; all are counted.
const MAX_PROBLEMS: usize = 100;
/// Rows and checkpoints that are read at once.
const PAGE: i64 = 1000;
/// Checkpoints that are read at once. Each may name as many rows as a page has.
const CHECKPOINT_PAGE: i64 = 50;

/// A way in which the audit is not as its writers left it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuditProblem {
    /// The content of an event does not fit its MAC: it was changed, or written by somebody else.
    #[error("event {id} of writer {writer} was changed or forged")]
    EventChanged {
        /// The process that the event names.
        writer: Uuid,
        /// The event.
        id: Uuid,
    },
    /// A checkpoint names an event that does not exist.
    #[error("event {id} of writer {writer} was removed")]
    EventRemoved {
        /// The process that the event named.
        writer: Uuid,
        /// The event.
        id: Uuid,
    },
    /// An event has no MAC, though the installation had a key when it was written.
    #[error("event {id} of writer {writer} is not signed")]
    EventUnsigned {
        /// The process that the event names.
        writer: Uuid,
        /// The event.
        id: Uuid,
    },
    /// A checkpoint does not fit its signature, or its events do not fit it.
    #[error("checkpoint {number} of writer {writer} was changed, or signed with another key")]
    CheckpointChanged {
        /// The process whose chain has it.
        writer: Uuid,
        /// The place in the chain, from 1.
        number: i64,
    },
    /// Checkpoints are missing before this one, or the one before is another.
    #[error("checkpoints before {number} of writer {writer} were removed or exchanged")]
    ChainBroken {
        /// Their writer.
        writer: Uuid,
        /// The number of the checkpoint after the gap.
        number: i64,
    },
    /// Another writer saw this checkpoint, and it is missing with all later ones.
    #[error("checkpoint {number} of writer {writer} and all later ones were removed")]
    ChainTruncated {
        /// The process whose chain had it.
        writer: Uuid,
        /// The place in the chain, from 1.
        number: i64,
    },
}

/// The result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditReport {
    /// Processes that wrote events.
    pub writers: u64,
    /// Checkpoints that were checked.
    pub checkpoints: u64,
    /// Events that were checked.
    pub events: u64,
    /// Of these, those that no checkpoint names: of the last second, or of a process that was
    /// killed. They cannot be changed unseen, but removed.
    pub unlisted: u64,
    /// Events without a MAC, from before the installation had a key.
    pub unsigned: u64,
    /// How many problems there are.
    pub problem_count: u64,
    /// The first of them.
    pub problems: Vec<AuditProblem>,
}

impl AuditReport {
    fn add(&mut self, problem: AuditProblem) {
        self.problem_count += 1;
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(problem);
        }
    }
}

/// Chains of checkpoints by writer.
#[derive(Default)]
struct Heads {
    /// The last checkpoint of each writer that exists.
    last: HashMap<Uuid, i64>,
    /// The last one of each writer that somebody saw.
    seen: BTreeMap<Uuid, i64>,
    /// The last one of each writer that was deleted because it was old.
    expired: HashMap<Uuid, i64>,
}

/// A check of the whole audit.
struct Check<'a, F> {
    store: &'a Store,
    keys: &'a AuditKeys,
    /// The first event that a checkpoint names: later ones must be signed.
    first_signed: Option<Uuid>,
    heads: Heads,
    report: AuditReport,
    progress: F,
}

impl Store {
    /// Checks every event and checkpoint. Reads them in pages, and reports after each. Returns
    /// `None` if this process has no key.
    pub async fn audit_verify(
        &self,
        progress: impl Fn(&AuditReport) + Send,
    ) -> Result<Option<AuditReport>, Error> {
        let Some(keys) = &self.audit.keys else { return Ok(None) };
        let mut check = Check {
            store: self,
            keys,
            first_signed: self.first_signed().await?,
            heads: Heads { expired: self.expired_heads(keys).await?, ..Heads::default() },
            report: AuditReport::default(),
            progress,
        };
        let mut after = None;
        while let Some(writer) = self.next_writer(after).await? {
            check.report.writers += 1;
            let listed = check.checkpoints(writer).await?;
            check.unlisted(writer, listed).await?;
            (check.progress)(&check.report);
            after = Some(writer);
        }
        let Check { heads, mut report, .. } = check;
        for (writer, number) in heads.seen {
            let known =
                heads.last.get(&writer).max(heads.expired.get(&writer)).copied().unwrap_or(0);
            if known < number {
                report.add(AuditProblem::ChainTruncated { writer, number: known + 1 });
            }
        }
        Ok(Some(report))
    }

    async fn checkpoints_after(&self, writer: Uuid, number: i64) -> Result<Vec<Checkpoint>, Error> {
        let page = sqlx::query_as!(
            Checkpoint,
            "SELECT writer, number, at, entries AS events, others, previous, hash, signature FROM audit_checkpoints
             WHERE writer = $1 AND number > $2 ORDER BY number LIMIT $3",
            writer,
            number,
            CHECKPOINT_PAGE,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        Ok(page)
    }

    /// The writer after this one, in the order of their ids.
    async fn next_writer(&self, after: Option<Uuid>) -> Result<Option<Uuid>, Error> {
        let next = sqlx::query_scalar!(
            r#"SELECT writer AS "writer!" FROM (
                   (SELECT writer FROM audit WHERE $1::uuid IS NULL OR writer > $1 ORDER BY writer LIMIT 1)
                   UNION ALL
                   (SELECT writer FROM audit_checkpoints WHERE $1 IS NULL OR writer > $1 ORDER BY writer LIMIT 1)
               ) AS next ORDER BY writer LIMIT 1"#,
            after,
        )
        .fetch_optional(&self.pools.upkeep)
        .await?;
        Ok(next)
    }

    /// The first event that a checkpoint names: later ones must be signed.
    async fn first_signed(&self) -> Result<Option<Uuid>, Error> {
        let first =
            sqlx::query_scalar!("SELECT entries[1] FROM audit_checkpoints ORDER BY at LIMIT 1")
                .fetch_optional(&self.pools.upkeep)
                .await?;
        Ok(first.flatten())
    }

    /// The last checkpoints of writers that were deleted because they were old, as signed events
    /// say.
    async fn expired_heads(&self, keys: &AuditKeys) -> Result<HashMap<Uuid, i64>, Error> {
        let rows =
            select_audit!("tenant_id IS NULL AND kind = $1", EventKind::AuditExpired.as_str(),)
                .fetch_all(&self.pools.upkeep)
                .await?;
        let mut heads = HashMap::new();
        for row in rows {
            let (event, mac) = row.split()?;
            if !mac.is_some_and(|mac| keys.is_mac(&event.content(), &mac)) {
                continue;
            }
            let detail: Value = serde_json::from_str(&event.detail).unwrap_or_default();
            let named =
                serde_json::from_value::<Vec<Head>>(detail["heads"].clone()).unwrap_or_default();
            for Head { writer, number } in named {
                let head = heads.entry(writer).or_default();
                *head = number.max(*head);
            }
        }
        Ok(heads)
    }
}

impl<F: Fn(&AuditReport) + Send> Check<'_, F> {
    /// Checks the checkpoints of a writer and the events that they name. Returns how many of those
    /// exist.
    async fn checkpoints(&mut self, writer: Uuid) -> Result<u64, Error> {
        let mut listed = 0;
        let expired = self.heads.expired.get(&writer).copied().unwrap_or(0);
        let mut last: Option<(i64, Vec<u8>)> = None;
        loop {
            let after = last.as_ref().map_or(0, |(number, _)| *number);
            let page = self.store.checkpoints_after(writer, after).await?;
            if page.is_empty() {
                break;
            }
            for checkpoint in page {
                self.report.checkpoints += 1;
                let number = checkpoint.number;
                let follows = match &last {
                    Some((before, hash)) => number == before + 1 && checkpoint.previous == *hash,
                    None => number == expired + 1,
                };
                if !follows {
                    self.report.add(AuditProblem::ChainBroken { writer, number });
                }
                listed += self.checkpoint(&checkpoint).await?;
                for Head { writer, number } in
                    serde_json::from_str::<Vec<Head>>(&checkpoint.others).unwrap_or_default()
                {
                    let seen = self.heads.seen.entry(writer).or_default();
                    *seen = number.max(*seen);
                }
                last = Some((number, checkpoint.hash));
            }
            (self.progress)(&self.report);
        }
        self.heads.last.extend(last.map(|(number, _)| (writer, number)));
        Ok(listed)
    }

    /// Checks a checkpoint and its events. Returns how many of them exist.
    async fn checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<u64, Error> {
        let Checkpoint { writer, number, .. } = *checkpoint;
        let rows = select_audit!("writer = $1 AND id = ANY ($2)", writer, &checkpoint.events,)
            .fetch_all(&self.store.pools.upkeep)
            .await?;
        let found = rows.len() as u64;
        let contents: HashMap<Uuid, Option<Hash>> = rows
            .into_iter()
            .map(|row| (row.id, verify_row(self.keys, row, &mut self.report)))
            .collect();
        let mut in_order = Vec::with_capacity(checkpoint.events.len());
        for id in &checkpoint.events {
            match contents.get(id) {
                Some(content) => in_order.extend(content),
                None => self.report.add(AuditProblem::EventRemoved { writer, id: *id }),
            }
        }
        let is_signed = self.keys.is_signature(&checkpoint.hash, &checkpoint.signature);
        // With an event removed or changed, the hash cannot fit; that problem is reported already.
        let is_complete = in_order.len() == checkpoint.events.len();
        let fits = checkpoint.covered(in_order.iter())[..] == checkpoint.hash;
        if !is_signed || (is_complete && !fits) {
            self.report.add(AuditProblem::CheckpointChanged { writer, number });
        }
        Ok(found)
    }

    /// Checks the events of a writer that no checkpoint names.
    async fn unlisted(&mut self, writer: Uuid, listed: u64) -> Result<(), Error> {
        let all = sqlx::query_scalar!(
            r#"SELECT count(*) AS "all!" FROM audit WHERE writer = $1"#,
            writer
        )
        .fetch_one(&self.store.pools.upkeep)
        .await?;
        if all.unsigned_abs() <= listed {
            return Ok(());
        }
        let mut after = Uuid::nil();
        loop {
            let rows = select_audit!(
            "writer = $1 AND id > $2
                   AND NOT EXISTS (SELECT 1 FROM audit_checkpoints c
                                   WHERE c.writer = $1 AND c.at BETWEEN a.at - interval '1 hour' AND a.at + interval '1 day'
                                     AND a.id = ANY (c.entries))
                 ORDER BY id LIMIT $3",
                writer,
                after,
                PAGE,
            )
            .fetch_all(&self.store.pools.upkeep)
            .await?;
            let Some(last) = rows.last() else { return Ok(()) };
            after = last.id;
            for row in rows {
                match (&row.mac, self.first_signed) {
                    (None, Some(first)) if row.id > first => {
                        self.report.add(AuditProblem::EventUnsigned { writer, id: row.id });
                    }
                    (None, _) => self.report.unsigned += 1,
                    (Some(_), _) => {
                        self.report.unlisted += 1;
                        verify_row(self.keys, row, &mut self.report);
                    }
                }
            }
        }
    }
}

/// Checks the MAC of an event, and returns the hash of its content if it fits.
fn verify_row(keys: &AuditKeys, row: AuditRow, report: &mut AuditReport) -> Option<Hash> {
    report.events += 1;
    let writer = row.writer;
    let id = row.id;
    let content = match row.split() {
        Ok((event, mac)) => {
            let content = event.content();
            mac.is_some_and(|mac| keys.is_mac(&content, &mac)).then_some(content)
        }
        Err(_) => None,
    };
    if content.is_none() {
        report.add(AuditProblem::EventChanged { writer, id });
    }
    content
}
