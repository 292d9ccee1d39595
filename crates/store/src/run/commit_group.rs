//! Results to commit, and the commits of several runs in one statement.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use codelia_types::{CommittedRun, EndedRun, LeaseToken, RunId, RunResult, SessionId, TenantId};
use sqlx::{postgres::types::PgInterval, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use super::record::RunRef;
use crate::{
    audit::{EventBody, EventSubject, run_end},
    error::Error,
    group::{GroupCall, Writer},
    objects::Objects,
    output::OutputChunk,
    row,
};

/// A result to commit, with the output and events that belong to it.
#[derive(Debug, Clone)]
pub struct RunCommit {
    /// The result.
    pub result: RunResult,
    /// How long ago the command started; `None` if it never did.
    pub started_ago: Option<Duration>,
    /// Output that was not appended before.
    pub tail: Vec<OutputChunk>,
    /// Events to record with the result.
    pub events: Vec<EventBody>,
    /// For how long its changes wait for a decision, if their state says so.
    pub held_for: Option<Duration>,
}

/// The columns of an ended run that only the database knows.
#[derive(Debug)]
pub(crate) struct StoredEnd {
    pub(super) attempt: i32,
    pub(super) started_at: Option<OffsetDateTime>,
    pub(super) ended_at: OffsetDateTime,
    pub(super) cancel_reason: Option<String>,
}

impl StoredEnd {
    pub(super) fn with(self, result: RunResult) -> CommittedRun {
        let Self { attempt, started_at, ended_at, cancel_reason } = self;
        CommittedRun { attempt, cancel_reason, end: EndedRun { started_at, ended_at, result } }
    }
}

/// Maximum bytes of output that a run commits together with others.
const MAX_TAIL: usize = 16 * 1024;

/// A commit that waits for its turn.
#[derive(Debug)]
pub(crate) struct CommitCall {
    id: RunId,
    session: SessionId,
    tenant: TenantId,
    lease: LeaseToken,
    commit: RunCommit,
    called_at: Instant,
}

impl CommitCall {
    pub(super) fn new(run: RunRef<'_>, lease: &LeaseToken, commit: &RunCommit) -> Self {
        Self {
            id: run.id,
            session: run.session,
            tenant: run.tenant.clone(),
            lease: lease.clone(),
            commit: commit.clone(),
            called_at: Instant::now(),
        }
    }

    /// Whether the statement for several runs can store a result.
    pub(super) fn takes(commit: &RunCommit, objects: Option<&Objects>) -> bool {
        let tail: usize = commit.tail.iter().map(|chunk| chunk.data.len()).sum();
        commit.events.is_empty()
            && commit.held_for.is_none()
            && commit.result.changes.is_none()
            && commit.result.violations.total == 0
            && tail <= MAX_TAIL
            && !objects.is_some_and(|objects| objects.takes(tail))
    }

    /// Since when its command has run, as of now.
    fn started_ago(&self) -> Option<PgInterval> {
        self.commit.started_ago.map(|ago| row::interval(ago + self.called_at.elapsed()))
    }

    fn names(&self) -> RunRef<'_> {
        RunRef { id: self.id, session: self.session, tenant: &self.tenant }
    }
}

impl GroupCall for CommitCall {
    type Answer = StoredEnd;

    fn tenant(&self) -> &TenantId {
        &self.tenant
    }

    async fn execute(writer: &Writer, calls: &[Self]) -> Result<Vec<Option<StoredEnd>>, Error> {
        let Some(first) = calls.first() else { return Ok(Vec::new()) };
        // A worker that lost its leases has a new incarnation.
        let mut together: Vec<_> =
            calls.iter().filter(|call| call.lease.incarnation == first.lease.incarnation).collect();
        together.sort_unstable_by_key(|call| call.id);
        let ids: Vec<Uuid> = together.iter().map(|call| call.id.0).collect();
        let epochs: Vec<i64> = together.iter().map(|call| call.lease.epoch.0).collect();
        let results: Vec<_> = together.iter().map(|call| Json(&call.commit.result)).collect();
        let started_ago: Vec<_> = together.iter().map(|call| call.started_ago()).collect();
        let chunks = || together.iter().flat_map(|call| &call.commit.tail);
        let chunk_runs: Vec<Uuid> =
            together.iter().flat_map(|call| call.commit.tail.iter().map(|_| call.id.0)).collect();
        let positions: Vec<i64> = chunks().map(|chunk| chunk.position).collect();
        let streams: Vec<i16> = chunks().map(|chunk| chunk.stream as i16).collect();
        let offsets: Vec<i64> = chunks().map(|chunk| chunk.offset).collect();
        let data: Vec<&[u8]> = chunks().map(|chunk| chunk.data.as_slice()).collect();
        let mut events = writer.audit.columns();
        for call in &together {
            let end = run_end(&call.commit.result.outcome, call.commit.started_ago, 0, None);
            let subject = EventSubject::of_run(call.names(), Some(&call.lease.worker));
            events.push(writer.audit.event(&subject, &end));
        }
        let rows = sqlx::query_file!(
            "src/sql/run_commit_group.sql",
            first.lease.worker.as_str(),
            first.lease.incarnation.0,
            events.writer,
            &ids,
            &epochs,
            &results as _,
            &started_ago as _,
            &events.ids,
            &events.times,
            &events.details,
            &events.macs as _,
            &chunk_runs,
            &positions,
            &streams,
            &offsets,
            &data as _,
        )
        .fetch_all(&writer.pool)
        .await?;
        let mut stored: HashMap<Uuid, StoredEnd> = HashMap::with_capacity(rows.len());
        for row in rows {
            let end = StoredEnd {
                attempt: row.attempt,
                started_at: row.started_at,
                ended_at: row.ended_at,
                cancel_reason: row.cancel_reason,
            };
            stored.insert(row.id, end);
        }
        let missing =
            together.iter().zip(&events.ids).filter(|(call, _)| !stored.contains_key(&call.id.0));
        missing.for_each(|(_, event)| writer.audit.forget(*event));
        Ok(calls.iter().map(|call| stored.remove(&call.id.0)).collect())
    }
}
