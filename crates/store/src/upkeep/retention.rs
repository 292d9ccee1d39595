//! How long rows are kept: by the installation, and by tenants that differ from it.

use std::time::Duration;

use codelia_policy::display_duration;
use codelia_types::{KeyId, TenantId};
use serde_json::{Value, json};
use sqlx::postgres::types::PgInterval;

use crate::{Error, EventBody, EventKind, EventSubject, Store, Tenant, event, row};

/// Rows of whole days are dropped at once from here on; below it they are deleted one by one.
pub(super) const DAY: Duration = Duration::from_secs(24 * 3600);

const MINIMUM: Duration = Duration::from_secs(60);
const MAXIMUM: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long rows are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Records of runs, and ended sessions, after their end.
    pub runs: Duration,
    /// Output of runs, after their end. At most as long as the record.
    pub output: Duration,
    /// Events that are not kept for audits.
    pub events: Duration,
    /// Decisions of operators, and what commands tried against their policy.
    pub audit: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        Self { runs: DAY, output: DAY, events: 7 * DAY, audit: 90 * DAY }
    }
}

/// What is wrong with a retention.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct InvalidRetention {
    /// The field, such as `retention.runs`.
    pub field: &'static str,
    /// What its value must be.
    pub message: String,
}

impl Retention {
    /// Checks that every time is within bounds and the times fit each other.
    ///
    /// # Errors
    /// With the first field that does not.
    pub fn check(&self) -> Result<(), InvalidRetention> {
        let times = [
            ("retention.runs", self.runs),
            ("retention.output", self.output),
            ("retention.events", self.events),
            ("retention.audit", self.audit),
        ];
        let invalid = |field, message: String| Err(InvalidRetention { field, message });
        if let Some((field, _)) = times.into_iter().find(|(_, time)| !(MINIMUM..=MAXIMUM).contains(time)) {
            let (least, most) = (display_duration(MINIMUM), display_duration(MAXIMUM));
            return invalid(field, format!("must be from {least} to {most}"));
        }
        if self.output > self.runs {
            let runs = display_duration(self.runs);
            return invalid("retention.output", format!("must be at most {runs}, as long as retention.runs"));
        }
        if self.audit < self.events {
            let events = display_duration(self.events);
            return invalid(
                "retention.audit",
                format!("must be at least {events}, as long as retention.events"),
            );
        }
        Ok(())
    }
}

/// How long the rows of a tenant are kept. `None` is as long as those of the installation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TenantRetention {
    /// See [`Retention::runs`].
    pub runs: Option<Duration>,
    /// See [`Retention::output`].
    pub output: Option<Duration>,
    /// See [`Retention::events`].
    pub events: Option<Duration>,
    /// See [`Retention::audit`].
    pub audit: Option<Duration>,
}

impl TenantRetention {
    pub(crate) fn from_columns(columns: [Option<PgInterval>; 4]) -> Self {
        let [runs, output, events, audit] = columns.map(|column| column.as_ref().map(row::duration));
        Self { runs, output, events, audit }
    }

    /// The retention with the installation's where the tenant has none.
    #[must_use]
    pub fn within(&self, installation: &Retention) -> Retention {
        Retention {
            runs: self.runs.unwrap_or(installation.runs),
            output: self.output.unwrap_or(installation.output),
            events: self.events.unwrap_or(installation.events),
            audit: self.audit.unwrap_or(installation.audit),
        }
    }

    fn detail(&self) -> Value {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs());
        json!({
            "runs_seconds": seconds(self.runs),
            "output_seconds": seconds(self.output),
            "events_seconds": seconds(self.events),
            "audit_seconds": seconds(self.audit),
        })
    }
}

impl Store {
    /// Sets how long the rows of a tenant are kept, and records an event. For operators.
    pub async fn tenant_set_retention(
        &self,
        id: &TenantId,
        retention: &TenantRetention,
        key: KeyId,
    ) -> Result<Option<Tenant>, Error> {
        let interval = |time: Option<Duration>| time.map(row::interval);
        let mut tx = self.pools.runs.begin().await?;
        let updated = sqlx::query!(
            "UPDATE tenants SET retention_runs = $2, retention_output = $3, retention_events = $4, retention_audit = $5
             WHERE id = $1",
            id.as_str(),
            interval(retention.runs) as _,
            interval(retention.output) as _,
            interval(retention.events) as _,
            interval(retention.audit) as _,
        )
        .execute(&mut *tx)
        .await?;
        if updated.rows_affected() > 0 {
            let field = Some("retention".to_owned());
            let body = EventBody { kind: EventKind::RetentionSet, field, detail: retention.detail() };
            event::insert(&self.audit, &mut *tx, &EventSubject::by(key, Some(id)), &body).await?;
        }
        tx.commit().await?;
        self.tenant_get(id).await
    }

    /// The longest time that any tenant keeps runs and their output.
    pub(super) async fn retention_longest(&self, keep: &Retention) -> Result<(Duration, Duration), Error> {
        let longest = sqlx::query!(
            r#"SELECT greatest($1::interval, max(retention_runs)) AS "runs!",
                      greatest($2::interval, max(retention_output)) AS "output!" FROM tenants"#,
            row::interval(keep.runs),
            row::interval(keep.output),
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        Ok((row::duration(&longest.runs), row::duration(&longest.output)))
    }
}
