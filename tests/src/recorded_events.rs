//! What the audit has of a tenant.

use anyhow::{Context as _, Result};
use codelia_store::{AuditEvent, AuditFilter, EventBody, EventKind, EventSubject, Store};
use codelia_types::TenantId;

const LIMIT: i64 = 1000;

/// An event of the audit.
#[derive(Debug, Clone)]
pub struct RecordedEvent {
    /// Who or what it is about.
    pub subject: EventSubject,
    /// What happened.
    pub body: EventBody,
}

/// The newest events of a tenant, the newest first, optionally of one kind.
pub async fn recorded_events(
    store: &Store,
    tenant: &TenantId,
    kind: Option<EventKind>,
) -> Result<Vec<RecordedEvent>> {
    let filter = AuditFilter { kind, ..AuditFilter::default() };
    let events = store.audit_list(Some(tenant), &filter, LIMIT).await?;
    events.into_iter().map(recorded).collect()
}

fn recorded(event: AuditEvent) -> Result<RecordedEvent> {
    let kind = event.kind.parse().ok().context("a kind of event")?;
    let detail = serde_json::from_str(&event.detail)?;
    Ok(RecordedEvent {
        subject: event.subject,
        body: EventBody { kind, field: event.field, detail },
    })
}
