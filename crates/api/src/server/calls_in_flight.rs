//! Limits what one key may have open at the same time: calls, watches, and bytes of requests.

use std::{
    collections::HashMap,
    fmt::Display,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use codelia_telemetry::metrics;
use codelia_types::{KeyId, Reason};

use crate::{error::ApiError, options::ApiOptions};

/// The open calls of each key.
#[derive(Debug)]
pub(crate) struct CallsInFlight {
    limits: ApiOptions,
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
    pub(crate) fn new(limits: ApiOptions) -> Arc<Self> {
        Arc::new(Self { limits, by_key: Mutex::default() })
    }

    /// Opens a call. A watch is one that may stay open as long as a run.
    pub(crate) fn open(
        self: &Arc<Self>,
        key: KeyId,
        is_watch: bool,
    ) -> Result<CallPermit, ApiError> {
        let mut by_key = self.lock();
        let open = by_key.entry(key).or_default();
        check("max_calls_per_key", open.calls + 1, self.limits.max_calls_per_key.get())?;
        if is_watch {
            check("max_watches_per_key", open.watches + 1, self.limits.max_watches_per_key.get())?;
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
        let max = self.in_flight.limits.max_request_size_per_key;
        if u64::try_from(open.bytes + bytes).is_ok_and(|bytes| bytes > max.bytes()) {
            return Err(too_many("max_request_size_per_key", max));
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

/// The key has too many open calls, watches or bytes of requests.
fn too_many(limit: &str, max: impl Display) -> ApiError {
    let message = format!(
        "the API key has too many open calls: `{limit}` is {max}; finish some, or ask an operator to raise \
         api.{limit}"
    );
    ApiError::new(Reason::TooManyCalls, message).with("limit", limit)
}

fn check(limit: &'static str, count: usize, max: usize) -> Result<(), ApiError> {
    if count > max { Err(too_many(limit, max)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use codelia_types::ByteSize;

    use super::*;

    #[test]
    fn calls_watches_and_bytes_of_a_key_are_limited() {
        const MIB: usize = 1024 * 1024;
        let limits = ApiOptions {
            max_calls_per_key: NonZeroUsize::new(3).unwrap(),
            max_watches_per_key: NonZeroUsize::MIN,
            max_request_size_per_key: ByteSize::mib(1),
            ..ApiOptions::default()
        };
        let (in_flight, key) = (CallsInFlight::new(limits), KeyId::generate());
        let refused = |limit, max: &str| Some(too_many(limit, max));
        let watch = in_flight.open(key, true).unwrap();
        assert_eq!(in_flight.open(key, true).err(), refused("max_watches_per_key", "1"));
        let call = in_flight.open(key, false).unwrap();
        let last = in_flight.open(key, false).unwrap();
        assert_eq!(in_flight.open(key, false).err(), refused("max_calls_per_key", "3"));
        assert!(in_flight.open(KeyId::generate(), true).is_ok(), "another key has its own limits");

        assert_eq!(call.hold(MIB / 2), Ok(()));
        assert_eq!(last.hold(MIB / 2 + 1).err(), refused("max_request_size_per_key", "1 MiB"));
        call.release();
        assert_eq!(last.hold(MIB / 2 + 1), Ok(()));
        drop((watch, call, last));
        assert!(in_flight.lock().is_empty(), "ended calls leave nothing");
    }
}
