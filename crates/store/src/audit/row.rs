//! Rows of the table `audit`, with the columns that the MAC covers.

use codelia_types::{KeyId, RunId, SessionId};
use time::OffsetDateTime;
use uuid::Uuid;

use super::event::{AuditEvent, EventSubject};
use crate::{Error, row};

/// Selects rows of the audit by a condition, the rest of the statement and its arguments.
macro_rules! select_audit {
    ($first:literal $(+ $rest:literal)*, $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            $crate::audit::row::AuditRow,
            "SELECT writer, id, at, kind, tenant_id, session_id, run_id, key_id, worker_id, field, detail, mac
             FROM audit a WHERE " + $first $(+ $rest)*,
            $($argument),*
        )
    };
}

pub(super) use select_audit;

/// A row of the audit.
pub(super) struct AuditRow {
    pub(super) writer: Uuid,
    pub(super) id: Uuid,
    pub(super) at: OffsetDateTime,
    pub(super) kind: String,
    pub(super) tenant_id: Option<String>,
    pub(super) session_id: Option<Uuid>,
    pub(super) run_id: Option<Uuid>,
    pub(super) key_id: Option<Uuid>,
    pub(super) worker_id: Option<String>,
    pub(super) field: Option<String>,
    pub(super) detail: String,
    pub(super) mac: Option<Vec<u8>>,
}

impl AuditRow {
    /// The event and its MAC.
    pub(super) fn split(self) -> Result<(AuditEvent, Option<Vec<u8>>), Error> {
        let subject = EventSubject {
            tenant: self.tenant_id.map(|text| row::parse("audit.tenant_id", &text)).transpose()?,
            session: self.session_id.map(SessionId),
            run: self.run_id.map(RunId),
            key: self.key_id.map(KeyId),
            worker: self.worker_id.map(|text| row::parse("audit.worker_id", &text)).transpose()?,
        };
        let Self { writer, id, at, kind, field, detail, mac, .. } = self;
        Ok((AuditEvent { writer, id, at, kind, subject, field, detail }, mac))
    }
}
