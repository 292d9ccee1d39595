//! Deletes the audit of old days, and records how far each chain went.

use std::time::Duration;

use serde_json::json;
use time::Date;

use super::{
    chain::Head,
    event::{EventBody, EventSubject},
    kind::EventKind,
};
use crate::{Error, Store, row};

impl Store {
    /// Drops the days that are older than the installation and every tenant keep audits.
    pub(crate) async fn audit_partitions_drop(&self, keep: Duration) -> Result<(), Error> {
        let first_kept = sqlx::query_scalar!(
            r#"SELECT ((now() - greatest($1::interval, max(retention_audit))) AT TIME ZONE 'UTC')::date - 1 AS "day!"
               FROM tenants"#,
            row::interval(keep),
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        self.audit_drop_before(first_kept).await
    }

    /// Drops the days before this one. What is dropped is recorded in the same transaction, so that
    /// the rest of each chain stays verifiable.
    pub async fn audit_drop_before(&self, first_kept: Date) -> Result<(), Error> {
        let due = sqlx::query_scalar!(
            r#"SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS "day!"
               FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
               WHERE i.inhparent = 'audit'::regclass AND c.relname <> 'audit_default'
                 AND to_date(right(c.relname, 8), 'YYYYMMDD') < $1
               ORDER BY 1"#,
            first_kept,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        for day in due {
            let mut tx = self.pools.upkeep.begin().await?;
            let heads = sqlx::query_as!(
                Head,
                r#"SELECT writer, max(number) AS "number!" FROM audit_checkpoints
                   WHERE at < (($1::date + 1)::timestamp AT TIME ZONE 'UTC') + interval '1 minute' GROUP BY writer"#,
                day,
            )
            .fetch_all(&mut *tx)
            .await?;
            let detail = json!({ "day": day.to_string(), "heads": heads });
            let body = EventBody::new(EventKind::AuditExpired, detail);
            self.audit.insert(&mut *tx, &EventSubject::default(), &body).await?;
            sqlx::query!("SELECT drop_audit_partition($1)", day).execute(&mut *tx).await?;
            tx.commit().await?;
            tracing::info!(%day, "dropped the audit of a day");
        }
        Ok(())
    }
}
