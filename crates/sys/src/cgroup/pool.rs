//! Empty version 1 cgroups that wait for the next sandbox: resetting them costs less than creating
//! and removing them, which also keeps kernel threads busy.
//!
//! Only `cpu` and `cpuacct` can be reset completely. In `memory`, cached files and kernel objects
//! of the former processes stay charged, and dropping them takes milliseconds; `pids.peak` cannot
//! be reset.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::io::Errno;

use super::group_dir::{DEFAULT_SHARES, GroupDir};
use crate::Error;

/// How many directories wait in all hierarchies together.
const MAX_SPARE: usize = 64;

/// The link count of a directory without children.
const LINKS_WITHOUT_CHILDREN: u64 = 2;

/// Unique in this process, as other hierarchies of it use the same parent.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

/// Directories that wait. Its owner must close it: dropping does nothing.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Spare>);

#[derive(Debug, Default)]
struct Spare {
    dirs: Vec<GroupDir>,
    /// Set at shutdown: directories are removed instead of kept.
    is_closed: bool,
}

impl Pool {
    /// Takes a directory below this parent. All but its CPU quota is as in a new one.
    pub(super) fn take(&self, parent: &Path) -> Option<GroupDir> {
        let mut spare = self.lock();
        let found = spare.dirs.iter().rposition(|dir| dir.path.parent() == Some(parent))?;
        Some(spare.dirs.swap_remove(found))
    }

    /// Keeps a directory. Returns whether it did; otherwise the caller must remove it.
    pub(super) fn keep(&self, dir: &GroupDir) -> bool {
        // One that cannot be reset is removed like any other, which reports what is wrong with it.
        let is_reset = reset(dir).unwrap_or(false);
        let mut spare = self.lock();
        let is_kept = is_reset && !spare.is_closed && spare.dirs.len() < MAX_SPARE;
        if is_kept {
            spare.dirs.push(dir.clone());
        }
        is_kept
    }

    /// Removes all directories and keeps none from now on.
    pub(super) fn close(&self) {
        let mut spare = self.lock();
        spare.is_closed = true;
        for dir in spare.dirs.drain(..) {
            // They are empty. One that cannot be removed is an orphan after this process.
            let _ = fs::remove_dir(&dir.path);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Spare> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of a directory that may be used again. It names no sandbox, as it will have several.
pub(super) fn pooled_name() -> String {
    format!("pooled-{}", NEXT_NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Makes a directory like a new one, except for its CPU quota. Returns `false` if it is not empty.
fn reset(dir: &GroupDir) -> Result<bool, Error> {
    let links = fs::metadata(&dir.path).map_err(Error::io("stat", &dir.path))?.nlink();
    if links != LINKS_WITHOUT_CHILDREN || !dir.read("cgroup.procs")?.is_empty() {
        return Ok(false);
    }
    for (name, value) in [("cpu.shares", DEFAULT_SHARES), ("cpuacct.usage", 0)] {
        match dir.write(name, value) {
            // The hierarchy lacks this controller.
            Err(error) if error.errno == Errno::NOENT => {}
            result => result?,
        }
    }
    Ok(true)
}
