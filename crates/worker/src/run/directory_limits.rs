//! Limits of single directories of a layout: measured about once a second while a command runs.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use codelia_policy::{LayoutDirectory, Policy};
use codelia_sys::resolve_beneath;
use codelia_telemetry::task;
use codelia_types::DiskUsage;
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use crate::disk;

/// Between two measurements, at least.
const INTERVAL: Duration = Duration::from_secs(1);
/// The same while a directory is full.
const FULL_INTERVAL: Duration = Duration::from_millis(100);
/// The share of one core that measuring may take: one part of this many.
const SHARE: u32 = 20;

/// Watches the directories of one command until it is dropped.
#[derive(Debug)]
pub(super) struct DirectoryLimits {
    /// Canceled when a directory is over its limit.
    pub(super) exceeded: CancellationToken,
    stop: Arc<AtomicBool>,
    task: Option<JoinHandle<()>>,
}

impl DirectoryLimits {
    /// Starts to watch, if the layout has a limit.
    pub(super) fn watch(workspace: PathBuf, policy: &Policy) -> Self {
        let limited = policy.layout.directories.iter().filter_map(Limited::of).collect::<Vec<_>>();
        let (exceeded, stop) = (CancellationToken::new(), Arc::<AtomicBool>::default());
        let is_needed = !limited.is_empty();
        let watch = Watch { workspace, stop: stop.clone(), directories: limited, is_first: true };
        let task = is_needed.then(|| task::background("directory limits", run(watch, exceeded.clone())));
        Self { exceeded, stop, task }
    }
}

impl Drop for DirectoryLimits {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn run(mut watch: Watch, exceeded: CancellationToken) {
    loop {
        let began = Instant::now();
        let Ok((same, over)) = spawn_blocking(move || watch.measure()).await else { return };
        watch = same;
        if let Some(directory) = over {
            tracing::info!(directory = %directory.display(), "a directory is over its limit, ending the run");
            exceeded.cancel();
            return;
        }
        let interval = if watch.is_any_full() { FULL_INTERVAL } else { INTERVAL };
        sleep(interval.max(began.elapsed() * SHARE)).await;
    }
}

#[derive(Debug)]
struct Watch {
    workspace: PathBuf,
    stop: Arc<AtomicBool>,
    directories: Vec<Limited>,
    is_first: bool,
}

/// A directory with a limit.
#[derive(Debug)]
struct Limited {
    path: PathBuf,
    max_bytes: u64,
    /// What it had at the last measurement, if it was over its limit when the command started: a command
    /// may remove files there.
    full: Option<u64>,
}

impl Limited {
    fn of(directory: &LayoutDirectory) -> Option<Self> {
        directory.max_bytes.map(|max_bytes| Self { path: directory.path.clone(), max_bytes, full: None })
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

impl Watch {
    /// Measures all directories; returns the first that is over its limit.
    fn measure(mut self) -> (Self, Option<PathBuf>) {
        let is_first = std::mem::take(&mut self.is_first);
        let (workspace, stop) = (&self.workspace, &self.stop);
        let exceeded =
            |one: &mut Limited| one.is_exceeded(workspace, is_first, stop).then(|| one.path.clone());
        let over = self.directories.iter_mut().find_map(exceeded);
        (self, over)
    }

    fn is_any_full(&self) -> bool {
        self.directories.iter().any(|one| one.full.is_some())
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
        assert!(!limited.is_exceeded(temp.path(), true, &stop), "it was over when the command started");
        assert!(!limited.is_exceeded(temp.path(), false, &stop), "it stays as it is");
        write(&logs, MAX);
        assert!(limited.is_exceeded(temp.path(), false, &stop), "it grew");
        fs::remove_dir_all(&logs).unwrap();
        assert!(!limited.is_exceeded(temp.path(), false, &stop), "it is gone");
    }
}
