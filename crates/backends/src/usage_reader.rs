//! Reads what a running command uses, on demand.

use std::sync::{Arc, Mutex, PoisonError};

use codelia_sys::cgroup::{CurrentUsage, GroupReader};

use crate::Error;

/// Reads what a command uses at this moment, from any thread. Reading opens a few files. It reads
/// nothing by itself, and does not keep the sandbox.
#[derive(Debug, Clone)]
pub struct UsageReader(Source);

#[derive(Debug, Clone)]
enum Source {
    Group(GroupReader),
    /// The last check of the processes, where no group counts what they use.
    Watched(Arc<Mutex<CurrentUsage>>),
}

impl UsageReader {
    pub(crate) fn of_group(group: GroupReader) -> Self {
        Self(Source::Group(group))
    }

    pub(crate) fn of_watcher(latest: Arc<Mutex<CurrentUsage>>) -> Self {
        Self(Source::Watched(latest))
    }

    /// What the command uses, without `codelia-init`.
    ///
    /// # Errors
    /// The sandbox is gone, or the kernel's counts cannot be read.
    pub fn read(&self) -> Result<CurrentUsage, Error> {
        let usage = match &self.0 {
            Source::Group(group) => group.read()?,
            Source::Watched(latest) => *latest.lock().unwrap_or_else(PoisonError::into_inner),
        };
        // codelia-init is one of them.
        Ok(CurrentUsage { tasks: usage.tasks.map(|tasks| tasks.saturating_sub(1)), ..usage })
    }
}
