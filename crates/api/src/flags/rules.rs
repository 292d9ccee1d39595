//! The rules of mode flags that are in force, in memory: creating a session reads nothing for them.
//! [`super::follow()`] reads them again when their version has changed.

use std::{
    collections::BTreeSet,
    sync::{Arc, RwLock},
};

use codelia_policy::{FlagChoice, FlagRef, FlagSubject, Flags, IsolationLevel};
use codelia_store::{Error, FlagTally, SessionSpec, Store};
use codelia_telemetry::metrics;
use codelia_types::Mode;
use tokio::sync::Mutex;

use crate::error::ApiError;

/// The rules in force, and what happened under them.
#[derive(Debug, Default)]
pub(crate) struct FlagRules {
    /// `None` until they were read once: then nothing is known about new sessions.
    current: RwLock<Option<Arc<Snapshot>>>,
    /// One reader at a time, so that an older version never replaces a newer one.
    reading: Mutex<()>,
    tally: FlagTally,
}

#[derive(Debug)]
struct Snapshot {
    version: i64,
    flags: Flags,
}

impl FlagRules {
    /// What flags decide about a new session. Reads the store only if the rules were never read.
    pub(crate) async fn choose(
        &self,
        store: &Store,
        subject: FlagSubject<'_>,
        floor: IsolationLevel,
    ) -> Result<FlagChoice, ApiError> {
        if self.current().is_none() {
            self.refresh(store).await?;
        }
        let current =
            self.current().ok_or_else(|| ApiError::unavailable("mode flags were not read yet"))?;
        Ok(current.flags.choose(subject, floor))
    }

    /// Counts a session that was created.
    pub(crate) fn created(&self, spec: &SessionSpec) {
        let Some(flag) = &spec.flags.mode else { return };
        self.tally.count(flag, |numbers| numbers.sessions += 1);
        metrics().flags.session(flag.id.as_str(), spec.mode.as_str());
    }

    /// Counts a session that was refused because of a flag.
    pub(crate) fn refused(&self, flag: Option<&FlagRef>) {
        let Some(flag) = flag else { return };
        self.tally.count(flag, |numbers| numbers.refused_sessions += 1);
        metrics().flags.session_refused(flag.id.as_str());
    }

    /// Reads the rules, if they have changed.
    pub(crate) async fn refresh(&self, store: &Store) -> Result<(), Error> {
        let _reading = self.reading.lock().await;
        let before = self.current();
        let known = before.as_ref().map(|snapshot| snapshot.version);
        let Some((version, flags)) = store.flag_rules(known).await? else { return Ok(()) };
        tracing::info!(version, rules = flags.iter().count(), "mode flags changed");
        report(before.as_ref().map(|snapshot| &snapshot.flags), &flags);
        let snapshot = Some(Arc::new(Snapshot { version, flags }));
        *self.current.write().unwrap_or_else(std::sync::PoisonError::into_inner) = snapshot;
        Ok(())
    }

    /// Stores what was counted.
    pub(super) async fn store_counts(&self, store: &Store) {
        if let Err(error) = self.tally.flush(store).await {
            tracing::warn!(%error, "cannot store what happened under mode flags, retrying");
        }
    }

    fn current(&self) -> Option<Arc<Snapshot>> {
        self.current.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

/// Shows the share of each rule, and 0 for those that are gone.
fn report(before: Option<&Flags>, now: &Flags) {
    let labels = |flags: &Flags| -> BTreeSet<(String, &'static str)> {
        flags
            .iter()
            .map(|(flag, rule)| (flag.id.to_string(), rule.mode.map_or("", Mode::as_str)))
            .collect()
    };
    for (flag, mode) in before.map(labels).unwrap_or_default() {
        metrics().flags.percent(&flag, mode, 0);
    }
    for (flag, rule) in now.iter() {
        metrics().flags.percent(flag.id.as_str(), rule.mode.map_or("", Mode::as_str), rule.percent);
    }
}
