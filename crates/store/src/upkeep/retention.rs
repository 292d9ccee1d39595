//! How long rows are kept: by the installation, and by tenants that differ from it.

use std::time::Duration;

use codelia_types::{KeyId, TenantId, duration, option::InvalidOption};
use serde_json::{Value, json};
use sqlx::postgres::types::PgInterval;

use crate::{Error, EventBody, EventKind, EventSubject, Store, Tenant, audit, row};

/// Rows of whole days are dropped at once from here on; below it they are deleted one by one.
pub(super) const DAY: Duration = Duration::from_secs(24 * 3600);

const MINIMUM: Duration = Duration::from_secs(60);
const MAXIMUM: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

codelia_types::options! {
    /// How long rows are kept: the section `retention` of the configuration.
    #[derive(Copy, PartialEq, Eq)]
    pub struct Retention {
        /// Records of runs and ended sessions, after their end.
        #[serde(with = "duration")]
        pub runs: Duration = DAY,
        /// Output of runs, after their end; at most as long as the records.
        #[serde(with = "duration")]
        pub output: Duration = DAY,
        /// The audit, approvals and their decisions.
        #[serde(with = "duration")]
        pub audit: Duration = 90 * DAY,
    }
}

impl Retention {
    /// Checks that every time is within bounds and the times fit each other.
    ///
    /// # Errors
    /// With the first key that does not.
    pub fn check(&self) -> Result<(), InvalidOption> {
        let times = [
            ("retention.runs", self.runs),
            ("retention.output", self.output),
            ("retention.audit", self.audit),
        ];
        if let Some((key, _)) =
            times.into_iter().find(|(_, time)| !(MINIMUM..=MAXIMUM).contains(time))
        {
            let (least, most) = (duration::text(MINIMUM), duration::text(MAXIMUM));
            return Err(InvalidOption::new(key, format!("must be from {least} to {most}")));
        }
        let runs = format!("{}, as long as retention.runs", duration::text(self.runs));
        if self.output > self.runs {
            return Err(InvalidOption::new("retention.output", format!("must be at most {runs}")));
        }
        if self.audit < self.runs {
            return Err(InvalidOption::new("retention.audit", format!("must be at least {runs}")));
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
    /// See [`Retention::audit`].
    pub audit: Option<Duration>,
}

impl TenantRetention {
    pub(crate) fn from_columns(columns: [Option<PgInterval>; 3]) -> Self {
        let [runs, output, audit] = columns.map(|column| column.as_ref().map(row::duration));
        Self { runs, output, audit }
    }

    /// The retention with the installation's where the tenant has none.
    #[must_use]
    pub fn within(&self, installation: &Retention) -> Retention {
        Retention {
            runs: self.runs.unwrap_or(installation.runs),
            output: self.output.unwrap_or(installation.output),
            audit: self.audit.unwrap_or(installation.audit),
        }
    }

    fn detail(&self) -> Value {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs());
        json!({
            "runs_seconds": seconds(self.runs),
            "output_seconds": seconds(self.output),
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
            "UPDATE tenants SET retention_runs = $2, retention_output = $3, retention_audit = $4
             WHERE id = $1",
            id.as_str(),
            interval(retention.runs) as _,
            interval(retention.output) as _,
            interval(retention.audit) as _,
        )
        .execute(&mut *tx)
        .await?;
        if updated.rows_affected() > 0 {
            let field = Some("retention".to_owned());
            let body =
                EventBody { kind: EventKind::RetentionSet, field, detail: retention.detail() };
            audit::insert(&self.audit, &mut *tx, &EventSubject::by(key, Some(id)), &body).await?;
        }
        tx.commit().await?;
        self.tenant_get(id).await
    }

    /// The longest time that any tenant keeps runs and their output.
    pub(super) async fn retention_longest(
        &self,
        keep: &Retention,
    ) -> Result<(Duration, Duration), Error> {
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
