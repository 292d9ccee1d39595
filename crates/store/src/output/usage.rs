//! The tables `output_changes` and `tenant_output`: how much output tenants store. A commit appends
//! its change; the changes are added up in batches.

use crate::{Error, Store};

impl Store {
    /// Adds up at most `limit` changes and returns how many there were. Only one caller at a time
    /// has an effect. Call it about once a second.
    pub async fn output_fold_any_tenant(&self, limit: i64) -> Result<i64, Error> {
        let mut tx = self.pools.upkeep.begin().await?;
        // An old snapshot keeps deleted changes in the index. Start after those that are surely
        // done, and from the first one only once an hour.
        let fold = sqlx::query!(
            r#"SELECT after, next, set_at < now() - interval '1 minute' AS "is_due!",
                      extract(hour FROM set_at) <> extract(hour FROM now()) AS "is_new_hour!"
               FROM output_fold FOR UPDATE SKIP LOCKED"#
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(fold) = fold else { return Ok(0) };
        let added = sqlx::query_file!("src/sql/output_fold.sql", fold.after, limit)
            .fetch_one(&mut *tx)
            .await?;
        if fold.is_due {
            // A transaction that took an id before `next` was set has ended since.
            let after = if fold.is_new_hour { 0 } else { fold.next };
            sqlx::query!(
                "UPDATE output_fold SET after = $1, next = greatest(next, $2), set_at = now()",
                after,
                added.last,
            )
            .execute(&mut *tx)
            .await?;
        }
        tx.commit().await?;
        Ok(added.count)
    }
}
