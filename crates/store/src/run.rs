//! The table `runs`: every run reaches exactly one outcome.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use codelia_policy::RunSpec;
use codelia_types::{
    EndedRun, Incarnation, LeaseEpoch, Outcome, Receipt, RunId, SessionId, TenantId, Usage, Violations,
    WorkerId,
};
use sqlx::{PgExecutor, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Error, Quotas, SessionRef, SessionSpec, Store, row, tenant::QUOTA_MARGIN};

/// Reads runs; the condition and its arguments follow.
macro_rules! select_runs {
    ($condition:literal, $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            RunRow,
            r#"SELECT r.id, r.session_id, r.tenant_id, r.spec AS "spec: Json<RunSpec>",
                      r.labels AS "labels: Json<BTreeMap<String, String>>", r.state,
                      r.cancel_requested_at IS NOT NULL AS "cancel_requested!", r.attempt, r.worker_id, r.lease_epoch,
                      r.sandbox_root, r.created_at, r.started_at, r.ended_at, r.setup_micros, r.prepared, r.unenforced,
                      r.outcome AS "outcome: Json<Outcome>", r.usage AS "usage: Json<Usage>",
                      r.receipt AS "receipt: Json<Receipt>", r.output_bytes, r.output_truncated,
                      r.violations AS "violations: Json<Violations>", w.address AS "worker_address?"
               FROM runs r
               LEFT JOIN workers w ON r.state = 'running' AND w.id = r.worker_id AND w.incarnation = r.incarnation
                   AND w.lease_until > now()
               WHERE "# + $condition,
            $($argument),*
        )
    };
}

/// A run.
#[derive(Debug, Clone)]
pub struct Run {
    /// Its id.
    pub id: RunId,
    /// Its session.
    pub session: SessionId,
    /// Whose it is.
    pub tenant: TenantId,
    /// As it was admitted.
    pub spec: RunSpec,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Where it is in its life.
    pub state: RunState,
    /// Whether somebody asked for its end.
    pub cancel_requested: bool,
    /// Which attempt this is, from 1.
    pub attempt: i32,
    /// Who executes or executed it.
    pub worker: Option<WorkerId>,
    /// Under which lease.
    pub lease_epoch: Option<LeaseEpoch>,
    /// The session's directory on that worker.
    pub sandbox_root: Option<String>,
    /// When it was recorded.
    pub created_at: OffsetDateTime,
    /// When its command started.
    pub started_at: Option<OffsetDateTime>,
    /// When it ended.
    pub ended_at: Option<OffsetDateTime>,
    /// From the launch being asked for to the command's execve.
    pub setup_time: Option<Duration>,
    /// Whether its sandbox was prepared before it was needed.
    pub prepared: Option<bool>,
    /// Limits that its mode could not enforce.
    pub unenforced: Vec<String>,
    /// How it ended.
    pub outcome: Option<Outcome>,
    /// What it used.
    pub usage: Option<Usage>,
    /// What its sandbox left behind.
    pub receipt: Option<Receipt>,
    /// Bytes of output kept.
    pub output_bytes: i64,
    /// Whether output was cut.
    pub output_truncated: bool,
    /// What it tried against its policy.
    pub violations: Violations,
    /// Where an api reaches the worker, while it is running on a live one.
    pub worker_address: Option<String>,
}

/// Where a run is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// No worker may have begun it.
    Queued,
    /// The named worker may have begun it.
    Running,
    /// It has its outcome.
    Ended,
}

impl RunState {
    fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Ended => "ended",
        }
    }
}

impl FromStr for RunState {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Queued, Self::Running, Self::Ended].into_iter().find(|state| state.as_str() == text).ok_or(())
    }
}

/// A run to be recorded.
#[derive(Debug)]
pub struct NewRun<'a> {
    /// Its id.
    pub id: RunId,
    /// Its session.
    pub session: SessionId,
    /// Whose it is.
    pub tenant: &'a TenantId,
    /// As it was admitted.
    pub spec: &'a RunSpec,
    /// Free-form labels.
    pub labels: &'a BTreeMap<String, String>,
    /// How often it may be started again.
    pub retries: i32,
    /// Idempotency key and hash of the request.
    pub idempotency: Option<(&'a str, &'a [u8])>,
}

