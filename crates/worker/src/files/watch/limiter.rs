//! Limits watches: each holds an inotify instance and a queue in the kernel, and each directory a
//! watch that keeps its inode in memory.

use std::sync::Arc;

use codelia_types::SessionId;
use parking_lot::Mutex;

const MAX_WATCHES: usize = 64;
const MAX_WATCHES_PER_TENANT: usize = 16;
const MAX_WATCHES_PER_SESSION: usize = 8;
const MAX_DIRECTORIES: usize = 32_768;
const MAX_DIRECTORIES_PER_TENANT: usize = 8_192;
/// Directories of one watch.
pub(super) const MAX_DIRECTORIES_PER_WATCH: usize = 4_096;

/// Counts the open watches and their directories.
#[derive(Debug, Default)]
pub(in super::super) struct WatchLimiter {
    open: Mutex<Vec<Held>>,
}

#[derive(Debug)]
struct Held {
    tenant: String,
    session: SessionId,
    directories: usize,
}

/// Permission for one watch, which ends when this is dropped.
#[derive(Debug)]
pub(in super::super) struct WatchPermit {
    limiter: Arc<WatchLimiter>,
    tenant: String,
    session: SessionId,
    directories: usize,
}

impl WatchLimiter {
    /// Permission for one more watch; `None` if there are too many.
    pub(in super::super) fn try_acquire(
        self: &Arc<Self>,
        tenant: &str,
        session: SessionId,
    ) -> Option<WatchPermit> {
        let mut open = self.open.lock();
        let of_tenant = open.iter().filter(|held| held.tenant == tenant).count();
        let of_session = open.iter().filter(|held| held.session == session).count();
        if open.len() >= MAX_WATCHES
            || of_tenant >= MAX_WATCHES_PER_TENANT
            || of_session >= MAX_WATCHES_PER_SESSION
        {
            return None;
        }
        open.push(Held { tenant: tenant.to_owned(), session, directories: 0 });
        Some(WatchPermit {
            limiter: self.clone(),
            tenant: tenant.to_owned(),
            session,
            directories: 0,
        })
    }
}

impl WatchPermit {
    /// Sets the number of watched directories; `false` if that is too many.
    pub(super) fn try_set_directories(&mut self, directories: usize) -> bool {
        let mut open = self.limiter.open.lock();
        let all: usize = open.iter().map(|held| held.directories).sum();
        let of_tenant: usize = open
            .iter()
            .filter(|held| held.tenant == self.tenant)
            .map(|held| held.directories)
            .sum();
        let more = directories.saturating_sub(self.directories);
        if directories > MAX_DIRECTORIES_PER_WATCH
            || of_tenant + more > MAX_DIRECTORIES_PER_TENANT
            || all + more > MAX_DIRECTORIES
        {
            return false;
        }
        if let Some(own) = open.iter_mut().find(|held| self.is_own(held)) {
            own.directories = directories;
        }
        drop(open);
        self.directories = directories;
        true
    }

    /// Whether an entry stands for this watch, or for one of the same session that holds as much.
    fn is_own(&self, held: &Held) -> bool {
        held.session == self.session && held.directories == self.directories
    }
}

impl Drop for WatchPermit {
    fn drop(&mut self) {
        let mut open = self.limiter.open.lock();
        if let Some(own) = open.iter().position(|held| self.is_own(held)) {
            open.swap_remove(own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_are_limited_by_session_tenant_and_in_total() {
        let limiter = Arc::<WatchLimiter>::default();
        let session = SessionId::generate();
        let acquire = |tenant: &str, session| limiter.try_acquire(tenant, session);
        let mut held: Vec<_> = std::iter::from_fn(|| acquire("a", session)).collect();
        assert_eq!(held.len(), MAX_WATCHES_PER_SESSION);
        held.extend(std::iter::from_fn(|| acquire("a", SessionId::generate())));
        assert_eq!(held.len(), MAX_WATCHES_PER_TENANT);
        held.extend(
            (0..).map_while(|n: usize| acquire(&(n / 10).to_string(), SessionId::generate())),
        );
        assert_eq!(held.len(), MAX_WATCHES);
        drop(held);
        assert!(limiter.open.lock().is_empty());
    }

    #[test]
    fn directories_are_limited_by_watch_tenant_and_in_total() {
        let limiter = Arc::<WatchLimiter>::default();
        let full = |tenant: &str| {
            let mut permit = limiter.try_acquire(tenant, SessionId::generate()).unwrap();
            permit.try_set_directories(MAX_DIRECTORIES_PER_WATCH).then_some(permit)
        };
        let mut one = limiter.try_acquire("a", SessionId::generate()).unwrap();
        assert!(!one.try_set_directories(MAX_DIRECTORIES_PER_WATCH + 1));
        let mut held: Vec<_> = std::iter::from_fn(|| full("a")).collect();
        assert_eq!(held.len(), MAX_DIRECTORIES_PER_TENANT / MAX_DIRECTORIES_PER_WATCH);
        assert!(!one.try_set_directories(1), "the tenant has no more");
        held.extend((0..).map_while(|n: usize| full(&n.to_string())));
        assert_eq!(held.len(), MAX_DIRECTORIES / MAX_DIRECTORIES_PER_WATCH);
        held.pop();
        assert!(full("other").is_some());
    }
}
