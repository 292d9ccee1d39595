//! Limits watches: each holds an inotify instance and a queue in the kernel, and each directory a
//! watch that keeps its inode in memory.

use codelia_types::SessionId;

use super::super::budget::{Budget, Share};

const MAX_WATCHES: usize = 64;
const MAX_WATCHES_PER_TENANT: usize = 16;
const MAX_WATCHES_PER_SESSION: usize = 8;
const MAX_DIRECTORIES: usize = 32_768;
const MAX_DIRECTORIES_PER_TENANT: usize = 8_192;
/// Directories of one watch.
pub(super) const MAX_DIRECTORIES_PER_WATCH: usize = 4_096;

/// Counts the open watches and their directories.
#[derive(Debug)]
pub(in super::super) struct WatchLimiter {
    of_tenants: Budget<String>,
    of_sessions: Budget<SessionId>,
    directories: Budget<String>,
}

/// Permission for one watch, which ends when this is dropped.
#[derive(Debug)]
pub(in super::super) struct WatchPermit {
    _of_tenant: Share<String>,
    _of_session: Share<SessionId>,
    directories: Share<String>,
}

impl Default for WatchLimiter {
    fn default() -> Self {
        Self {
            of_tenants: Budget::new(MAX_WATCHES, MAX_WATCHES_PER_TENANT),
            of_sessions: Budget::new(MAX_WATCHES, MAX_WATCHES_PER_SESSION),
            directories: Budget::new(MAX_DIRECTORIES, MAX_DIRECTORIES_PER_TENANT),
        }
    }
}

impl WatchLimiter {
    /// Permission for one more watch; `None` if there are too many.
    pub(in super::super) fn try_acquire(
        &self,
        tenant: &str,
        session: SessionId,
    ) -> Option<WatchPermit> {
        Some(WatchPermit {
            _of_tenant: self.of_tenants.try_take(tenant.to_owned(), 1)?,
            _of_session: self.of_sessions.try_take(session, 1)?,
            directories: self.directories.try_take(tenant.to_owned(), 0)?,
        })
    }
}

impl WatchPermit {
    /// Sets the number of watched directories; `false` if that is too many.
    pub(super) fn try_set_directories(&mut self, directories: usize) -> bool {
        directories <= MAX_DIRECTORIES_PER_WATCH && self.directories.try_resize(directories)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watches_are_limited_by_session_tenant_and_in_total() {
        let limiter = WatchLimiter::default();
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
        assert!(limiter.of_tenants.is_free() && limiter.of_sessions.is_free());
    }

    #[test]
    fn directories_are_limited_by_watch_tenant_and_in_total() {
        let limiter = WatchLimiter::default();
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
