//! The audit: who did what, when, and what was decided. A row is written by the statement that
//! makes the change, so no change lacks its row.
//!
//! Each row carries a MAC over its content: nobody without the installation's key can change or add
//! one. Each process is a writer of its own. Every second it lists the rows that it stored in a
//! checkpoint, which is chained to its previous one and signed: so a row that is missing is found.
//! A checkpoint also names the last checkpoints of other writers, so that the end of a chain cannot
//! be cut off unseen.

mod chain;
mod checkpoint;
mod command;
mod event;
mod kind;
mod list;
mod log;
mod retention;
mod row;
mod run_end;
mod verify;

use self::event::AuditKeys;
pub(crate) use self::{
    command::command_detail,
    log::{AuditLog, EventColumns, SignedEvent},
    run_end::{RunEnd, RunEnds, run_end},
};
pub use self::{
    event::{AuditEvent, EventBody, EventSubject},
    kind::EventKind,
    list::AuditFilter,
    verify::{AuditProblem, AuditReport},
};
use crate::{Error, SecretError, SecretKey, Store};

impl Store {
    /// Signs the audit with keys that are derived from this one. Without a key its rows are not
    /// protected from changes in the database.
    ///
    /// # Errors
    /// [`SecretError::Cipher`].
    pub fn with_audit_key(mut self, key: Option<&SecretKey>) -> Result<Self, SecretError> {
        let keys = key.map(AuditKeys::derive).transpose()?;
        self.audit = AuditLog::new(keys).into();
        Ok(self)
    }

    /// Records what happened.
    pub async fn audit_insert(
        &self,
        subject: &EventSubject,
        body: &EventBody,
    ) -> Result<(), Error> {
        self.audit.insert(&self.pools.runs, subject, body).await
    }
}
