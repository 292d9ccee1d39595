//! Limits of single directories of a layout: measured about once a second while a command runs.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use codelia_policy::{LayoutDirectory, Policy};
use codelia_sys::resolve_beneath;
use codelia_types::DiskUsage;

use super::size::{SizeWatch, Sizes};
use crate::disk;

/// The resource of a run that exceeds the limit of a directory.
const DISK_BYTES: &str = "disk_bytes";

/// Watches the directories of one command, if the layout has a limit.
pub(crate) fn watch(workspace: PathBuf, policy: &Policy) -> Option<SizeWatch> {
    let directories =
        policy.layout.directories.iter().filter_map(Limited::from_layout).collect::<Vec<_>>();
    if directories.is_empty() {
        return None;
    }
    let mut layout = Layout { workspace, directories, is_first: true };
    Some(SizeWatch::start("directory limits", DISK_BYTES, move |stop| layout.measure(stop)))
}

/// The directories of a command that have limits.
#[derive(Debug)]
struct Layout {
    workspace: PathBuf,
    directories: Vec<Limited>,
    is_first: bool,
}

/// A directory with a limit.
#[derive(Debug)]
struct Limited {
    path: PathBuf,
    max_bytes: u64,
    /// Bytes at the last measurement, if it was over its limit when the command started: a
    /// command may remove files there.
    full: Option<u64>,
}

impl Limited {
    fn from_layout(directory: &LayoutDirectory) -> Option<Self> {
        directory.max_bytes.map(|max_bytes| Self {
            path: directory.path.clone(),
            max_bytes,
            full: None,
        })
    }

    /// Whether it is over its limit: since the command started, or more than before.
    fn is_exceeded(&mut self, workspace: &Path, is_first: bool, stop: &AtomicBool) -> bool {
        // A directory that is gone or was replaced has nothing to count.
        if !matches!(self.measure(workspace, self.max_bytes, stop), Ok(None)) {
            self.full = None;
            return false;
        }
        let Ok(Some(bytes)) = self.measure(workspace, u64::MAX, stop) else {
            return !stop.load(Ordering::Relaxed);
        };
        let before = self.full.replace(bytes);
        before.map_or(!is_first, |before| bytes > before)
    }

    /// `None` if there is more than `max`, or after a stop.
    fn measure(&self, workspace: &Path, max: u64, stop: &AtomicBool) -> io::Result<Option<u64>> {
        let workspace = resolve_beneath::open_directory(workspace)?;
        let directory = resolve_beneath::open_directory_without_symlinks(&workspace, &self.path)?;
        let max = DiskUsage { bytes: max, inodes: u64::MAX };
        disk::measure(&directory, max, || stop.load(Ordering::Relaxed))
    }
}

impl Layout {
    fn measure(&mut self, stop: &AtomicBool) -> Sizes {
        let is_first = std::mem::take(&mut self.is_first);
        let mut directories = self.directories.iter_mut();
        if let Some(over) = directories.find_map(|one| {
            let is_over = one.is_exceeded(&self.workspace, is_first, stop);
            is_over.then(|| one.path.display())
        }) {
            tracing::info!(directory = %over, "a directory is over its limit, ending the run");
            return Sizes::Exceeded;
        }
        let is_any_full = self.directories.iter().any(|one| one.full.is_some());
        if is_any_full { Sizes::Full } else { Sizes::Below }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MAX: u64 = 1 << 20;

    fn write(directory: &Path, bytes: u64) {
        let name = fs::read_dir(directory).unwrap().count().to_string();
        fs::write(directory.join(name), vec![1; usize::try_from(bytes).unwrap()]).unwrap();
    }

    #[test]
    fn full_directory_may_shrink_but_not_grow() {
        let temp = tempfile::tempdir().unwrap();
        let logs = temp.path().join("logs");
        fs::create_dir(&logs).unwrap();
        let stop = AtomicBool::new(false);
        let mut limited = Limited { path: "logs".into(), max_bytes: MAX, full: None };
        assert!(!limited.is_exceeded(temp.path(), true, &stop), "it is empty");
        write(&logs, 2 * MAX);
        assert!(limited.is_exceeded(temp.path(), false, &stop), "it grew over its limit");
        limited.full = None;
        assert!(
            !limited.is_exceeded(temp.path(), true, &stop),
            "it was over when the command started"
        );
        assert!(!limited.is_exceeded(temp.path(), false, &stop), "it stays as it is");
        write(&logs, MAX);
        assert!(limited.is_exceeded(temp.path(), false, &stop), "it grew");
        fs::remove_dir_all(&logs).unwrap();
        assert!(!limited.is_exceeded(temp.path(), false, &stop), "it is gone");
    }
}
