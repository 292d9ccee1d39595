//! Which keys are looked up in the store: wrong keys must not cost a query each.
//!
//! A key that was valid before is always looked up. A key that was wrong a moment ago is refused
//! without a query. Any other key takes a token of its source, which it gets back if it is valid:
//! so a source with too many wrong keys cannot lock out a key that this server knows. Concurrent
//! calls with such a key take turns, so that the many calls that follow a restart take one token.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use codelia_server::Source;
use codelia_store::RecentMap;
use codelia_types::Reason;
use tokio::sync;

use crate::error::ApiError;

/// How long a wrong key is refused without a query.
const REMEMBER_WRONG: Duration = Duration::from_secs(60);
/// Keys and sources to remember, of each kind.
const CAPACITY: usize = 4096;
const MINUTE: f64 = 60.0;

type KeyHash = [u8; 32];

/// Limits the lookups of wrong keys.
#[derive(Debug)]
pub(crate) struct KeyGuard {
    /// Wrong keys of one source; 0 turns the limit off.
    per_minute: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    valid: RecentMap<KeyHash, ()>,
    wrong: RecentMap<KeyHash, Instant>,
    sources: RecentMap<Source, Tokens>,
    /// Who looks up a key that is not known to be valid.
    lookups: HashMap<KeyHash, Weak<sync::Mutex<()>>>,
}

/// The only lookup of a key that is not known to be valid, until it is dropped.
pub(crate) type LookupLock = sync::OwnedMutexGuard<()>;

/// How many more wrong keys a source may send. A rate limiter of `governor` cannot return a token.
#[derive(Debug, Clone, Copy)]
struct Tokens {
    count: f64,
    counted_at: Instant,
}

/// A permitted lookup.
#[derive(Debug)]
pub(crate) struct Lookup {
    hash: KeyHash,
    /// The source that paid a token.
    paid_by: Option<Source>,
}

impl Lookup {
    /// Whether it cost a token.
    pub(crate) fn is_paid(&self) -> bool {
        self.paid_by.is_some()
    }
}

impl KeyGuard {
    pub(crate) fn new(per_minute: u32) -> Self {
        let state = State {
            valid: RecentMap::new(CAPACITY),
            wrong: RecentMap::new(CAPACITY),
            sources: RecentMap::new(CAPACITY),
            lookups: HashMap::new(),
        };
        Self { per_minute, state: Mutex::new(state) }
    }

    /// Waits until no other call looks up this key; `None` if calls with it need not take turns.
    pub(crate) async fn lock_lookup(&self, hash: KeyHash) -> Option<LookupLock> {
        let lock = {
            let mut state = self.lock();
            if state.valid.get(&hash).is_some() || self.per_minute == 0 {
                return None;
            }
            let waiting = state.lookups.get(&hash).and_then(Weak::upgrade);
            waiting.unwrap_or_else(|| {
                state.lookups.retain(|_, lock| lock.strong_count() > 0);
                let lock = Arc::default();
                state.lookups.insert(hash, Arc::downgrade(&lock));
                lock
            })
        };
        Some(lock.lock_owned().await)
    }

    /// Permits a lookup, or says why there is none.
    pub(crate) fn begin(
        &self,
        hash: KeyHash,
        source: Source,
        now: Instant,
    ) -> Result<Lookup, ApiError> {
        let mut state = self.lock();
        if state.valid.get(&hash).is_some() || self.per_minute == 0 {
            return Ok(Lookup { hash, paid_by: None });
        }
        match state.wrong.get(&hash) {
            Some(seen) if now.duration_since(*seen) < REMEMBER_WRONG => {
                return Err(ApiError::unauthenticated());
            }
            _ => {}
        }
        let mut tokens = self.tokens(&mut state, source, now);
        if tokens.count < 1.0 {
            let missing = (1.0 - tokens.count) * MINUTE / f64::from(self.per_minute);
            return Err(too_many_failed_keys(Duration::from_secs_f64(missing)));
        }
        tokens.count -= 1.0;
        state.sources.insert(source, tokens);
        Ok(Lookup { hash, paid_by: Some(source) })
    }

    /// Records the result of a lookup. A lookup that is dropped instead keeps its token.
    pub(crate) fn end(&self, lookup: Lookup, is_valid: bool, now: Instant) {
        let mut state = self.lock();
        if !is_valid {
            state.valid.remove(&lookup.hash);
            state.wrong.insert(lookup.hash, now);
            return;
        }
        state.valid.insert(lookup.hash, ());
        self.pay_back(&mut state, &lookup, now);
    }