/// What became of a run to be recorded.
#[derive(Debug)]
pub enum RunAdmission {
    /// It is recorded: as running for the live holder of its session, else as queued.
    Recorded {
        /// The run.
        run: Box<Run>,
        /// The holder's incarnation, if it is recorded for one.
        incarnation: Option<Incarnation>,
    },
    /// The idempotency key is known, with the same request: the first run.
    Existing(Box<Run>),
    /// The idempotency key is known, with another request.
    KeyReused,
    /// The session is not there.
    NoSession,
    /// The session takes no runs any more.
    SessionEnded,
    /// The session's files are gone.
    SessionDataLost,
    /// The tenant is at this quota: `concurrent_runs` or `queued_runs`.
    OverQuota(&'static str),
}

/// Which runs to list.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    /// Of this session.
    pub session: Option<SessionId>,
    /// In this state.
    pub state: Option<RunState>,
    /// Recorded at or after.
    pub created_after: Option<OffsetDateTime>,
    /// Recorded before.
    pub created_before: Option<OffsetDateTime>,
    /// Older than this one.
    pub before: Option<RunId>,
}

impl Store {
    /// Records a run, in one statement that also checks the session, the quotas and the
    /// idempotency key. If a live worker holds the session the run is recorded as running for it.
    pub async fn run_insert(&self, new: NewRun<'_>, quotas: Quotas) -> Result<RunAdmission, Error> {
        let within = |margin| (quotas.concurrent_runs - margin, quotas.queued_runs - margin);
        match self.run_insert_within(&self.pool, &new, within(QUOTA_MARGIN)).await? {
            RunAdmission::OverQuota(_) => {}
            admission => return Ok(admission),
        }
        // Near a quota inserts wait for each other, so that none slips through.
        let mut tx = self.tenant_lock(new.tenant).await?;
        let admission = self.run_insert_within(&mut *tx, &new, within(0)).await?;
        tx.commit().await?;
        Ok(admission)
    }

    async fn run_insert_within(
        &self,
        on: impl PgExecutor<'_>,
        new: &NewRun<'_>,
        (most_active, most_queued): (i64, i64),
    ) -> Result<RunAdmission, Error> {
        let found = sqlx::query_file!(
            "src/sql/run_insert.sql",
            new.id.0,
            new.session.0,
            new.tenant.as_str(),
            Json(new.spec) as _,
            Json(new.labels) as _,
            new.retries,
            new.idempotency.map(|(key, _)| key),
            new.idempotency.map(|(_, hash)| hash),
            most_active,
            most_queued,
        )
        .fetch_optional(on)
        .await?;
        let Some(found) = found else { return Ok(RunAdmission::NoSession) };
        if let Some(created_at) = found.created_at {
            let worker = found.worker_id.map(|id| row::parse("runs.worker_id", &id)).transpose()?;
            let held = worker.is_some();
            let run = Run {
                lease_epoch: held.then_some(LeaseEpoch(found.lease_epoch)),
                worker,
                worker_address: found.address,
                ..Run::recorded(new, created_at, if held { RunState::Running } else { RunState::Queued })
            };
            return Ok(RunAdmission::Recorded {
                run: Box::new(run),
                incarnation: found.incarnation.map(Incarnation),
            });
        }
        // A known key comes first: it must answer the same when a quota or the session has ended since.
        if let Some(known) = self.run_known(new).await? {
            return Ok(known);
        }
        Ok(match found.open {
            false if found.end_reason.as_deref() == Some("data_lost") => RunAdmission::SessionDataLost,
            false => RunAdmission::SessionEnded,
            true if found.lost => RunAdmission::SessionDataLost,
            true if found.active >= most_active => RunAdmission::OverQuota("concurrent_runs"),
            true => RunAdmission::OverQuota("queued_runs"),
        })
    }

