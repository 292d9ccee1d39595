//! Inserting runs: session, quotas and idempotency key are checked in one statement.

use std::{collections::BTreeMap, time::Duration};

use codelia_policy::RunSpec;
use codelia_types::{Incarnation, KeyId, LeaseEpoch, RunId, SessionId, TenantId};
use serde::Serialize;
use serde_json::{Value, json};
use sqlx::{PgConnection, PgExecutor, types::Json};
use time::OffsetDateTime;

use super::{
    insert_group::{InsertCall, InsertedRun},
    record::{Run, RunRef, RunState},
    settings::SpecColumns,
};
use crate::{
    Error, EventBody, EventKind, EventSubject, KeyVersion, NewApproval, Quotas, SealedEnv, Store,
    approval,
    audit::{AuditLog, SignedEvent, command_detail},
    group::Turn,
    row,
    tenant::QUOTA_MARGIN,
};

/// Maximum bytes of secret variables of a run that is inserted together with others.
const MAX_GROUP_SECRET_ENV: usize = 4096;

/// A run to insert.
#[derive(Debug)]
pub struct NewRun<'a> {
    /// Identifies the run; the caller chooses it.
    pub id: RunId,
    /// The session to run in.
    pub session: SessionId,
    /// The tenant that owns both and whose quotas count it.
    pub tenant: &'a TenantId,
    /// The spec as it was admitted.
    pub spec: &'a RunSpec,
    /// Free-form labels.
    pub labels: &'a BTreeMap<String, String>,
    /// How many more attempts are allowed if its worker dies.
    pub retries: i32,
    /// How long it may wait for a worker.
    pub queue_timeout: Duration,
    /// Idempotency key and hash of the request.
    pub idempotency: Option<(&'a str, &'a [u8])>,
    /// The secret variables, which the store keeps until the run ends.
    pub secret_env: Option<&'a SealedEnv>,
    /// Whether to count the tenant's runs. Without it only the session and the key are checked: the
    /// caller knows that the tenant is far from its quotas.
    pub check_quotas: bool,
    /// The key that starts it.
    pub key: KeyId,
    /// The version of the key, if this call has not looked it up: the run is inserted only if
    /// nothing about the key has changed.
    pub key_version: Option<KeyVersion>,
    /// As `key`, if the run may request approvals.
    pub requested_by: Option<KeyId>,
    /// The span of the call that starts it, if traces are exported.
    pub traceparent: Option<&'a str>,
    /// The approval that it needs before it may start. The run is held until then.
    pub approval: Option<&'a NewApproval>,
}

/// Runs of a tenant that have not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActiveRuns {
    /// All.
    pub active: i64,
    /// Of these, the runs that are queued.
    pub queued: i64,
}

/// The answer to [`Store::run_insert`].
#[derive(Debug)]
pub enum RunAdmission {
    /// The run was inserted: held if it needs an approval, else assigned to the live holder of its
    /// session if there is one, else queued.
    Recorded {
        /// The run as it was stored.
        run: Box<Run>,
        /// The incarnation of the worker that it is assigned to.
        incarnation: Option<Incarnation>,
        /// The tenant's runs without this one, if they were counted.
        counted: Option<ActiveRuns>,
    },
    /// The idempotency key was used before with the same request. This is the run of that request.
    Existing(Box<Run>),
    /// The idempotency key was used before with a different request.
    KeyReused,
    /// The key is not the same as [`NewRun::key_version`] any more, or has expired.
    KeyChanged,
    /// The tenant has no such session.
    NoSession,
    /// The session has ended.
    SessionEnded,
    /// The session's files are lost.
    SessionDataLost,
    /// The session is quarantined, for this reason.
    SessionQuarantined(String),
    /// The tenant reached this quota: `concurrent_runs` or `queued_runs`.
    OverQuota(&'static str),
}

impl Store {
    /// Inserts a run. If a live worker holds the session, the run is assigned to it and starts in
    /// the state [`RunState::Running`].
    pub async fn run_insert(&self, new: NewRun<'_>, quotas: Quotas) -> Result<RunAdmission, Error> {
        let spec = self.known_settings.columns(&self.pools.runs, new.id, new.spec).await?;
        let mut turn = Turn::Own;
        if goes_with_others(&new, &spec) {
            turn = self.inserts.turn(|| self.group_writer(), || insert_call(&new, &spec)).await?;
        }
        match turn {
            Turn::Answered(inserted) => Ok(inserted.admission(&new)),
            Turn::Alone(_) | Turn::Own => self.run_insert_alone(&new, spec, quotas).await,
        }
    }

