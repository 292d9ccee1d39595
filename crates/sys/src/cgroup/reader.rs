//! Usage of the processes of a cgroup at this moment.

use std::time::Duration;

use rustix::process::Pid;

use super::group_dir::GroupDir;
use crate::{Error, process::parse_pids};

/// Usage of the processes of a cgroup at one moment. `None` is not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CurrentUsage {
    /// User and system time so far.
    pub cpu_time: Option<Duration>,
    /// Memory that counts towards the limit, with cached files.
    pub memory_bytes: Option<u64>,
    /// The part of it that holds cached files, which the kernel drops when memory is short.
    pub page_cache_bytes: Option<u64>,
    /// The largest memory so far.
    pub peak_memory_bytes: Option<u64>,
    /// Number of processes and threads.
    pub tasks: Option<u64>,
    /// Bytes read from and written to devices so far.
    pub io_bytes: Option<(u64, u64)>,
}

/// Reads what the processes of a cgroup use, from any thread. Does not keep the cgroup: reading
/// fails once it is removed.
#[derive(Debug, Clone, Default)]
pub struct GroupReader {
    pub(super) memory: Option<GroupDir>,
    pub(super) pids: Option<GroupDir>,
    pub(super) cpuacct: Option<GroupDir>,
    pub(super) io: Option<GroupDir>,
}

impl GroupReader {
    /// Does not count processes and threads, where those of the host are not those of the sandbox.
    #[must_use]
    pub fn without_tasks(self) -> Self {
        Self { pids: None, ..self }
    }

    /// The CPU time used so far; `None` if it is not counted.
    ///
    /// # Errors
    /// As [`GroupReader::read`].
    pub fn cpu_time(&self) -> Result<Option<Duration>, Error> {
        self.cpuacct.as_ref().map(GroupDir::cpu_time).transpose()
    }

    /// All that is counted.
    ///
    /// # Errors
    /// The cgroup is gone, or a file cannot be read or parsed.
    pub fn read(&self) -> Result<CurrentUsage, Error> {
        let memory = self.memory.as_ref();
        // Before its peak, which is then not below it.
        let memory_bytes = memory.map(GroupDir::current_memory).transpose()?;
        let peak = memory.map(GroupDir::peak_memory).transpose()?.flatten();
        Ok(CurrentUsage {
            cpu_time: self.cpu_time()?,
            memory_bytes,
            page_cache_bytes: memory.map(GroupDir::page_cache).transpose()?,
            peak_memory_bytes: peak,
            tasks: self.tasks()?,
            io_bytes: self.io.as_ref().and_then(|dir| dir.io_bytes().ok()),
        })
    }

    /// Memory that the kernel cannot get back by dropping cached files. Looks at them only if the
    /// memory with them is at least `from`: that takes longer.
    ///
    /// # Errors
    /// As [`GroupReader::read`].
    pub fn unreclaimable_memory(&self, from: u64) -> Result<Option<u64>, Error> {
        let Some(dir) = &self.memory else { return Ok(None) };
        let memory = dir.current_memory()?;
        let cached = if memory < from { 0 } else { dir.page_cache()? };
        Ok(Some(memory.saturating_sub(cached)))
    }

    /// The processes; `None` where those of the host are not those of the sandbox.
    ///
    /// # Errors
    /// As [`GroupReader::read`].
    pub fn processes(&self) -> Result<Option<Vec<Pid>>, Error> {
        let Some(dir) = &self.pids else { return Ok(None) };
        Ok(Some(parse_pids(&dir.read("cgroup.procs")?).collect()))
    }

    /// Number of processes and threads.
    ///
    /// # Errors
    /// As [`GroupReader::read`].
    pub fn tasks(&self) -> Result<Option<u64>, Error> {
        self.pids.as_ref().map(GroupDir::current_pids).transpose()
    }
}
