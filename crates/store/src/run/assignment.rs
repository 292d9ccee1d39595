//! A worker's side of the table `live_runs`: begin, hand back, commit. Every statement checks the
//! worker's incarnation, and those that start or end a run check its lease.

use std::time::Duration;

use codelia_policy::RunSpec;
use codelia_types::{
    CommittedRun, Incarnation, LeaseEpoch, LeaseToken, LostReason, Outcome, RunId, RunResult,
    SessionId, TenantId, WorkerId,
};
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    commit_group::{CommitCall, RunCommit, StoredEnd},
    record::RunRef,
};
use crate::{
    Error, EventSubject, SealedEnv, Store,
    audit::{EventColumns, SignedEvent, run_end},
    group::Turn,
    id_time::first_id,
    row,
};

/// Queued runs of one session that a worker reads at once.
const MAX_QUEUED_PER_SESSION: i64 = 256;

/// A run that is assigned to a worker.
#[derive(Debug, Clone)]
pub struct AssignedRun {
    /// Identifies the run in every report about it.
    pub id: RunId,
    /// The session to run in.
    pub session: SessionId,
    /// The tenant that owns both.
    pub tenant: TenantId,
    /// The spec as it was admitted.
    pub spec: RunSpec,
    /// The epoch of the lease under which it is assigned.
    pub epoch: LeaseEpoch,
    /// The attempt, from 1.
    pub attempt: i32,
    /// How often [`Store::run_begin`] assigned the run; 0 if the insert did. Identifies one
    /// assignment.
    pub turn: i32,
    /// Whether a caller requested cancellation.
    pub cancel_requested: bool,
    /// From SIGTERM to SIGKILL if it is canceled; `None` takes the worker's setting.
    pub cancel_grace: Option<Duration>,
    /// The encrypted secret variables of the command.
    pub secret_env: Option<SealedEnv>,
    /// The span of the call that started it.
    pub traceparent: Option<String>,
}

/// Which of the sessions that a worker holds to read.
#[derive(Debug, Clone, Copy)]
pub enum HeldSessions<'a> {
    /// All of them.
    All,
    /// Of these sessions, the ones that it holds.
    Among(&'a [SessionId]),
}

impl AssignedRun {
    /// The names of the run and of what it belongs to.
    #[must_use]
    pub fn names(&self) -> RunRef<'_> {
        RunRef { id: self.id, session: self.session, tenant: &self.tenant }
    }
}

/// A statement that returns assigned runs: its text up to the columns, the text after them, and its
/// arguments.
macro_rules! assigned_runs {
    ($before:literal, $after:literal, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            $before + r#" r.id, r.session_id, r.tenant_id,
                r.spec || coalesce((SELECT s.settings FROM run_settings s WHERE s.hash = r.settings_hash), '{}')
                    AS "spec!: Json<RunSpec>",
                r.lease_epoch AS "lease_epoch!", r.attempt, r.turn, r.secret_env, r.traceparent,
                r.cancel_requested_at IS NOT NULL AS "cancel_requested!", r.cancel_grace "# + $after,
            $($argument),*
        )
        .try_map(|row| {
            Ok(AssignedRun {
                id: RunId(row.id),
                session: SessionId(row.session_id),
                tenant: row::parse("runs.tenant_id", &row.tenant_id)?,
                spec: row.spec.0,
                epoch: LeaseEpoch(row.lease_epoch),
                attempt: row.attempt,
                turn: row.turn,
                cancel_requested: row.cancel_requested,
                cancel_grace: row.cancel_grace.as_ref().map(row::duration),
                secret_env: row.secret_env.map(SealedEnv),
                traceparent: row.traceparent,
            })
        })
    };
}

/// Selects the first queued runs of each session in `s` that a worker holds, oldest first.
macro_rules! select_queued {
    ($sessions:literal, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            "SELECT r.id, r.session_id, r.tenant_id FROM " + $sessions + " CROSS JOIN LATERAL (
                 SELECT r.id, r.session_id, r.tenant_id, r.created_at FROM live_runs r
                 WHERE (r.session_id, r.state, r.id) > (s.id, 'queued', '00000000-0000-0000-0000-000000000000')
                   AND (r.session_id, r.state, r.id) < (s.id, 'queued', 'ffffffff-ffff-ffff-ffff-ffffffffffff')
                 ORDER BY r.session_id, r.state, r.id LIMIT $4
             ) AS r
             WHERE s.lease_worker = $1 AND s.lease_incarnation = $2 AND s.state = 'open'
             ORDER BY r.created_at LIMIT $3",
            $($argument),*
        )
        .try_map(|row| {
            let tenant = row::parse("runs.tenant_id", &row.tenant_id)?;
            Ok((RunId(row.id), SessionId(row.session_id), tenant))
        })
    };
}