    async fn run_insert_alone(
        &self,
        new: &NewRun<'_>,
        mut spec: SpecColumns,
        quotas: Quotas,
    ) -> Result<RunAdmission, Error> {
        let within = |margin| {
            new.check_quotas.then(|| ActiveRuns {
                active: quotas.concurrent_runs - margin,
                queued: quotas.queued_runs - margin,
            })
        };
        // The key of a removed run is deleted; then the run is inserted as if the key were new.
        for _ in 0..3 {
            let refusal = match self.run_insert_once(new, &spec, within(QUOTA_MARGIN)).await? {
                Insertion::Recorded(recorded) => return Ok(recorded),
                Insertion::SettingsMissing => {
                    spec = self.known_settings.columns_again(new.spec, &spec)?;
                    continue;
                }
                Insertion::Refused(RunAdmission::KeyChanged) => {
                    return Ok(RunAdmission::KeyChanged);
                }
                Insertion::Refused(refusal) => refusal,
            };
            match self.run_of_key(new).await? {
                KeyState::Unknown => {
                    return self.run_insert_exact(new, &spec, within(0), refusal).await;
                }
                KeyState::Used(existing) => return Ok(existing),
                KeyState::Freed => {}
            }
        }
        Err(Error::RowMissing { what: "run" })
    }

    /// Inserts a run if the tenant has fewer runs than `max`, with the approval that it waits for.
    async fn run_insert_once(
        &self,
        new: &NewRun<'_>,
        spec: &SpecColumns,
        max: Option<ActiveRuns>,
    ) -> Result<Insertion, Error> {
        if new.approval.is_none() {
            return insert_within(&self.audit, &self.pools.runs, new, spec, max).await;
        }
        let mut tx = self.tenant_lock(new.tenant).await?;
        let inserted = insert_held(&self.audit, &mut tx, new, spec, max).await?;
        tx.commit().await?;
        Ok(inserted)
    }

    /// Near a quota, inserts of a tenant are serialized so that they cannot exceed it together.
    async fn run_insert_exact(
        &self,
        new: &NewRun<'_>,
        spec: &SpecColumns,
        max: Option<ActiveRuns>,
        refusal: RunAdmission,
    ) -> Result<RunAdmission, Error> {
        if !matches!(refusal, RunAdmission::OverQuota(_)) {
            return Ok(refusal);
        }
        let mut tx = self.tenant_lock(new.tenant).await?;
        let inserted = insert_held(&self.audit, &mut tx, new, spec, max).await?;
        tx.commit().await?;
        Ok(match inserted {
            Insertion::Recorded(recorded) => recorded,
            // They were there a moment ago.
            Insertion::SettingsMissing => return Err(Error::RowMissing { what: "run" }),
            Insertion::Refused(RunAdmission::KeyChanged) => RunAdmission::KeyChanged,
            Insertion::Refused(refusal) => match self.run_of_key(new).await? {
                KeyState::Used(existing) => existing,
                KeyState::Unknown | KeyState::Freed => refusal,
            },
        })
    }

