//! Counts what happens under flags, in memory, and adds it to the database in batches.

use std::{
    collections::BTreeMap,
    mem::take,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use codelia_policy::{FlagNumbers, FlagRef};

use crate::{Error, Store};

/// Counts what happened under flags since the last flush. Nothing is written for a single session
/// or run.
#[derive(Debug, Default)]
pub struct FlagTally(Mutex<BTreeMap<FlagRef, FlagNumbers>>);

impl FlagTally {
    /// Time between two flushes.
    pub const INTERVAL: Duration = Duration::from_secs(1);

    /// Counts something under a revision of a flag.
    pub fn count(&self, flag: &FlagRef, count: impl FnOnce(&mut FlagNumbers)) {
        count(self.lock().entry(flag.clone()).or_default());
    }

    /// Adds the numbers to the database. What fails is added again later.
    ///
    /// # Errors
    /// If the database does not answer.
    pub async fn flush(&self, store: &Store) -> Result<(), Error> {
        let mut taken = take(&mut *self.lock());
        let mut result = Ok(());
        while let Some((flag, numbers)) = taken.pop_first() {
            result = store.flag_count(&flag, &numbers).await;
            if result.is_err() {
                taken.insert(flag, numbers);
                break;
            }
        }
        for (flag, numbers) in taken {
            self.count(&flag, |now| add(now, &numbers));
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<FlagRef, FlagNumbers>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add(now: &mut FlagNumbers, more: &FlagNumbers) {
    now.sessions += more.sessions;
    now.refused_sessions += more.refused_sessions;
    now.runs += more.runs;
    now.refused_runs += more.refused_runs;
    now.failed_runs += more.failed_runs;
    let length = now.setups.len().max(more.setups.len());
    now.setups.resize(length, 0);
    now.setups.iter_mut().zip(&more.setups).for_each(|(now, more)| *now += more);
}

impl Store {
    /// Adds numbers to a revision of a flag, if it is still known.
    pub async fn flag_count(&self, flag: &FlagRef, numbers: &FlagNumbers) -> Result<(), Error> {
        let setups: Vec<i64> = numbers.setups.iter().map(|count| count.cast_signed()).collect();
        sqlx::query!(
            "UPDATE flag_revisions SET
                 sessions = sessions + $3, refused_sessions = refused_sessions + $4, runs = runs + $5,
                 refused_runs = refused_runs + $6, failed_runs = failed_runs + $7,
                 setups = ARRAY(SELECT coalesce(more.stored, 0) + coalesce(more.added, 0)
                                FROM unnest(setups, $8::bigint[]) WITH ORDINALITY AS more (stored, added, place)
                                ORDER BY place)
             WHERE flag_id = $1 AND revision = $2",
            flag.id.as_str(),
            flag.revision,
            numbers.sessions.cast_signed(),
            numbers.refused_sessions.cast_signed(),
            numbers.runs.cast_signed(),
            numbers.refused_runs.cast_signed(),
            numbers.failed_runs.cast_signed(),
            &setups,
        )
        .execute(&self.pools.runs)
        .await?;
        Ok(())
    }
}
