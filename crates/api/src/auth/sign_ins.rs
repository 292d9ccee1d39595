//! Records which keys are used from where, and which are refused. Both are bounded: neither a busy
//! key nor somebody who tries keys fills the audit.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use codelia_server::Source;
use codelia_store::{Caller, Error, EventBody, EventKind, EventSubject, RecentMap, Store};
use codelia_telemetry::task;
use codelia_types::KeyId;
use serde_json::{Value, json};

use crate::{cache::Recently, error::ApiError};

/// How long the use of a key from one address is not recorded again.
const USE_INTERVAL: Duration = Duration::from_secs(3600);
/// How long refusals of one address are counted, not recorded.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(60);
/// Refusals of all addresses that are recorded in [`REFUSAL_INTERVAL`].
const MAX_REFUSALS: u32 = 60;
/// Addresses to remember.
const CAPACITY: usize = 4096;

/// What this server recorded lately.
#[derive(Debug)]
pub(crate) struct SignIns {
    used: Recently<(KeyId, Source)>,
    refusals: Mutex<Refusals>,
}

#[derive(Debug)]
struct Refusals {
    /// When the last refusal of an address was recorded, and how many were not since.
    refused: RecentMap<Source, (Option<Instant>, u64)>,
    /// The beginning of the current interval, and the refusals that were recorded in it.
    recorded: Option<(Instant, u32)>,
}

impl Default for SignIns {
    fn default() -> Self {
        let refusals = Refusals { refused: RecentMap::new(CAPACITY), recorded: None };
        Self { used: Recently::new(USE_INTERVAL), refusals: Mutex::new(refusals) }
    }
}

impl SignIns {
    /// Records that a key is used, unless this server did so lately. The call is refused if that
    /// fails.
    pub(crate) async fn used(
        &self,
        store: &Store,
        caller: &Caller,
        source: Source,
    ) -> Result<(), Error> {
        if !self.used.is_due((caller.key, source), Instant::now()) {
            return Ok(());
        }
        let body = body(EventKind::KeyUsed, json!({ "from": from(source) }));
        let stored = store.audit_insert(&subject(caller), &body).await;
        if stored.is_err() {
            self.used.forget(&(caller.key, source));
        }
        stored
    }

    /// Whether this server has recorded lately that the key is used from there.
    pub(crate) fn is_recorded(&self, key: KeyId, source: Source) -> bool {
        self.used.is_done(&(key, source), Instant::now())
    }

    /// Records in the background that a key was refused; `caller` if the key is known.
    pub(crate) fn refused(
        &self,
        store: &Store,
        caller: Option<&Caller>,
        source: Source,
        error: &ApiError,
    ) {
        let Some(count) = self.refusals_due(source, Instant::now()) else { return };
        let detail =
            json!({ "from": from(source), "reason": error.reason().as_str(), "count": count });
        let store = store.clone();
        let subject = caller.map(subject).unwrap_or_default();
        task::background("key refused", async move {
            if let Err(error) =
                store.audit_insert(&subject, &body(EventKind::KeyRefused, detail)).await
            {
                tracing::warn!(%error, "cannot record that a key was refused");
            }
        });
    }

    fn refusals_due(&self, source: Source, now: Instant) -> Option<u64> {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.due(source, now)
    }
}

impl Refusals {
    /// How many refusals of an address to record now. `None` if they are only counted.
    fn due(&mut self, source: Source, now: Instant) -> Option<u64> {
        let is_recent = |at: &Instant| now.duration_since(*at) < REFUSAL_INTERVAL;
        let (begun_at, recorded) =
            self.recorded.filter(|(at, _)| is_recent(at)).unwrap_or((now, 0));
        let (last, uncounted) =
            self.refused.get(&source).map_or((None, 0), |(at, count)| (*at, *count));
        if last.as_ref().is_some_and(is_recent) || recorded >= MAX_REFUSALS {
            self.refused.insert(source, (last, uncounted + 1));
            return None;
        }
        self.recorded = Some((begun_at, recorded + 1));
        self.refused.insert(source, (Some(now), 0));
        Some(uncounted + 1)
    }
}

/// The address, or nothing if the call came through a Unix socket.
fn from(Source(address): Source) -> Value {
    json!(address.map(|address| address.to_string()))
}

fn subject(caller: &Caller) -> EventSubject {
    EventSubject {
        tenant: Some(caller.tenant.clone()),
        key: Some(caller.key),
        ..EventSubject::default()
    }
}

fn body(kind: EventKind, detail: Value) -> EventBody {
    EventBody { kind, field: None, detail }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn source(number: u32) -> Source {
        Source(Some(IpAddr::V4(Ipv4Addr::from_bits(number))))
    }

    #[test]
    fn use_is_recorded_once_an_hour_for_each_address() {
        let (signs, key, now) = (SignIns::default(), KeyId::generate(), Instant::now());
        let due = |source, now| signs.used.is_due((key, source), now);
        assert!(due(source(1), now) && due(source(2), now));
        assert!(!due(source(1), now + USE_INTERVAL / 2));
        assert!(due(source(1), now + USE_INTERVAL));
    }

    #[test]
    fn refusals_are_counted_and_bounded() {
        let (signs, now) = (SignIns::default(), Instant::now());
        let due = |number, now| signs.refusals_due(source(number), now);
        assert_eq!(due(0, now), Some(1));
        for _ in 0..1000 {
            assert_eq!(due(0, now), None);
        }
        let recorded = (1..1000).filter(|number| due(*number, now).is_some()).count();
        assert_eq!(recorded + 1, MAX_REFUSALS as usize);
        assert_eq!(due(0, now + REFUSAL_INTERVAL), Some(1001), "those before were counted");
    }
}
