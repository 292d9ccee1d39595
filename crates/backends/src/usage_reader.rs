//! Reads what a running command uses, on demand.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use codelia_sys::{
    Pid,
    cgroup::{CurrentUsage, GroupReader},
    process::{self, ListedProcess, TreeRoot},
};

use crate::Error;

/// Reads what a command uses at this moment, from any thread. Reading opens a few files. It reads
/// nothing by itself, and does not keep the sandbox.
#[derive(Debug, Clone)]
pub struct UsageReader(pub(crate) UsageSource);

/// Who counts what a command uses.
#[derive(Debug, Clone)]
pub(crate) enum UsageSource {
    Group(GroupReader),
    /// The last check of the processes, where no group counts what they use.
    Watched(Arc<Mutex<CurrentUsage>>, TreeRoot),
}

impl UsageReader {
    /// Usage of the command, without `codelia-init`.
    ///
    /// # Errors
    /// The sandbox is gone, or the kernel's counts cannot be read.
    pub fn read(&self) -> Result<CurrentUsage, Error> {
        let usage = match &self.0 {
            UsageSource::Group(group) => group.read()?,
            UsageSource::Watched(latest, _) => {
                *latest.lock().unwrap_or_else(PoisonError::into_inner)
            }
        };
        // codelia-init is one of them.
        Ok(CurrentUsage { tasks: usage.tasks.map(|tasks| tasks.saturating_sub(1)), ..usage })
    }

    /// The ids of the sandbox's processes on the host. None where those of the host are not those
    /// of the sandbox.
    ///
    /// # Errors
    /// The sandbox is gone, or its processes cannot be listed.
    pub fn pids(&self) -> Result<Vec<Pid>, Error> {
        match &self.0 {
            UsageSource::Group(group) => Ok(group.processes()?.unwrap_or_default()),
            UsageSource::Watched(_, TreeRoot::Parent(pid)) => Ok(process::descendants(*pid)?),
            UsageSource::Watched(_, TreeRoot::First(pid)) => {
                let mut pids = process::descendants(*pid)?;
                pids.push(*pid);
                Ok(pids)
            }
        }
    }

    /// The processes of the command, at most `max`, without `codelia-init`. `None` if there is no
    /// control group that lists them.
    ///
    /// # Errors
    /// The sandbox is gone, or its processes cannot be listed.
    pub fn processes(&self, max: usize) -> Result<Option<Vec<ListedProcess>>, Error> {
        let UsageSource::Group(group) = &self.0 else { return Ok(None) };
        let Some(mut pids) = group.processes()? else { return Ok(None) };
        pids.truncate(max.saturating_add(1));
        let mut listed = process::list(&pids);
        // An id may belong to another sandbox's process by now: one that is still here was ours.
        let still: HashSet<_> = group.processes()?.into_iter().flatten().collect();
        listed.retain(|process| still.contains(&process.host_pid));
        Ok(Some(listed))
    }
}
