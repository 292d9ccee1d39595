//! Inserts of several runs in one statement.

use std::collections::HashMap;

use codelia_types::{Incarnation, LeaseEpoch, TenantId, WorkerId};
use serde_json::Value;
use sqlx::{postgres::types::PgInterval, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    audit::{EventBody, EventSubject},
    error::Error,
    group::{GroupCall, Writer},
    row,
};

/// A run that waits for its turn to be inserted.
#[derive(Debug)]
pub(crate) struct InsertCall {
    pub(super) id: Uuid,
    pub(super) tenant: TenantId,
    /// The columns that have no field of their own.
    pub(super) columns: Value,
    pub(super) settings: Option<[u8; 32]>,
    pub(super) request_hash: Option<Vec<u8>>,
    pub(super) secret_env: Option<Vec<u8>>,
    pub(super) queue_timeout: PgInterval,
    pub(super) subject: EventSubject,
    pub(super) event: EventBody,
}

/// The values that the database chose for a run that it inserted for a worker.
#[derive(Debug)]
pub(crate) struct InsertedRun {
    pub(super) created_at: OffsetDateTime,
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    pub(super) address: String,
    pub(super) epoch: LeaseEpoch,
}

impl GroupCall for InsertCall {
    type Answer = InsertedRun;

    fn tenant(&self) -> &TenantId {
        &self.tenant
    }

    async fn execute(writer: &Writer, calls: &[Self]) -> Result<Vec<Option<InsertedRun>>, Error> {
        let mut sorted: Vec<_> = calls.iter().collect();
        sorted.sort_unstable_by_key(|call| call.id);
        let runs: Vec<&Value> = sorted.iter().map(|call| &call.columns).collect();
        let settings: Vec<_> =
            sorted.iter().map(|call| call.settings.as_ref().map(<[u8; 32]>::as_slice)).collect();
        let request_hashes: Vec<_> =
            sorted.iter().map(|call| call.request_hash.as_deref()).collect();
        let secret_envs: Vec<_> = sorted.iter().map(|call| call.secret_env.as_deref()).collect();
        let queue_timeouts: Vec<_> = sorted.iter().map(|call| call.queue_timeout).collect();
        let mut events = writer.audit.columns();
        for call in &sorted {
            events.push(writer.audit.event(&call.subject, &call.event));
        }
        let rows = sqlx::query_file!(
            "src/sql/run_insert_group.sql",
            Json(runs) as _,
            &settings as _,
            &request_hashes as _,
            &secret_envs as _,
            &queue_timeouts,
            events.writer,
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