    /// Undoes a lookup that the store could not answer.
    pub(crate) fn undo(&self, lookup: &Lookup, now: Instant) {
        self.pay_back(&mut self.lock(), lookup, now);
    }

    fn pay_back(&self, state: &mut State, lookup: &Lookup, now: Instant) {
        let Some(source) = lookup.paid_by else { return };
        let mut tokens = self.tokens(state, source, now);
        tokens.count += 1.0;
        state.sources.insert(source, tokens);
    }

    /// The tokens of a source now: at most those of a minute.
    fn tokens(&self, state: &mut State, source: Source, now: Instant) -> Tokens {
        let most = f64::from(self.per_minute);
        let count = state.sources.get(&source).map_or(most, |tokens| {
            let gained = now.duration_since(tokens.counted_at).as_secs_f64() * most / MINUTE;
            (tokens.count + gained).min(most)
        });
        Tokens { count, counted_at: now }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address sent too many wrong keys.
fn too_many_failed_keys(delay: Duration) -> ApiError {
    let seconds = delay.as_secs().max(1);
    let message =
        format!("too many invalid API keys from this address; check the key, retry in {seconds} s");
    ApiError::new(Reason::TooManyFailedKeys, message).retry_after(delay)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Source = Source(None);

    fn there() -> Source {
        Source(Some([10, 0, 0, 1].into()))
    }

    /// Looks a key up and returns whether that cost a query.
    fn try_key(
        guard: &KeyGuard,
        number: u8,
        is_valid: bool,
        source: Source,
    ) -> Result<(), ApiError> {
        let now = Instant::now();
        guard.begin([number; 32], source, now).map(|lookup| guard.end(lookup, is_valid, now))
    }

    #[test]
    fn wrong_keys_of_a_source_are_limited() {
        let guard = KeyGuard::new(3);
        for number in 0..3 {
            assert_eq!(try_key(&guard, number, false, HERE), Ok(()));
        }
        let refused = try_key(&guard, 3, false, HERE);
        assert!(refused.is_err_and(|error| error.reason() == Reason::TooManyFailedKeys));
        assert_eq!(try_key(&guard, 3, false, there()), Ok(()), "another source has its own limit");
        let later = Instant::now() + Duration::from_secs(61);
        assert!(guard.begin([9; 32], HERE, later).is_ok(), "the limit is for a minute");
    }

    #[test]
    fn wrong_key_is_refused_without_a_query() {
        let guard = KeyGuard::new(3);
        assert_eq!(try_key(&guard, 1, false, HERE), Ok(()));
        for _ in 0..10 {
            assert_eq!(try_key(&guard, 1, false, HERE), Err(ApiError::unauthenticated()));
        }
        assert_eq!(try_key(&guard, 2, false, HERE), Ok(()), "it costs no token either");
        let later = Instant::now() + REMEMBER_WRONG;
        assert!(guard.begin([1; 32], HERE, later).is_ok());
    }

    #[test]
    fn valid_keys_cost_nothing_and_pass_a_blocked_source() {
        let guard = KeyGuard::new(1);
        for number in 0..10 {
            assert_eq!(try_key(&guard, number, true, HERE), Ok(()));
        }
        assert_eq!(try_key(&guard, 100, false, HERE), Ok(()));
        assert!(try_key(&guard, 101, false, HERE).is_err());
        assert_eq!(try_key(&guard, 5, true, HERE), Ok(()), "known");
        assert_eq!(try_key(&guard, 5, false, HERE), Ok(()), "revoked: the store says so");
        assert_eq!(try_key(&guard, 5, false, HERE), Err(ApiError::unauthenticated()));
    }

    #[tokio::test]
    async fn calls_with_an_unknown_key_take_turns() {
        let guard = KeyGuard::new(1);
        let first = guard.lock_lookup([1; 32]).await;
        let mut second = std::pin::pin!(guard.lock_lookup([1; 32]));
        assert!(futures::poll!(&mut second).is_pending());
        assert!(guard.lock_lookup([2; 32]).await.is_some(), "another key does not wait");
        assert_eq!(try_key(&guard, 1, true, HERE), Ok(()));
        drop(first);
        assert!(second.await.is_some());
        assert!(guard.lock_lookup([1; 32]).await.is_none(), "it is known now");
        guard.lock_lookup([3; 32]).await;
        assert_eq!(guard.lock().lookups.len(), 1, "those that ended are forgotten");
    }

    #[test]
    fn zero_means_no_limit() {
        let guard = KeyGuard::new(0);
        assert!((0..100).all(|number| try_key(&guard, number, false, HERE).is_ok()));
    }
}