    /// The run that an idempotency key stands for already.
    async fn run_known(&self, new: &NewRun<'_>) -> Result<Option<RunAdmission>, Error> {
        let Some((key, hash)) = new.idempotency else { return Ok(None) };
        let found = sqlx::query!(
            "SELECT id, request_hash FROM runs WHERE tenant_id = $1 AND session_id = $2 AND idempotency_key = $3",
            new.tenant.as_str(),
            new.session.0,
            key,
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(found) = found else { return Ok(None) };
        if found.request_hash.as_deref() != Some(hash) {
            return Ok(Some(RunAdmission::KeyReused));
        }
        let run = self.run_get(new.tenant, RunId(found.id)).await?;
        Ok(run.map(|run| RunAdmission::Existing(Box::new(run))))
    }

    /// What a run of this session starts from; `None` if the tenant has no such session.
    pub async fn run_session(
        &self,
        tenant: &TenantId,
        which: &SessionRef,
    ) -> Result<Option<(SessionId, SessionSpec)>, Error> {
        let (id, alias) = which.columns();
        let row = sqlx::query!(
            r#"SELECT id, spec AS "spec: Json<SessionSpec>" FROM sessions
               WHERE tenant_id = $1 AND (id = $2 OR (alias = $3 AND state = 'open'))"#,
            tenant.as_str(),
            id,
            alias,
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(row.map(|row| (SessionId(row.id), row.spec.0)))
    }

    /// Returns a tenant's run.
    pub async fn run_get(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, Error> {
        select_runs!("r.tenant_id = $1 AND r.id = $2", tenant.as_str(), id.0)
            .fetch_optional(&self.pool)
            .await?
            .map(Run::try_from)
            .transpose()
    }

    /// Lists a tenant's runs, newest first.
    pub async fn run_list(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        limit: i64,
    ) -> Result<Vec<Run>, Error> {
        select_runs!(
            "r.tenant_id = $1 AND ($2::uuid IS NULL OR r.session_id = $2) AND ($3::text IS NULL OR r.state = $3)
               AND ($4::timestamptz IS NULL OR r.created_at >= $4) AND ($5::timestamptz IS NULL OR r.created_at < $5)
               AND ($6::uuid IS NULL OR r.id < $6)
             ORDER BY r.id DESC LIMIT $7",
            tenant.as_str(),
            filter.session.map(|id| id.0),
            filter.state.map(RunState::as_str),
            filter.created_after,
            filter.created_before,
            filter.before.map(|id| id.0),
            limit,
        )
        .fetch_all(&self.pool)
        .await?
        .into_iter()
        .map(Run::try_from)
        .collect()
    }

    /// Asks for a run's end. A queued one ends as canceled at once; an ended one stays as it is.
    pub async fn run_cancel(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, Error> {
        sqlx::query!(
            r#"UPDATE runs SET
                   cancel_requested_at = coalesce(cancel_requested_at, now()),
                   state = CASE state WHEN 'queued' THEN 'ended' ELSE state END,
                   ended_at = CASE state WHEN 'queued' THEN now() END,
                   outcome = CASE state WHEN 'queued' THEN '{"kind": "canceled"}'::jsonb END
               WHERE tenant_id = $1 AND id = $2 AND state <> 'ended'"#,
            tenant.as_str(),
            id.0,
        )
        .execute(&self.pool)
        .await?;
        self.run_get(tenant, id).await
    }

    /// How many runs of any tenant are queued.
    pub async fn run_queue_depth_any_tenant(&self) -> Result<i64, Error> {
        let depth = sqlx::query_scalar!(r#"SELECT count(*) AS "depth!" FROM runs WHERE state = 'queued'"#)
            .fetch_one(&self.pool)
            .await?;
        Ok(depth)
    }

    /// Cancels queued runs whose session ended in the moment they were recorded.
    pub(crate) async fn run_cancel_stranded_any_tenant(&self, limit: i64) -> Result<(), Error> {
        sqlx::query!(
            r#"WITH stranded AS (
                   SELECT r.id FROM runs r JOIN sessions s ON s.id = r.session_id
                   WHERE r.state = 'queued' AND s.state = 'ended'
                   LIMIT $1 FOR UPDATE OF r SKIP LOCKED
               )
               UPDATE runs r SET state = 'ended', ended_at = now(), outcome = '{"kind": "canceled"}'
               FROM stranded WHERE r.id = stranded.id"#,
            limit,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

impl Run {
    /// The run with its result; `None` if that is another attempt's.
    #[must_use]
    pub fn ended(&self, ended: EndedRun) -> Option<Self> {
        let EndedRun { result, attempt, started_at, ended_at } = ended;
        (attempt == self.attempt).then(|| Self {
            state: RunState::Ended,
            sandbox_root: Some(result.sandbox_root),
            started_at,
            ended_at: Some(ended_at),
            setup_time: result.setup_time,
            prepared: Some(result.prepared),
            unenforced: result.unenforced,
            outcome: Some(result.outcome),
            usage: Some(result.usage),
            receipt: Some(result.receipt),
            output_bytes: result.output_bytes,
            output_truncated: result.output_truncated,
            violations: result.violations,
            worker_address: None,
            ..self.clone()
        })
    }

    /// A run that was just recorded.
    fn recorded(new: &NewRun<'_>, created_at: OffsetDateTime, state: RunState) -> Self {
        Self {
            id: new.id,
            session: new.session,
            tenant: new.tenant.clone(),
            spec: new.spec.clone(),
            labels: new.labels.clone(),
            state,
            cancel_requested: false,
            attempt: 1,
            worker: None,
            lease_epoch: None,
            sandbox_root: None,
            created_at,
            started_at: None,
            ended_at: None,
            setup_time: None,
            prepared: None,
            unenforced: Vec::new(),
            outcome: None,
            usage: None,
            receipt: None,
            output_bytes: 0,
            output_truncated: false,
            violations: Violations::default(),
            worker_address: None,
        }
    }
}

struct RunRow {
    id: Uuid,
    session_id: Uuid,
    tenant_id: String,
    spec: Json<RunSpec>,
    labels: Json<BTreeMap<String, String>>,
    state: String,
    cancel_requested: bool,
    attempt: i32,
    worker_id: Option<String>,
    lease_epoch: Option<i64>,
    sandbox_root: Option<String>,
    created_at: OffsetDateTime,
    started_at: Option<OffsetDateTime>,
    ended_at: Option<OffsetDateTime>,
    setup_micros: Option<i64>,
    prepared: Option<bool>,
    unenforced: Option<Vec<String>>,
    outcome: Option<Json<Outcome>>,
    usage: Option<Json<Usage>>,
    receipt: Option<Json<Receipt>>,
    output_bytes: i64,
    output_truncated: bool,
    violations: Option<Json<Violations>>,
    worker_address: Option<String>,
}

impl TryFrom<RunRow> for Run {
    type Error = Error;

    fn try_from(row: RunRow) -> Result<Self, Error> {
        Ok(Self {
            id: RunId(row.id),
            session: SessionId(row.session_id),
            tenant: row::parse("runs.tenant_id", &row.tenant_id)?,
            spec: row.spec.0,
            labels: row.labels.0,
            state: row::parse("runs.state", &row.state)?,
            cancel_requested: row.cancel_requested,
            attempt: row.attempt,
            worker: row.worker_id.map(|text| row::parse("runs.worker_id", &text)).transpose()?,
            lease_epoch: row.lease_epoch.map(LeaseEpoch),
            sandbox_root: row.sandbox_root,
            created_at: row.created_at,
            started_at: row.started_at,
            ended_at: row.ended_at,
            setup_time: row.setup_micros.map(row::micros),
            prepared: row.prepared,
            unenforced: row.unenforced.unwrap_or_default(),
            outcome: row.outcome.map(|json| json.0),
            usage: row.usage.map(|json| json.0),
            receipt: row.receipt.map(|json| json.0),
            output_bytes: row.output_bytes,
            output_truncated: row.output_truncated,
            violations: row.violations.map(|json| json.0).unwrap_or_default(),
            worker_address: row.worker_address,
        })
    }
}
