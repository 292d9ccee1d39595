//! Inserts of several runs in one statement.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use codelia_types::{Incarnation, KeyId, LeaseEpoch, TenantId, WorkerId};
use serde_json::Value;
use sqlx::{postgres::types::PgInterval, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{NewRun, insert::audit_admitted, settings::SpecColumns};
use crate::{
    Error, EventBody, EventSubject, KeyVersion,
    audit::EventColumns,
    group::{GroupCall, Writer},
    row,
};

/// Maximum bytes of secret variables of a run that is inserted together with others.
const MAX_SECRET_ENV: usize = 4096;

/// A run that waits for its turn to be inserted.
#[derive(Debug)]
pub(crate) struct InsertCall {
    id: Uuid,
    session: Uuid,
    tenant: TenantId,
    spec: Arc<SpecColumns>,
    labels: BTreeMap<String, String>,
    retries: i32,
    idempotency: Option<(String, Vec<u8>)>,
    secret_env: Option<Vec<u8>>,
    queue_timeout: PgInterval,
    requested_by: Option<KeyId>,
    traceparent: Option<String>,
    key: KeyId,
    key_version: Option<KeyVersion>,
    subject: EventSubject,
    event: EventBody,
}

/// What the database knows of a run that it inserted for a worker.
#[derive(Debug)]
pub(crate) struct InsertedRun {
    pub(super) created_at: OffsetDateTime,
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    pub(super) address: String,
    pub(super) epoch: LeaseEpoch,
}

impl InsertCall {
    /// Whether the statement for several runs can insert a run. Its spec is small: it refers to
    /// stored settings and needs no summary.
    pub(super) fn takes(new: &NewRun<'_>, spec: &SpecColumns) -> bool {
        !new.check_quotas
            && new.approval.is_none()
            && new.secret_env.is_none_or(|sealed| sealed.0.len() <= MAX_SECRET_ENV)
            && spec.settings.is_some()
            && spec.summary.is_none()
    }

    pub(super) fn new(new: &NewRun<'_>, spec: &Arc<SpecColumns>) -> Self {
        let (subject, event) = audit_admitted(new);
        Self {
            id: new.id.0,
            session: new.session.0,
            tenant: new.tenant.clone(),
            spec: spec.clone(),
            labels: new.labels.clone(),
            retries: new.retries,
            idempotency: new.idempotency.map(|(key, hash)| (key.to_owned(), hash.to_vec())),
            secret_env: new.secret_env.map(|sealed| sealed.0.clone()),
            queue_timeout: row::interval(new.queue_timeout),
            requested_by: new.requested_by,
            traceparent: new.traceparent.map(str::to_owned),
            key: new.key,
            key_version: new.key_version,
            subject,
            event,
        }
    }
}

impl GroupCall for InsertCall {
    type Answer = InsertedRun;

    fn tenant(&self) -> &TenantId {
        &self.tenant
    }

    async fn execute(writer: &Writer, calls: &[Self]) -> Result<Vec<Option<InsertedRun>>, Error> {
        let mut sorted: Vec<_> = calls.iter().collect();
        sorted.sort_unstable_by_key(|call| call.id);
        let runs = RunColumns::new(&sorted);
        let events = audit_events(writer, &sorted);
        let rows = sqlx::query_file!(
            "src/sql/run_insert_group.sql",
            events.writer,
            &runs.ids,
            &runs.sessions,
            &runs.tenants as _,
            &runs.specs as _,
            &runs.settings as _,
            &runs.labels as _,
            &runs.retries,
            &runs.idempotency_keys as _,
            &runs.request_hashes as _,
            &runs.secret_envs as _,
            &runs.queue_timeouts,
            &runs.requested_by as _,
            &runs.traceparents as _,
            &runs.keys,
            &runs.key_versions as _,
            &runs.tenant_versions as _,
            &runs.policy_versions as _,
            &events.ids,
            &events.times,
            &events.details,
            &events.macs as _,
        )
        .fetch_all(&writer.pool)
        .await?;
        let mut inserted = HashMap::with_capacity(rows.len());
        for row in rows {
            let run = InsertedRun {
                created_at: row.created_at,
                worker: row::parse("runs.worker_id", &row.worker_id)?,
                incarnation: Incarnation(row.incarnation),
                address: row.address,
                epoch: LeaseEpoch(row.lease_epoch),
            };
            inserted.insert(row.id, run);
        }
        let missing =
            sorted.iter().zip(&events.ids).filter(|(call, _)| !inserted.contains_key(&call.id));
        missing.for_each(|(_, event)| writer.audit.forget(*event));
        Ok(calls.iter().map(|call| inserted.remove(&call.id)).collect())
    }
}

/// What the audit records of each run.
fn audit_events(writer: &Writer, calls: &[&InsertCall]) -> EventColumns {
    let mut events = writer.audit.columns();
    calls.iter().for_each(|call| events.push(writer.audit.event(&call.subject, &call.event)));
    events
}

/// Runs as arrays of columns.
#[derive(Default)]
struct RunColumns<'a> {
    ids: Vec<Uuid>,
    sessions: Vec<Uuid>,
    tenants: Vec<&'a str>,
    specs: Vec<&'a Value>,
    settings: Vec<Option<&'a [u8]>>,
    labels: Vec<Json<&'a BTreeMap<String, String>>>,
    retries: Vec<i32>,
    idempotency_keys: Vec<Option<&'a str>>,
    request_hashes: Vec<Option<&'a [u8]>>,
    secret_envs: Vec<Option<&'a [u8]>>,
    queue_timeouts: Vec<PgInterval>,
    requested_by: Vec<Option<Uuid>>,
    traceparents: Vec<Option<&'a str>>,
    keys: Vec<Uuid>,
    key_versions: Vec<Option<i64>>,
    tenant_versions: Vec<Option<i64>>,
    policy_versions: Vec<Option<i64>>,
}

impl<'a> RunColumns<'a> {
    fn new(calls: &[&'a InsertCall]) -> Self {
        let mut columns = Self::default();
        for call in calls {
            let idempotency = call.idempotency.as_ref();
            columns.ids.push(call.id);
            columns.sessions.push(call.session);
            columns.tenants.push(call.tenant.as_str());
            columns.specs.push(&call.spec.spec);
            columns.settings.push(call.spec.settings.as_ref().map(<[u8; 32]>::as_slice));
            columns.labels.push(Json(&call.labels));
            columns.retries.push(call.retries);
            columns.idempotency_keys.push(idempotency.map(|(key, _)| key.as_str()));
            columns.request_hashes.push(idempotency.map(|(_, hash)| hash.as_slice()));
            columns.secret_envs.push(call.secret_env.as_deref());
            columns.queue_timeouts.push(call.queue_timeout);
            columns.requested_by.push(call.requested_by.map(|key| key.0));
            columns.traceparents.push(call.traceparent.as_deref());
            columns.keys.push(call.key.0);
            columns.key_versions.push(call.key_version.map(|version| version.key));
            columns.tenant_versions.push(call.key_version.map(|version| version.tenant));
            columns.policy_versions.push(call.key_version.and_then(|version| version.policy));
        }
        columns
    }
}
