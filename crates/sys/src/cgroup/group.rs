//! The cgroup of one sandbox: creating, limiting, joining, reading, killing and removing it.

use std::{
    fs,
    io::ErrorKind,
    mem,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use rustix::{io::Errno, process::Pid};

use super::{
    controller::{Controller, Version},
    group_dir::{GroupDir, has_own_period},
    hierarchy::{Hierarchy, ParentGroup},
    name::owned_name,
    pool::{Pool, pooled_name},
    reader::GroupReader,
};
use crate::{Error, process};

/// Limits of a cgroup. `None` is unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Memory of all processes together, without swap.
    pub memory_bytes: Option<u64>,
    /// Number of processes and threads.
    pub pids: Option<u64>,
    /// CPU rate in thousandths of a core.
    pub cpu_millicores: Option<u64>,
}

/// Resources used by the processes of a cgroup. `None` was not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// User and system time.
    pub cpu_time: Option<Duration>,
    /// The largest memory of all processes together.
    pub peak_memory_bytes: Option<u64>,
    /// How many processes the OOM killer killed.
    pub oom_kills: u64,
    /// How many forks failed at the limit.
    pub pids_refused: u64,
    /// The largest number of concurrent processes and threads.
    pub peak_pids: Option<u64>,
    /// Bytes read from and written to devices.
    pub io_bytes: Option<(u64, u64)>,
}

/// A cgroup, with one directory in each hierarchy that it uses. The owner must remove it: dropping
/// does nothing.
#[derive(Debug, Default)]
pub struct Group {
    /// The directories that count what the processes use.
    counted: GroupReader,
    cpu: Option<GroupDir>,
    /// Directories that go to the pool when the others are removed.
    pooled: Vec<GroupDir>,
    pool: Option<Arc<Pool>>,
    /// The other directories, each once: controllers may share one.
    dirs: Vec<GroupDir>,
    /// Whether a container engine created it.
    is_external: bool,
}

impl Group {
    /// Creates a cgroup with these limits. Its name also contains the identity of this process. CPU
    /// time is counted where the host can.
    ///
    /// # Errors
    /// A limit cannot be set; nothing is left behind then.
    pub fn create(hierarchy: &Hierarchy, name: &str, limits: Limits) -> Result<Self, Error> {
        let mut group = Self::default();
        match group.create_dirs(hierarchy, &owned_name(name)?, limits) {
            Ok(()) => Ok(group),
            Err(error) => {
                group.remove()?;
                Err(error)
            }
        }
    }

    /// The cgroup that a container engine created for this process, to read, kill and check the
    /// removal of. No process joins it through us.
    ///
    /// # Errors
    /// The process does not exist, or its cgroup's name does not contain `name`, so that it is not
    /// the sandbox's.
    pub fn of_process(pid: Pid, name: &str) -> Result<Self, Error> {
        let hierarchy = Hierarchy::of_process(pid)?;
        let mut group = Self { is_external: true, ..Self::default() };
        let mut find = |controller| -> Result<GroupDir, Error> {
            let ParentGroup { dir, version, .. } = hierarchy.parent(controller)?.clone();
            let has_name = dir.file_name().is_some_and(|own| own.to_string_lossy().contains(name));
            if !has_name {
                return Err(Error::new("find the sandbox's name in cgroup", dir, Errno::XDEV));
            }
            let dir = GroupDir { path: dir, version };
            if !group.dirs.contains(&dir) {
                group.dirs.push(dir.clone());
            }
            Ok(dir)
        };
        let counted = GroupReader {
            memory: Some(find(Controller::Memory)?),
            pids: Some(find(Controller::Pids)?),
            cpuacct: Some(find(Controller::Cpuacct)?),
            io: None,
        };
        Ok(Self { counted, ..group })
    }

