//! The audit: who did what, when, and what was decided. A row is written by the statement that
//! makes the change, so no change lacks its row.
//!
//! Each row carries a MAC over its content: nobody without the installation's key can change or add
//! one. Each process is a writer of its own. Every second it lists the rows that it stored in a
//! checkpoint, which is chained to its previous one and signed: so a row that is missing is found.
//! A checkpoint also names the last checkpoints of other writers, so that the end of a chain cannot
//! be cut off unseen.

mod checkpoint;
mod command;
mod event;
mod kind;
mod list;
mod retention;
mod run_end;
mod verify;

use std::sync::{Mutex, MutexGuard, PoisonError};

use sqlx::PgExecutor;
use time::OffsetDateTime;
use uuid::Uuid;

use self::{checkpoint::Chain, event::AuditKeys};
pub(crate) use self::{
    command::command_detail,
    run_end::{RunEnd, RunEnds, run_end},
};
pub use self::{
    event::{AuditEvent, EventBody, EventSubject},
    kind::EventKind,
    list::AuditFilter,
    verify::{AuditProblem, AuditReport},
};
use crate::{Error, SecretError, SecretKey, Store, row};

/// The part of a process in the audit.
#[derive(Debug)]
pub(crate) struct AuditLog {
    writer: Uuid,
    keys: Option<AuditKeys>,
    chain: Mutex<Chain>,
    /// One checkpoint is made at a time.
    checkpoint: tokio::sync::Mutex<()>,
}

/// An event with its MAC, to be stored.
#[derive(Debug)]
pub(crate) struct SignedEvent {
    pub(crate) event: AuditEvent,
    pub(crate) mac: Option<Vec<u8>>,
}

/// Events as arrays of columns, to insert them in one statement.
#[derive(Default)]
pub(crate) struct EventColumns {
    pub(crate) writer: Uuid,
    pub(crate) ids: Vec<Uuid>,
    pub(crate) times: Vec<OffsetDateTime>,
    pub(crate) kinds: Vec<String>,
    pub(crate) fields: Vec<Option<String>>,
    pub(crate) details: Vec<String>,
    pub(crate) macs: Vec<Option<Vec<u8>>>,
}

impl EventColumns {
    pub(crate) fn push(&mut self, SignedEvent { event, mac }: SignedEvent) {
        self.ids.push(event.id);
        self.times.push(event.at);
        self.kinds.push(event.kind);
        self.fields.push(event.field);
        self.details.push(event.detail);
        self.macs.push(mac);
    }
}

impl AuditLog {
    /// A writer that signs nothing.
    pub(crate) fn unsigned() -> Self {
        Self {
            writer: Uuid::now_v7(),
            keys: None,
            chain: Mutex::default(),
            checkpoint: Default::default(),
        }
    }

    /// An event about this. The next checkpoint covers it if it is stored by then.
    pub(crate) fn event(&self, subject: &EventSubject, body: &EventBody) -> SignedEvent {
        let event = AuditEvent::new(self.writer, subject, body);
        let mac = self.keys.as_ref().map(|keys| {
            let content = event.content();
            self.chain().add(event.id, content);
            keys.mac(&content)
        });
        SignedEvent { event, mac }
    }

    /// No events yet.
    pub(crate) fn columns(&self) -> EventColumns {
        EventColumns { writer: self.writer, ..EventColumns::default() }
    }

    /// Events about one subject.
    pub(crate) fn events<'a>(
        &self,
        subject: &EventSubject,
        bodies: impl IntoIterator<Item = &'a EventBody>,
    ) -> EventColumns {
        let mut events = self.columns();
        bodies.into_iter().for_each(|body| events.push(self.event(subject, body)));
        events
    }

    /// The statement did not store this event, because nothing happened.
    pub(crate) fn forget(&self, id: Uuid) {
        self.chain().forget(id);
    }

    fn chain(&self) -> MutexGuard<'_, Chain> {
        self.chain.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// Signs the audit with keys that are derived from this one. Without a key its rows are not
    /// protected from changes in the database.
    ///
    /// # Errors
    /// [`SecretError::Cipher`].
    pub fn with_audit_key(mut self, key: Option<&SecretKey>) -> Result<Self, SecretError> {
        let keys = key.map(AuditKeys::derive).transpose()?;
        self.audit = AuditLog { keys, ..AuditLog::unsigned() }.into();
        Ok(self)
    }

    /// Records what happened.
    pub async fn audit_insert(
        &self,
        subject: &EventSubject,
        body: &EventBody,
    ) -> Result<(), Error> {
        insert(&self.audit, &self.pools.runs, subject, body).await
    }
}

/// See [`Store::audit_insert`].
pub(crate) async fn insert(
    log: &AuditLog,
    executor: impl PgExecutor<'_>,
    subject: &EventSubject,
    body: &EventBody,
) -> Result<(), Error> {
    let SignedEvent { event, mac } = log.event(subject, body);
    sqlx::query!(
        "INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, key_id, worker_id, field, detail, mac)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
        event.writer,
        event.id,
        event.at,
        event.kind,
        subject.tenant.as_ref().map(|id| id.as_str()),
        subject.session.map(|id| id.0),
        subject.run.map(|id| id.0),
        subject.key.map(|id| id.0),
        subject.worker.as_ref().map(|id| id.as_str()),
        event.field,
        event.detail,
        mac,
    )
    .execute(executor)
    .await?;
    Ok(())
}

/// A row of the audit.
struct AuditRow {
    writer: Uuid,
    id: Uuid,
    at: OffsetDateTime,
    kind: String,
    tenant_id: Option<String>,
    session_id: Option<Uuid>,
    run_id: Option<Uuid>,
    key_id: Option<Uuid>,
    worker_id: Option<String>,
    field: Option<String>,
    detail: String,
    mac: Option<Vec<u8>>,
}

impl AuditRow {
    /// The event and its MAC.
    fn split(self) -> Result<(AuditEvent, Option<Vec<u8>>), Error> {
        let subject = EventSubject {
            tenant: self.tenant_id.map(|text| row::parse("audit.tenant_id", &text)).transpose()?,
            session: self.session_id.map(codelia_types::SessionId),
            run: self.run_id.map(codelia_types::RunId),
            key: self.key_id.map(codelia_types::KeyId),
            worker: self.worker_id.map(|text| row::parse("audit.worker_id", &text)).transpose()?,
        };
        let Self { writer, id, at, kind, field, detail, mac, .. } = self;
        Ok((AuditEvent { writer, id, at, kind, subject, field, detail }, mac))
    }
}
