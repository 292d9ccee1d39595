//! Removes output objects that no row names: first the row goes, then the object.
//!
//! A slow or broken store must not delay the other upkeep, so this is a loop of its own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::time::sleep;
use uuid::Uuid;

use super::{PURGE_INTERVAL, PURGE_TIME, Retention};
use crate::{Error, Store, objects::ObjectName, row};

/// Objects that one call removes.
const MAX_OBJECTS: usize = 1000;
/// Time until a process that is not the owner, or that failed, tries again.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// Removes objects while this process is the owner, until it is dropped.
pub(super) async fn run(store: Store, keep: Retention, is_owner: Arc<AtomicBool>) {
    if store.objects.is_none() {
        return;
    }
    loop {
        if !is_owner.load(Ordering::Relaxed) {
            sleep(RETRY_DELAY).await;
            continue;
        }
        let delay = match store.output_objects_purge_any_tenant(&keep).await {
            Ok(true) => Duration::ZERO,
            Ok(false) => PURGE_INTERVAL,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "cannot remove output objects, retrying");
                RETRY_DELAY
            }
        };
        sleep(delay).await;
    }
}

impl Store {
    /// Removes objects for a limited time, and returns whether there may be more.
    ///
    /// # Errors
    /// If the store of objects or the database fails. The next pass repeats what is left.
    pub async fn output_objects_purge_any_tenant(&self, keep: &Retention) -> Result<bool, Error> {
        let deadline = Instant::now() + PURGE_TIME;
        while self.output_remove_any_tenant(MAX_OBJECTS).await? {
            if Instant::now() >= deadline {
                return Ok(true);
            }
        }
        self.output_sweep_any_tenant(keep, deadline).await
    }

    /// The days that have objects.
    ///
    /// # Errors
    /// If the store of objects fails.
    pub async fn output_days(&self) -> Result<Vec<String>, Error> {
        match &self.objects {
            Some(objects) => objects.days().await,
            None => Ok(Vec::new()),
        }
    }

    /// Removes objects whose rows were deleted, at most `limit`, and returns whether there may be
    /// more.
    async fn output_remove_any_tenant(&self, limit: usize) -> Result<bool, Error> {
        let Some(objects) = &self.objects else { return Ok(false) };
        let names = sqlx::query_scalar!(
            "SELECT object FROM output_removals ORDER BY object LIMIT $1",
            i64::try_from(limit).unwrap_or(i64::MAX),
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        // A row that this program did not write may name anything.
        let own: Vec<String> =
            names.iter().filter(|name| name.parse::<ObjectName>().is_ok()).cloned().collect();
        objects.delete(&own).await?;
        sqlx::query!("DELETE FROM output_removals WHERE object = ANY ($1)", &names)
            .execute(&self.pools.upkeep)
            .await?;
        Ok(names.len() >= limit)
    }

    /// Removes what is left of days whose output nobody keeps: after their rows were dropped, and
    /// what fenced and crashed workers wrote. Returns whether there may be more.
    async fn output_sweep_any_tenant(
        &self,
        keep: &Retention,
        deadline: Instant,
    ) -> Result<bool, Error> {
        let Some(objects) = &self.objects else { return Ok(false) };
        let (_, longest) = self.retention_longest(keep).await?;
        // As the partitions of days, see `run_partitions_due`.
        let last = sqlx::query_scalar!(
            r#"SELECT to_char(((now() - $1::interval) AT TIME ZONE 'UTC')::date - 2, 'YYYYMMDD') AS "day!""#,
            row::interval(longest),
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        let is_day = |day: &String| day.len() == 8 && day.bytes().all(|byte| byte.is_ascii_digit());
        let mut removed = 0;
        for day in self.output_days().await?.into_iter().filter(|day| is_day(day) && *day <= last) {
            let mut list = objects.list(&day).await?;
            loop {
                if Instant::now() >= deadline {
                    return Ok(removed > 0);
                }
                let names = list.next(MAX_OBJECTS).await?;
                if names.is_empty() {
                    break;
                }
                let garbage = self.output_garbage_any_tenant(&names).await?;
                objects.delete(&garbage).await?;
                removed += garbage.len();
            }
            objects.remove_day(&day).await?;
        }
        Ok(false)
    }

    /// Filters objects for those that no row names. A worker writes an object before its row, but
    /// only while the run is live; the end of a run and its last rows are one statement.
    async fn output_garbage_any_tenant(&self, names: &[String]) -> Result<Vec<String>, Error> {
        let parsed = names.iter().filter_map(|name| Some((name, name.parse::<ObjectName>().ok()?)));
        let (names, parsed): (Vec<&String>, Vec<ObjectName>) = parsed.unzip();
        let runs: Vec<Uuid> = parsed.iter().map(|name| name.run.0).collect();
        let starts: Vec<i64> = parsed.iter().map(|name| name.position).collect();
        let ends: Vec<i64> =
            parsed.iter().map(|name| name.position.saturating_add(name.length)).collect();
        let garbage = sqlx::query_scalar!(
            r#"SELECT n.object AS "object!"
               FROM unnest($1::text[], $2::uuid[], $3::bigint[], $4::bigint[]) AS n (object, run_id, first, until)
               -- Not joins, which could read all rows.
               WHERE (SELECT r.id FROM live_runs r WHERE r.id = n.run_id LIMIT 1) IS NULL
                 AND (SELECT o.run_id FROM run_output o
                      WHERE o.run_id = n.run_id AND o.position >= n.first AND o.position < n.until
                        AND o.object = n.object LIMIT 1) IS NULL"#,
            &names as _,
            &runs,
            &starts,
            &ends,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        Ok(garbage)
    }
}