    fn create_dirs(
        &mut self,
        hierarchy: &Hierarchy,
        name: &str,
        limits: Limits,
    ) -> Result<(), Error> {
        if let Some(bytes) = limits.memory_bytes {
            let dir = self.add_dir(hierarchy, Controller::Memory, name)?;
            dir.limit_memory(bytes)?;
            self.counted.memory = Some(dir);
        }
        if let Some(max) = limits.pids {
            let dir = self.add_dir(hierarchy, Controller::Pids, name)?;
            dir.limit_pids(max)?;
            self.counted.pids = Some(dir);
        }
        // A reader of an ended cgroup fails because the other directories are gone. A directory of
        // the pool has an old quota, which this limit replaces.
        let is_poolable = self.counted.memory.is_some()
            && self.counted.pids.is_some()
            && limits.cpu_millicores.is_some_and(|millis| !has_own_period(millis));
        self.pool = is_poolable.then(|| hierarchy.pool.clone());
        if let Some(millis) = limits.cpu_millicores {
            let dir = self.add_dir(hierarchy, Controller::Cpu, name)?;
            dir.limit_cpu(millis)?;
            self.cpu = Some(dir);
        }
        // Only for counting, so a host that cannot do it is fine.
        self.counted.cpuacct = self.add_dir(hierarchy, Controller::Cpuacct, name).ok();
        Ok(())
    }

