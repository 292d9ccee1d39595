//! The free space for sessions: the worker keeps a reserve, so that what shares the file system
//! with them, such as the database of a single machine, continues to work. Also which sessions
//! belong to a tenant without room.

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use codelia_store::DiskSpace;
use codelia_sys::fd::size_and_free;
use codelia_telemetry::{DiskCause, DiskEffect, metrics};
use codelia_types::{Reason, Refusal, SessionId};
use parking_lot::Mutex;

use crate::file_work::blocking;

const MIB: u64 = 1024 * 1024;
/// If none is configured, and at most a tenth of the file system.
const DEFAULT_RESERVE: u64 = 1024 * MIB;
/// The reserve is kept again when this share of it more is free than it, so that a worker does not
/// change its mind all the time.
const MARGIN_DIVISOR: u64 = 20;

/// The free space where the sessions are.
#[derive(Debug)]
pub(crate) struct Space {
    root: PathBuf,
    /// As configured.
    reserve: Option<u64>,
    last: Mutex<Option<DiskSpace>>,
    is_short: AtomicBool,
    /// Sessions of tenants that reached their quota.
    full: Mutex<HashSet<SessionId>>,
}

impl Space {
    pub(crate) fn new(root: &Path, reserve: Option<u64>) -> Self {
        Self {
            root: root.to_owned(),
            reserve,
            last: Mutex::default(),
            is_short: AtomicBool::new(false),
            full: Mutex::default(),
        }
    }

    /// Blocking. Reads what is free.
    pub(crate) fn measure(&self) -> io::Result<DiskSpace> {
        let DiskSpace { free, reserve, .. } = root_space(&self.root, self.reserve)?;
        let is_short = is_short(free, reserve, self.is_short());
        let space = DiskSpace { free, reserve, is_short };
        *self.last.lock() = Some(space);
        self.is_short.store(is_short, Ordering::Relaxed);
        Ok(space)
    }

    /// Whether less is free than the reserve.
    pub(crate) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }

    /// Files may have been removed since the last look: none is refused for what is not true any
    /// more.
    pub(crate) async fn look_again_if_short(self: &Arc<Self>) {
        if self.is_short() {
            let space = self.clone();
            // If that fails, what is known stays.
            let _ = blocking(move || space.measure()).await;
        }
    }

    /// Why no run may start now.
    pub(crate) fn refuse_run(&self) -> Option<Refusal> {
        let space = self.last.lock().filter(|space| space.is_short)?;
        metrics().disk.limited(DiskCause::Reserve, DiskEffect::RunRefused);
        let free = space.free / MIB;
        let reserve = space.reserve / MIB;
        let message = format!(
            "the worker has {free} MiB free for sessions and keeps {reserve} MiB (worker.disk_reserve); remove \
             files (`codelia rm`) or close sessions, or ask an operator for space"
        );
        Some(Refusal { reason: Reason::DiskFull, message })
    }

    /// The shortage that keeps a session from writing files.
    pub(crate) fn obstacle(&self, session: SessionId) -> Option<DiskCause> {
        match (self.is_short(), self.full.lock().contains(&session)) {
            (true, _) => Some(DiskCause::Reserve),
            (false, true) => Some(DiskCause::Tenant),
            (false, false) => None,
        }
    }

    /// Sets the sessions whose tenant has no room.
    pub(crate) fn set_full(&self, sessions: HashSet<SessionId>) {
        *self.full.lock() = sessions;
    }
}

/// The space of the file system with the root of sessions, or of what is above it if it does not
/// exist yet. Blocking. `reserve` as in the option `worker.disk_reserve`.
///
/// # Errors
/// As `statvfs(3)`.
pub fn root_space(root: &Path, reserve: Option<u64>) -> io::Result<DiskSpace> {
    let existing = root.ancestors().find(|path| path.exists()).unwrap_or(root);
    let (size, free) = size_and_free(existing)?;
    let reserve = reserve.unwrap_or(DEFAULT_RESERVE.min(size / 10));
    Ok(DiskSpace { free, reserve, is_short: free < reserve })
}

fn is_short(free: u64, reserve: u64, was_short: bool) -> bool {
    let margin = if was_short { reserve / MARGIN_DIVISOR } else { 0 };
    free < reserve.saturating_add(margin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_ends_with_a_margin() {
        assert!(!is_short(100, 100, false));
        assert!(is_short(99, 100, false));
        assert!(is_short(104, 100, true));
        assert!(!is_short(105, 100, true));
        assert!(!is_short(0, 0, true), "no reserve");
    }

    #[test]
    fn space_is_measured_and_bites() {
        let root = std::env::temp_dir();
        let roomy = Space::new(&root, Some(0));
        assert!(!roomy.measure().unwrap().is_short && roomy.refuse_run().is_none());
        let short = Space::new(&root, Some(u64::MAX));
        assert!(short.refuse_run().is_none(), "nothing is known yet");
        assert!(short.measure().unwrap().is_short);
        assert_eq!(short.refuse_run().unwrap().reason, Reason::DiskFull);
        assert_eq!(short.obstacle(SessionId::generate()), Some(DiskCause::Reserve));
    }

    #[test]
    fn sessions_of_a_full_tenant_are_marked() {
        let space = Space::new(&std::env::temp_dir(), Some(0));
        let (full, other) = (SessionId::generate(), SessionId::generate());
        space.set_full(HashSet::from([full]));
        assert_eq!((space.obstacle(full), space.obstacle(other)), (Some(DiskCause::Tenant), None));
        space.set_full(HashSet::new());
        assert_eq!(space.obstacle(full), None);
    }
}
