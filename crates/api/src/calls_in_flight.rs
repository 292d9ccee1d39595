//! Limits what one key may have open at the same time: calls, watches, and bytes of requests.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use codelia_telemetry::metrics;
use codelia_types::KeyId;

use crate::{options::CallLimits, status::ApiError};

const MIB: usize = 1024 * 1024;

/// The open calls of each key.
#[derive(Debug)]
pub(crate) struct CallsInFlight {
    limits: CallLimits,
    by_key: Mutex<HashMap<KeyId, OpenCalls>>,
}

#[derive(Debug, Default, Clone, Copy)]
struct OpenCalls {
    calls: usize,
    watches: usize,
    bytes: usize,
}

/// An open call, until this is dropped.
#[derive(Debug)]
pub(crate) struct CallPermit {
    in_flight: Arc<CallsInFlight>,
    key: KeyId,
    is_watch: bool,
    /// Bytes of its request that it holds.
    bytes: AtomicUsize,
}

impl CallsInFlight {
    pub(crate) fn new(limits: CallLimits) -> Arc<Self> {
        Arc::new(Self { limits, by_key: Mutex::default() })
    }

    /// Opens a call. A watch is one that may stay open as long as a run.
    pub(crate) fn open(self: &Arc<Self>, key: KeyId, is_watch: bool) -> Result<CallPermit, ApiError> {
        let mut by_key = self.lock();
        let open = by_key.entry(key).or_default();
        check("max_calls_per_key", open.calls + 1, self.limits.max_calls_per_key)?;
        if is_watch {
            check("max_watches_per_key", open.watches + 1, self.limits.max_watches_per_key)?;
        }
        open.calls += 1;
        open.watches += usize::from(is_watch);
        metrics().calls_changed(1);
        Ok(CallPermit { in_flight: self.clone(), key, is_watch, bytes: AtomicUsize::new(0) })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KeyId, OpenCalls>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CallPermit {
    /// Counts the bytes of a message that the call is about to receive.
    pub(crate) fn hold(&self, bytes: usize) -> Result<(), ApiError> {
        let mut by_key = self.in_flight.lock();
        let open = by_key.entry(self.key).or_default();
        let max = self.in_flight.limits.max_request_bytes_per_key;
        if open.bytes + bytes > max {
            return Err(ApiError::TooManyCalls { limit: "max_request_mb_per_key", max: max / MIB });
        }
        open.bytes += bytes;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Stops counting the bytes of its messages.
    pub(crate) fn release(&self) {
        let held = self.bytes.swap(0, Ordering::Relaxed);
        if let Some(open) = self.in_flight.lock().get_mut(&self.key) {
            open.bytes -= held;
        }
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        self.release();
        metrics().calls_changed(-1);
        let mut by_key = self.in_flight.lock();
        let Some(open) = by_key.get_mut(&self.key) else { return };
        open.calls -= 1;
        open.watches -= usize::from(self.is_watch);
        if open.calls == 0 {
            by_key.remove(&self.key);
        }
    }
}

fn check(limit: &'static str, count: usize, max: usize) -> Result<(), ApiError> {
    if count > max { Err(ApiError::TooManyCalls { limit, max }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_watches_and_bytes_of_a_key_are_limited() {
        let limits = CallLimits {
            max_calls_per_key: 3,
            max_watches_per_key: 1,
            max_request_bytes_per_key: MIB,
            ..CallLimits::default()
        };
        let (in_flight, key) = (CallsInFlight::new(limits), KeyId::generate());
        let refused = |limit, max| Some(ApiError::TooManyCalls { limit, max });
        let watch = in_flight.open(key, true).unwrap();
        assert_eq!(in_flight.open(key, true).err(), refused("max_watches_per_key", 1));
        let call = in_flight.open(key, false).unwrap();
        let last = in_flight.open(key, false).unwrap();
        assert_eq!(in_flight.open(key, false).err(), refused("max_calls_per_key", 3));
        assert!(in_flight.open(KeyId::generate(), true).is_ok(), "another key has its own limits");

        assert_eq!(call.hold(MIB / 2), Ok(()));
        assert_eq!(last.hold(MIB / 2 + 1).err(), refused("max_request_mb_per_key", 1));
        call.release();
        assert_eq!(last.hold(MIB / 2 + 1), Ok(()));
        drop((watch, call, last));
        assert!(in_flight.lock().is_empty(), "ended calls leave nothing");
    }
}