    fn add_dir(
        &mut self,
        hierarchy: &Hierarchy,
        controller: Controller,
        name: &str,
    ) -> Result<GroupDir, Error> {
        let parent = hierarchy.parent(controller)?;
        if let Some(dir) =
            self.all_dirs().find(|dir| dir.path.parent() == Some(parent.dir.as_path()))
        {
            return Ok(dir.clone());
        }
        let is_pooled = parent.version == Version::V1
            && matches!(controller, Controller::Cpu | Controller::Cpuacct);
        let pool = self.pool.as_ref().filter(|_| is_pooled);
        if let Some(dir) = pool.and_then(|pool| pool.take(&parent.dir)) {
            self.pooled.push(dir.clone());
            return Ok(dir);
        }
        let name = if pool.is_some() { pooled_name() } else { name.to_owned() };
        let dir = GroupDir { path: parent.dir.join(name), version: parent.version };
        let mut created = fs::create_dir(&dir.path);
        if created.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            parent.create(controller)?;
            created = fs::create_dir(&dir.path);
        }
        created.map_err(Error::io("create cgroup", &dir.path))?;
        let dirs = if pool.is_some() { &mut self.pooled } else { &mut self.dirs };
        dirs.push(dir.clone());
        Ok(dir)
    }

    fn all_dirs(&self) -> impl Iterator<Item = &GroupDir> {
        self.dirs.iter().chain(&self.pooled)
    }

    /// Adds a controller that only some cgroups use to an existing cgroup.
    pub(super) fn add_controller(
        &mut self,
        hierarchy: &Hierarchy,
        controller: Controller,
    ) -> Result<GroupDir, Error> {
        let no_group =
            || Error::new("find the cgroup to extend with", controller.as_str(), Errno::NODEV);
        let name = self.dirs.first().and_then(|dir| dir.path.file_name()).ok_or_else(no_group)?;
        let name = name.to_string_lossy().into_owned();
        hierarchy.parent(controller)?.create(controller)?;
        let dir = self.add_dir(hierarchy, controller, &name)?;
        if controller == Controller::Io {
            self.counted.io = Some(dir.clone());
        }
        Ok(dir)
    }

    /// Changes the limit of processes and threads.
    ///
    /// # Errors
    /// The limit cannot be set.
    pub fn limit_pids(&self, max: u64) -> Result<(), Error> {
        self.counted.pids.as_ref().map_or(Ok(()), |dir| dir.limit_pids(max))
    }

    /// Limits the buffers of sockets that are opened from now on, where they do not count as
    /// memory. The kernel exceeds this limit a little for each connection: see
    /// [`Group::sockets_exceed`].
    ///
    /// # Errors
    /// The limit cannot be set.
    pub fn limit_sockets(&self, memory_bytes: u64) -> Result<(), Error> {
        self.counted.memory.as_ref().map_or(Ok(()), |dir| dir.limit_sockets(memory_bytes))
    }

    /// Whether the buffers of sockets use too much of this memory limit; `None` if they count as
    /// memory, so that the kernel enforces it.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub fn sockets_exceed(&self, memory_bytes: u64) -> Result<Option<bool>, Error> {
        self.counted.memory.as_ref().map_or(Ok(None), |dir| dir.sockets_exceed(memory_bytes))
    }

    /// Opens the descriptors with which a single-threaded process joins the cgroup, each by
    /// [`join`].
    ///
    /// # Errors
    /// One cannot be opened.
    pub fn join_fds(&self) -> Result<Vec<OwnedFd>, Error> {
        if self.is_external {
            return Ok(Vec::new());
        }
        self.all_dirs().map(GroupDir::open_for_joining).collect()
    }

    /// Opens the directory in which a process can be started, where the cgroup is one of version 2
    /// alone.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn open_directory(&self) -> Result<Option<OwnedFd>, Error> {
        match self.dirs.as_slice() {
            [dir] if dir.version == Version::V2 => dir.open().map(Some),
            _ => Ok(None),
        }
    }

    /// The resources used so far.
    ///
    /// # Errors
    /// A file cannot be read or parsed.
    pub fn usage(&self) -> Result<Usage, Error> {
        let memory = self.counted.memory.as_ref();
        let pids = self.counted.pids.as_ref();
        // The engine's own threads were in an external cgroup first, so its peak says nothing. Not
        // every kernel counts peaks.
        let own_pids = pids.filter(|_| !self.is_external);
        Ok(Usage {
            cpu_time: self.cpu_time()?,
            peak_memory_bytes: memory.map(GroupDir::peak_memory).transpose()?.flatten(),
            oom_kills: memory.map_or(Ok(0), GroupDir::oom_kills)?,
            pids_refused: pids.map_or(Ok(0), GroupDir::pids_refused)?,
            peak_pids: own_pids.and_then(|dir| dir.peak_pids().ok()),
            io_bytes: self.counted.io.as_ref().and_then(|dir| dir.io_bytes().ok()),
        })
    }

    /// Reads what the processes use, from any thread.
    #[must_use]
    pub fn reader(&self) -> GroupReader {
        self.counted.clone()
    }

    /// The CPU time used so far; `None` if it is not counted.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub fn cpu_time(&self) -> Result<Option<Duration>, Error> {
        self.counted.cpu_time()
    }

    /// Whether each of its directories has a process.
    ///
    /// # Errors
    /// A list of processes cannot be read.
    pub fn has_processes(&self) -> Result<bool, Error> {
        let mut lists = self.all_dirs().map(|dir| dir.read("cgroup.procs"));
        lists.try_fold(true, |all, list| Ok(all && !list?.is_empty()))
    }

    /// The processes in the cgroup.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn processes(&self) -> Result<Vec<Pid>, Error> {
        let Some(dir) = self.dirs.first() else { return Ok(Vec::new()) };
        match dir.read("cgroup.procs") {
            Ok(text) => Ok(process::parse_pids(&text).collect()),
            Err(error) if error.errno == Errno::NODEV || error.errno == Errno::NOENT => {
                Ok(Vec::new())
            }
            Err(error) => Err(error),
        }
    }

    /// Lowers the CPU weight, so that newer cgroups go first when CPUs are scarce.
    ///
    /// # Errors
    /// The weight cannot be set.
    pub fn lower_priority(&self) -> Result<(), Error> {
        self.cpu.as_ref().map_or(Ok(()), GroupDir::lower_cpu_weight)
    }

    /// Lifts the CPU limit before a kill: dying takes CPU time, and a fork bomb at a small rate
    /// would take long to die.
    ///
    /// # Errors
    /// The limit cannot be lifted.
    pub fn lift_cpu_limit(&self) -> Result<(), Error> {
        self.cpu.as_ref().map_or(Ok(()), GroupDir::lift_cpu_limit)
    }

    /// Kills every process except one. No new process can start afterwards.
    ///
    /// # Errors
    /// A process cannot be listed or killed.
    pub fn kill_others(&self, spared: Pid) -> Result<(), Error> {
        self.kill_listed(Some(spared))
    }

    /// Kills every process.
    ///
    /// # Errors
    /// A process cannot be listed or killed.
    pub fn kill_all(&self) -> Result<(), Error> {
        match self.dirs.iter().find(|dir| dir.version == Version::V2) {
            Some(dir) => match dir.write("cgroup.kill", 1) {
                // Kernels before 5.14 lack this file.
                Err(error) if error.errno == Errno::NOENT => self.kill_listed(None),
                result => result,
            },
            None => self.kill_listed(None),
        }
    }

    fn kill_listed(&self, spared: Option<Pid>) -> Result<(), Error> {
        if let Some(dir) = &self.counted.pids {
            // First forbid new processes: a fork bomb could outrun the list.
            match dir.limit_pids(0) {
                // An earlier call of `remove` found no process in it.
                Err(error) if error.errno == Errno::NOENT => {}
                result => result?,
            }
        }
        for pid in self.processes()?.into_iter().filter(|pid| Some(*pid) != spared) {
            process::kill(pid)
                .map_err(|errno| Error::new("kill process", pid.to_string(), errno))?;
        }
        Ok(())
    }

    /// Removes the directories, or keeps empty ones for the next cgroups. May be called again to
    /// retry those that could not be removed.
    ///
    /// # Errors
    /// The first directory that could not be removed: `EBUSY` while a process is in it.
    pub fn remove(&mut self) -> Result<(), Error> {
        self.remove_dirs()?;
        for dir in mem::take(&mut self.pooled) {
            if self.pool.as_ref().is_some_and(|pool| pool.keep(&dir)) {
                // The directory may be another cgroup's already.
                let is_other = |own: &GroupDir| *own != dir;
                self.cpu = self.cpu.take().filter(is_other);
                self.counted.cpuacct = self.counted.cpuacct.take().filter(is_other);
            } else {
                self.dirs.push(dir);
            }
        }
        self.remove_dirs()
    }

    fn remove_dirs(&mut self) -> Result<(), Error> {
        let mut first = Ok(());
        self.dirs.retain(|dir| match fs::remove_dir(&dir.path) {
            Ok(()) => false,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => {
                if first.is_ok() {
                    first = Err(Error::io("remove cgroup", &dir.path)(error));
                }
                true
            }
        });
        first
    }

    /// The directories that are not removed.
    pub fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        self.all_dirs().map(|dir| &dir.path)
    }
}