impl Store {
    /// Assigns a queued run to the holder of its session's lease. Returns `None` if the run is no
    /// longer queued or the caller does not hold the lease.
    pub async fn run_begin(
        &self,
        id: RunId,
        lease: &LeaseToken,
    ) -> Result<Option<AssignedRun>, Error> {
        let begun = assigned_runs!(
            "UPDATE live_runs r SET state = 'running', worker_id = $2, incarnation = $3, lease_epoch = $4, turn = r.turn + 1
             FROM sessions s, workers w
             WHERE r.id = $1 AND r.state = 'queued'
               AND s.id = r.session_id AND s.ended_at IS NULL AND s.quarantined_at IS NULL
               -- Not by the index of holders, which has all sessions of the worker.
               AND s.lease_worker || '' = $2 AND s.lease_incarnation = $3 AND s.lease_epoch = $4
               AND w.id = $2 AND w.incarnation = $3 AND w.lease_until > now()
             RETURNING",
            "",
            id.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
        );
        Ok(begun.fetch_optional(&self.pools.runs).await?)
    }

    /// Hands back a run that is assigned to this worker and that it has not started. The run is
    /// queued again, or canceled if its session has ended. Returns `false` if the run is not
    /// assigned to the worker in this `turn`: the database may execute a statement late, after the
    /// caller gave up on it and the run was assigned again.
    pub async fn run_hand_back(
        &self,
        run: RunRef<'_>,
        turn: i32,
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<bool, Error> {
        let SignedEvent { event, mac } = self.audit.run_end(run, None, &Outcome::Canceled);
        let found = sqlx::query_file!(
            "src/sql/run_hand_back.sql",
            run.id.0,
            worker.as_str(),
            incarnation.0,
            turn,
            event.writer,
            event.id,
            event.at,
            event.detail,
            mac,
        )
        .fetch_one(&self.pools.runs)
        .await?;
        if found.canceled == 0 {
            self.audit.forget(event.id);
        }
        Ok(found.queued + found.canceled > 0)
    }

    /// Ends a run with its result. Repeating the call under the same lease changes nothing.
    ///
    /// # Errors
    /// [`Error::Fenced`] if the lease expired, another worker holds it, or the run is not assigned
    /// under it. The caller must drop the result.
    pub async fn run_commit(
        &self,
        run: RunRef<'_>,
        lease: &LeaseToken,
        commit: &RunCommit,
    ) -> Result<CommittedRun, Error> {
        let mut turn = Turn::Own;
        if CommitCall::takes(commit, self.objects.as_deref()) {
            let call = || CommitCall::new(run, lease, commit);
            turn = self.commits.turn(|| self.group_writer(), call).await?;
        }
        match turn {
            Turn::Answered(stored) => Ok(stored.with(commit.result.clone())),
            Turn::Alone(_) | Turn::Own => self.run_commit_alone(run, lease, commit).await,
        }
    }

    async fn run_commit_alone(
        &self,
        run: RunRef<'_>,
        lease: &LeaseToken,
        commit: &RunCommit,
    ) -> Result<CommittedRun, Error> {
        let RunCommit { result, started_ago, tail, held_for, .. } = commit;
        let output = self.output_columns(run.id, lease, tail).await?;
        let audited = self.audit_events(run, lease, commit);
        let committed = sqlx::query_file_as!(
            StoredEnd,
            "src/sql/run_commit.sql",
            run.id.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
            Json(result) as _,
            started_ago.map(row::interval) as _,
            held_for.map(row::interval) as _,
            Json(&output.chunks) as _,
            &output.data as _,
            output.object.as_deref() as _,
            audited.writer,
            &audited.ids,
            &audited.times,
            &audited.kinds as _,
            &audited.fields as _,
            &audited.details,
            &audited.macs as _,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        let stored = match committed {
            Some(stored) => stored,
            None => self.run_committed_before(run.id, lease).await?.ok_or(Error::Fenced)?,
        };
        Ok(stored.with(result.clone()))
    }

    /// The events of a commit: those of the worker, and the end of the run.
    fn audit_events(
        &self,
        run: RunRef<'_>,
        lease: &LeaseToken,
        commit: &RunCommit,
    ) -> EventColumns {
        let RunResult { outcome, violations, changes, .. } = &commit.result;
        let end = run_end(outcome, commit.started_ago, violations.total, changes.as_ref());
        let subject = EventSubject::of_run(run, Some(&lease.worker));
        self.audit.events(&subject, commit.events.iter().chain([&end]))
    }

    /// A repeated commit, whose first answer was lost, succeeds if it was made under the same
    /// lease.
    async fn run_committed_before(
        &self,
        id: RunId,
        lease: &LeaseToken,
    ) -> Result<Option<StoredEnd>, Error> {
        let stored = sqlx::query_as!(
            StoredEnd,
            r#"SELECT attempt, started_at, ended_at AS "ended_at!", cancel_reason FROM ended_runs
               WHERE id = $1
                 AND (result #>> '{outcome,kind}' <> 'lost' OR result #>> '{outcome,detail}' = 'drain_deadline')
                 AND worker_id = $2 AND incarnation = $3 AND lease_epoch = $4"#,
            id.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        Ok(stored)
    }

    /// Ends a run as lost because its result cannot be stored. Returns `false` if the run is no
    /// longer assigned under this lease.
    pub async fn run_abandon(&self, run: RunRef<'_>, lease: &LeaseToken) -> Result<bool, Error> {
        let outcome = Outcome::Lost(LostReason::ResultRejected);
        let SignedEvent { event, mac } = self.audit.run_end(run, Some(&lease.worker), &outcome);
        let ended = sqlx::query_file_scalar!(
            "src/sql/run_abandon.sql",
            run.id.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
            event.writer,
            event.id,
            event.at,
            event.detail,
            mac,
        )
        .fetch_one(&self.pools.runs)
        .await?;
        Ok(ended > 0)
    }

    /// Queues a run again whose command the worker ended, if its caller allowed another attempt.
    /// Returns `false` if it did not, or the run is not assigned under this lease.
    pub async fn run_retry(&self, id: RunId, lease: &LeaseToken) -> Result<bool, Error> {
        let retried = sqlx::query_scalar!(
            r#"SELECT retry_run($1, $2, $3, $4) AS "retried!""#,
            id.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
        )
        .fetch_one(&self.pools.runs)
        .await?;
        Ok(retried)
    }

    /// Lists the runs that are assigned to this incarnation, including those whose push was lost.
    pub async fn run_list_assigned(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<Vec<AssignedRun>, Error> {
        let assigned = assigned_runs!(
            "SELECT",
            "FROM live_runs r WHERE r.worker_id = $1 AND r.incarnation = $2",
            worker.as_str(),
            incarnation.0,
        );
        Ok(assigned.fetch_all(&self.pools.runs).await?)
    }

    /// As [`Store::run_list_assigned`], but only runs that were made since a time, and those of the
    /// `known` ones that are still assigned. An old snapshot keeps the entries of ended runs in the
    /// index: this does not read them again and again.
    pub async fn run_list_assigned_since(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        since: OffsetDateTime,
        known: &[RunId],
    ) -> Result<Vec<AssignedRun>, Error> {
        let known: Vec<Uuid> = known.iter().map(|id| id.0).collect();
        let assigned = assigned_runs!(
            "SELECT",
            "FROM live_runs r
             WHERE r.id = ANY (ARRAY(SELECT id FROM live_runs WHERE worker_id = $1 AND incarnation = $2 AND id >= $3
                                     UNION SELECT unnest($4::uuid[])))
               AND r.worker_id || '' = $1 AND r.incarnation = $2",
            worker.as_str(),
            incarnation.0,
            first_id(since),
            &known,
        );
        Ok(assigned.fetch_all(&self.pools.runs).await?)
    }

    /// Lists queued runs of sessions that this incarnation holds, oldest first: the first ones of
    /// each session, so that a long queue of one neither costs much nor hides the others.
    pub async fn run_list_queued(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        sessions: HeldSessions<'_>,
        limit: i64,
    ) -> Result<Vec<(RunId, SessionId, TenantId)>, Error> {
        let worker = worker.as_str();
        let incarnation = incarnation.0;
        let mut tx = self.pools.runs.begin_in_order().await?;
        let queued = match sessions {
            HeldSessions::All => {
                select_queued!("sessions s", worker, incarnation, limit, MAX_QUEUED_PER_SESSION)
                    .fetch_all(&mut *tx)
                    .await?
            }
            HeldSessions::Among(sessions) => {
                let sessions: Vec<Uuid> = sessions.iter().map(|id| id.0).collect();
                select_queued!(
                    // The limit keeps the planner from the index of holders, which has all their
                    // sessions.
                    "unnest($5::uuid[]) AS named CROSS JOIN LATERAL (SELECT * FROM sessions WHERE id = named LIMIT 1) AS s",
                    worker,
                    incarnation,
                    limit,
                    MAX_QUEUED_PER_SESSION,
                    &sessions,
                )
                .fetch_all(&mut *tx)
                .await?
            }
        };
        tx.commit().await?;
        Ok(queued)
    }
}
