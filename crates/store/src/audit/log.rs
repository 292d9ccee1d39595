//! A process as a writer of the audit: signs events and remembers them for its next checkpoint.

use std::sync::{Mutex, MutexGuard, PoisonError};

use sqlx::{PgExecutor, Postgres, Transaction};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    chain::Chain,
    event::{AuditEvent, AuditKeys, EventBody, EventSubject},
};
use crate::Error;

/// The part of a process in the audit.
#[derive(Debug)]
pub(crate) struct AuditLog {
    pub(super) writer: Uuid,
    pub(super) keys: Option<AuditKeys>,
    chain: Mutex<Chain>,
    /// One checkpoint is made at a time.
    pub(super) checkpoint: tokio::sync::Mutex<()>,
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
        Self::new(None)
    }

    /// A writer that signs with these keys.
    pub(super) fn new(keys: Option<AuditKeys>) -> Self {
        Self {
            writer: Uuid::now_v7(),
            keys,
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

    pub(super) fn chain(&self) -> MutexGuard<'_, Chain> {
        self.chain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an event in the transaction that makes the change.
    pub(crate) async fn insert(
        &self,
        executor: impl PgExecutor<'_>,
        subject: &EventSubject,
        body: &EventBody,
    ) -> Result<(), Error> {
        let SignedEvent { event, mac } = self.event(subject, body);
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

    /// Commits a transaction together with the event of its change.
    pub(crate) async fn commit(
        &self,
        mut tx: Transaction<'_, Postgres>,
        subject: &EventSubject,
        body: &EventBody,
    ) -> Result<(), Error> {
        self.insert(&mut *tx, subject, body).await?;
        Ok(tx.commit().await?)
    }
}