/// Moves this process, which must have one thread, into a cgroup, through a descriptor of
/// [`Group::join_fds`].
///
/// # Errors
/// As `write(2)` to a cgroup's list of processes.
pub fn join(fd: impl AsFd) -> Result<(), Errno> {
    rustix::io::write(fd, b"0").map(drop)
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        os::unix::process::ExitStatusExt,
        path::Path,
        process::{Command, Stdio},
    };

    use super::*;
    use crate::require::available;

    const V2_MOUNT_POINTS: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];

    /// A version 2 cgroup without limits, if this host allows one.
    fn v2_group() -> Option<Group> {
        let root = V2_MOUNT_POINTS
            .into_iter()
            .map(Path::new)
            .find(|dir| dir.join("cgroup.procs").exists())?;
        let mut group = Group::default();
        let name = format!("codelia-test-{}", std::process::id());
        group.create_dirs(&Hierarchy::cpuacct_in(root), &name, Limits::default()).ok()?;
        (!group.dirs.is_empty()).then_some(group)
    }

    #[test]
    fn low_priority_is_an_eighth_of_the_default() {
        for (version, names) in [
            (Version::V1, ["cpu.shares", "cpu.cfs_quota_us"]),
            (Version::V2, ["cpu.weight", "cpu.max"]),
        ] {
            let temp = tempfile::tempdir().unwrap();
            names.iter().for_each(|name| fs::write(temp.path().join(name), "").unwrap());
            let dir = GroupDir { path: temp.path().to_owned(), version };
            let group = Group { cpu: Some(dir.clone()), ..Group::default() };
            let weight = || dir.read(names[0]).unwrap().parse::<u64>().unwrap();
            group.lift_cpu_limit().unwrap();
            let default = weight();
            fs::write(temp.path().join(names[0]), "").unwrap();
            group.lower_priority().unwrap();
            assert_eq!(weight(), default / 8);
        }
    }

    #[test]
    fn v2_group_kills_all_and_is_removed() {
        let group = v2_group();
        available("cgroup", group.is_none().then_some("cannot create a version 2 cgroup"));
        let Some(mut group) = group else { return };
        let mut sleeper = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let procs = group.dirs[0].path.join("cgroup.procs");
        fs::File::options()
            .write(true)
            .open(procs)
            .unwrap()
            .write_all(sleeper.id().to_string().as_bytes())
            .unwrap();
        assert_eq!(group.processes().unwrap(), [Pid::from_child(&sleeper)]);
        assert!(group.usage().unwrap().cpu_time.is_some());
        assert_eq!(group.remove().unwrap_err().errno, Errno::BUSY);

        group.kill_all().unwrap();
        assert_eq!(sleeper.wait().unwrap().signal(), Some(9));
        group.remove().unwrap();
        assert_eq!(group.directories().count(), 0);
    }
}