    /// Finds the run that was inserted earlier with the same idempotency key. A retry gets the same
    /// answer even if the session ended or a quota was reached in the meantime.
    async fn run_of_key(&self, new: &NewRun<'_>) -> Result<KeyState, Error> {
        let Some((key, hash)) = new.idempotency else { return Ok(KeyState::Unknown) };
        let found = sqlx::query!(
            "SELECT run_id, request_hash FROM run_keys WHERE session_id = $1 AND idempotency_key = $2",
            new.session.0,
            key,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        let Some(found) = found else { return Ok(KeyState::Unknown) };
        if found.request_hash != hash {
            return Ok(KeyState::Used(RunAdmission::KeyReused));
        }
        if let Some(run) = self.run_get(new.tenant, RunId(found.run_id)).await? {
            return Ok(KeyState::Used(RunAdmission::Existing(Box::new(run))));
        }
        sqlx::query!(
            "DELETE FROM run_keys WHERE session_id = $1 AND idempotency_key = $2 AND run_id = $3",
            new.session.0,
            key,
            found.run_id,
        )
        .execute(&self.pools.runs)
        .await?;
        Ok(KeyState::Freed)
    }
}

/// The state of an idempotency key.
enum KeyState {
    /// The key is new, or the request has none.
    Unknown,
    /// The answer to its earlier use.
    Used(RunAdmission),
    /// Retention removed the run of the key, and now the key, too.
    Freed,
}

/// The answer to one attempt to insert a run.
enum Insertion {
    /// The run was inserted.
    Recorded(RunAdmission),
    /// The spec refers to settings that are not stored for long enough.
    SettingsMissing,
    /// The run was refused, unless its key was used before.
    Refused(RunAdmission),
}

/// As [`insert_within`], with the approval that the run waits for, if there is one. The caller
/// holds the lock of the tenant.
async fn insert_held(
    log: &AuditLog,
    tx: &mut PgConnection,
    new: &NewRun<'_>,
    spec: &SpecColumns,
    max: Option<ActiveRuns>,
) -> Result<Insertion, Error> {
    let inserted = insert_within(log, &mut *tx, new, spec, max).await?;
    if let (Insertion::Recorded(_), Some(approval)) = (&inserted, new.approval) {
        approval::insert_for_run(log, tx, new.tenant, new.session, new.id, approval).await?;
    }
    Ok(inserted)
}

/// Columns of a run, and the version of its key, as one argument of a statement.
#[derive(Serialize)]
struct RunColumns<'a> {
    id: RunId,
    session_id: SessionId,
    tenant_id: &'a TenantId,
    spec: &'a Value,
    summary: Option<&'a Value>,
    labels: &'a BTreeMap<String, String>,
    retries: i32,
    idempotency_key: Option<&'a str>,
    traceparent: Option<&'a str>,
    requested_by: Option<KeyId>,
    key_id: KeyId,
    key_version: Option<i64>,
    tenant_version: Option<i64>,
    policy_version: Option<i64>,
}

impl<'a> RunColumns<'a> {
    fn new(new: &NewRun<'a>, spec: &'a SpecColumns) -> Self {
        Self {
            id: new.id,
            session_id: new.session,
            tenant_id: new.tenant,
            spec: &spec.spec,
            summary: spec.summary.as_ref(),
            labels: new.labels,
            retries: new.retries,
            idempotency_key: new.idempotency.map(|(key, _)| key),
            traceparent: new.traceparent,
            requested_by: new.requested_by,
            key_id: new.key,
            key_version: new.key_version.map(|version| version.key),
            tenant_version: new.key_version.map(|version| version.tenant),
            policy_version: new.key_version.and_then(|version| version.policy),
        }
    }
}

/// Whether the statement for several runs can insert a run. Its spec is small: it refers to stored
/// settings and needs no summary.
fn goes_with_others(new: &NewRun<'_>, spec: &SpecColumns) -> bool {
    !new.check_quotas
        && new.approval.is_none()
        && new.secret_env.is_none_or(|sealed| sealed.0.len() <= MAX_GROUP_SECRET_ENV)
        && spec.settings.is_some()
        && spec.summary.is_none()
}

fn insert_call(new: &NewRun<'_>, spec: &SpecColumns) -> InsertCall {
    let (subject, event) = audit_admitted(new);
    InsertCall {
        id: new.id.0,
        tenant: new.tenant.clone(),
        columns: json!(RunColumns::new(new, spec)),
        settings: spec.settings,
        request_hash: new.idempotency.map(|(_, hash)| hash.to_vec()),
        secret_env: new.secret_env.map(|sealed| sealed.0.clone()),
        queue_timeout: row::interval(new.queue_timeout),
        subject,
        event,
    }
}

/// The event that records that a run was admitted.
fn audit_admitted(new: &NewRun<'_>) -> (EventSubject, EventBody) {
    let run = RunRef { id: new.id, session: new.session, tenant: new.tenant };
    let subject = EventSubject { key: Some(new.key), ..EventSubject::of_run(run, None) };
    (subject, EventBody::new(EventKind::RunAdmitted, command_detail(new.spec)))
}

/// Inserts a run if the tenant has fewer runs than `max`.
async fn insert_within(
    log: &AuditLog,
    executor: impl PgExecutor<'_>,
    new: &NewRun<'_>,
    spec: &SpecColumns,
    max: Option<ActiveRuns>,
) -> Result<Insertion, Error> {
    let (subject, body) = audit_admitted(new);
    let SignedEvent { event, mac } = log.event(&subject, &body);
    let found = sqlx::query_file!(
        "src/sql/run_insert.sql",
        new.id.0,
        new.session.0,
        new.tenant.as_str(),
        Json(RunColumns::new(new, spec)) as _,
        spec.settings.as_ref().map(<[u8; 32]>::as_slice),
        new.secret_env.map(|sealed| sealed.0.as_slice()),
        row::interval(new.queue_timeout) as _,
        new.approval.map(|approval| approval.id.0),
        new.idempotency.map(|(key, _)| key),
        new.idempotency.map(|(_, hash)| hash),
        max.map(|max| max.active),
        max.map(|max| max.queued),
        event.writer,
        event.id,
        event.at,
        new.key.0,
        event.detail,
        mac,
    )
    .fetch_optional(executor)
    .await?;
    if found.as_ref().is_none_or(|found| found.created_at.is_none()) {
        log.forget(event.id);
    }
    let Some(found) = found else { return Ok(Insertion::Refused(RunAdmission::NoSession)) };
    if let Some(created_at) = found.created_at {
        let worker = found.worker_id.map(|id| row::parse("runs.worker_id", &id)).transpose()?;
        let is_assigned = worker.is_some();
        let run = Run {
            lease_epoch: is_assigned.then_some(LeaseEpoch(found.lease_epoch)),
            worker,
            worker_address: found.address,
            ..Run::inserted(
                new,
                created_at,
                if is_assigned { RunState::Running } else { RunState::Queued },
            )
        };
        let counted = ActiveRuns { active: found.active, queued: found.queued };
        return Ok(Insertion::Recorded(RunAdmission::Recorded {
            run: Box::new(run),
            incarnation: found.incarnation.map(Incarnation),
            counted: new.check_quotas.then_some(counted),
        }));
    }
    if !found.key_is_same {
        return Ok(Insertion::Refused(RunAdmission::KeyChanged));
    }
    if !found.settings_known {
        return Ok(Insertion::SettingsMissing);
    }
    if let (true, Some(reason)) = (found.open, found.quarantine_reason) {
        return Ok(Insertion::Refused(RunAdmission::SessionQuarantined(reason)));
    }
    Ok(Insertion::Refused(match found.open {
        false if found.end_reason.as_deref() == Some("data_lost") => RunAdmission::SessionDataLost,
        false => RunAdmission::SessionEnded,
        true if found.lost => RunAdmission::SessionDataLost,
        true if max.is_some_and(|max| found.active >= max.active) => {
            RunAdmission::OverQuota("concurrent_runs")
        }
        true => RunAdmission::OverQuota("queued_runs"),
    }))
}

impl InsertedRun {
    fn admission(self, new: &NewRun<'_>) -> RunAdmission {
        let run = Run {
            lease_epoch: Some(self.epoch),
            worker: Some(self.worker),
            worker_address: Some(self.address),
            ..Run::inserted(new, self.created_at, RunState::Running)
        };
        RunAdmission::Recorded {
            run: Box::new(run),
            incarnation: Some(self.incarnation),
            counted: None,
        }
    }
}

impl Run {
    /// A run that was just inserted.
    fn inserted(new: &NewRun<'_>, created_at: OffsetDateTime, state: RunState) -> Self {
        Self {
            id: new.id,
            session: new.session,
            tenant: new.tenant.clone(),
            spec: new.spec.clone(),
            labels: new.labels.clone(),
            state,
            approval: new.approval.map(|approval| approval.id),
            cancel_requested: false,
            cancel_reason: None,
            attempt: 1,
            worker: None,
            lease_epoch: None,
            worker_address: None,
            created_at,
            end: None,
        }
    }
}
