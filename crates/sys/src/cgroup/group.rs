//! The group of one sandbox: made, limited, entered, read, killed, removed.

use std::{fs, io::ErrorKind, os::fd::OwnedFd, path::PathBuf, time::Duration};

use rustix::{io::Errno, process::Pid};

use super::{Controller, Hierarchy, Version, hierarchy::Base, leaf::Leaf, owner};
use crate::{Error, process};

/// What is limited. `None` is not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Memory of all processes together, without swap.
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// CPU rate in thousandths of a core.
    pub cpu_millis: Option<u64>,
}

/// What the processes of a group used. `None` was not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// User and system time.
    pub cpu_time: Option<Duration>,
    /// Largest memory of all together.
    pub peak_memory_bytes: Option<u64>,
    /// How many processes were killed for want of memory.
    pub oom_kills: u64,
    /// How often a fork was refused because of the limit.
    pub pids_refused: u64,
    /// Most processes and threads at once.
    pub peak_pids: Option<u64>,
    /// Bytes read from and written to devices.
    pub io_bytes: Option<(u64, u64)>,
}

/// A group and its directories. It must be removed: nothing happens when it is dropped.
#[derive(Debug, Default)]
pub struct Group {
    memory: Option<Leaf>,
    pids: Option<Leaf>,
    cpu: Option<Leaf>,
    cpu_time: Option<Leaf>,
    io: Option<Leaf>,
    /// Each directory once: controllers may share one.
    leaves: Vec<Leaf>,
    /// Whether its processes are in it already.
    is_foreign: bool,
}

impl Group {
    /// Makes a group with these limits, whose name also tells that it is this process's. CPU time is
    /// counted where the host can.
    ///
    /// # Errors
    /// A limit cannot be set; nothing is left then.
    pub fn create(hierarchy: &Hierarchy, name: &str, limits: Limits) -> Result<Self, Error> {
        let mut group = Self::default();
        match group.build(hierarchy, &owner::mark(name)?, limits) {
            Ok(()) => Ok(group),
            Err(error) => {
                group.remove()?;
                Err(error)
            }
        }
    }

    /// The group that something else made for the process and named `name`, to be watched, killed and
    /// seen to be gone. Nobody enters it through us.
    ///
    /// # Errors
    /// The process is gone, or in a group of another name, which is not the sandbox's.
    pub fn of_process(pid: Pid, name: &str) -> Result<Self, Error> {
        let hierarchy = Hierarchy::of_process(pid)?;
        let mut group = Self { is_foreign: true, ..Self::default() };
        let mut leaf = |controller| -> Result<Leaf, Error> {
            let Base { dir, version, .. } = hierarchy.base(controller)?.clone();
            let is_named = dir.file_name().is_some_and(|own| own.to_string_lossy().contains(name));
            if !is_named {
                return Err(Error::new("find the sandbox's name in", dir, Errno::XDEV));
            }
            let leaf = Leaf { dir, version };
            if !group.leaves.contains(&leaf) {
                group.leaves.push(leaf.clone());
            }
            Ok(leaf)
        };
        let (memory, pids) = (leaf(Controller::Memory)?, leaf(Controller::Pids)?);
        let cpu_time = leaf(Controller::Cpuacct)?;
        Ok(Self { memory: Some(memory), pids: Some(pids), cpu_time: Some(cpu_time), ..group })
    }

    fn build(&mut self, hierarchy: &Hierarchy, name: &str, limits: Limits) -> Result<(), Error> {
        if let Some(bytes) = limits.memory_bytes {
            let leaf = self.add_leaf(hierarchy, Controller::Memory, name)?;
            leaf.limit_memory(bytes)?;
            self.memory = Some(leaf);
        }
        if let Some(most) = limits.pids {
            let leaf = self.add_leaf(hierarchy, Controller::Pids, name)?;
            leaf.limit_pids(most)?;
            self.pids = Some(leaf);
        }
        if let Some(millis) = limits.cpu_millis {
            let leaf = self.add_leaf(hierarchy, Controller::Cpu, name)?;
            leaf.limit_cpu(millis)?;
            self.cpu = Some(leaf);
        }
        // Only counted: a host that cannot is no reason to refuse.
        self.cpu_time = self.add_leaf(hierarchy, Controller::Cpuacct, name).ok();
        Ok(())
    }

    fn add_leaf(&mut self, hierarchy: &Hierarchy, controller: Controller, name: &str) -> Result<Leaf, Error> {
        let base = hierarchy.base(controller)?;
        let leaf = Leaf { dir: base.dir.join(name), version: base.version };
        if self.leaves.contains(&leaf) {
            return Ok(leaf);
        }
        let mut made = fs::create_dir(&leaf.dir);
        if made.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            base.make(controller)?;
            made = fs::create_dir(&leaf.dir);
        }
        made.map_err(Error::io("create cgroup", &leaf.dir))?;
        self.leaves.push(leaf.clone());
        Ok(leaf)
    }

    /// Holds a group that is there to one controller more, which not every group is.
    pub(super) fn add_later(&mut self, hierarchy: &Hierarchy, controller: Controller) -> Result<Leaf, Error> {
        let absent = || Error::new("find a group to hold to", controller.as_str(), Errno::NODEV);
        let name = self.leaves.first().and_then(|leaf| leaf.dir.file_name()).ok_or_else(absent)?;
        let name = name.to_string_lossy().into_owned();
        hierarchy.base(controller)?.make(controller)?;
        let leaf = self.add_leaf(hierarchy, controller, &name)?;
        if controller == Controller::Io {
            self.io = Some(leaf.clone());
        }
        Ok(leaf)
    }

    /// Limits its processes and threads anew.
    ///
    /// # Errors
    /// The limit cannot be set.
    pub fn limit_pids(&self, most: u64) -> Result<(), Error> {
        self.pids.as_ref().map_or(Ok(()), |leaf| leaf.limit_pids(most))
    }

    /// Descriptors through which a single-threaded process enters the group: it writes `0` to each.
    ///
    /// # Errors
    /// One cannot be opened.
    pub fn join_fds(&self) -> Result<Vec<OwnedFd>, Error> {
        if self.is_foreign {
            return Ok(Vec::new());
        }
        self.leaves.iter().map(Leaf::open_entry).collect()
    }

    /// What its processes used so far.
    ///
    /// # Errors
    /// A file cannot be read or understood.
    pub fn usage(&self) -> Result<Usage, Error> {
        let peak = self.memory.as_ref().map(Leaf::peak_memory).transpose();
        Ok(Usage {
            cpu_time: self.cpu_time()?,
            peak_memory_bytes: match peak {
                // Kernels before 5.19 keep no peak in version 2.
                Err(error) if error.errno == Errno::NOENT => None,
                answer => answer?,
            },
            oom_kills: self.memory.as_ref().map(Leaf::oom_kills).transpose()?.unwrap_or_default(),
            pids_refused: self.pids.as_ref().map(Leaf::pids_refused).transpose()?.unwrap_or_default(),
            // Not every kernel counts them, and who makes a group has threads in it first.
            peak_pids: self.pids.as_ref().filter(|_| !self.is_foreign).and_then(|leaf| leaf.peak_pids().ok()),
            io_bytes: self.io.as_ref().and_then(|leaf| leaf.io_bytes().ok()),
        })
    }

    /// The CPU time its processes used so far; `None` if it is not counted.
    ///
    /// # Errors
    /// The file cannot be read or understood.
    pub fn cpu_time(&self) -> Result<Option<Duration>, Error> {
        self.cpu_time.as_ref().map(Leaf::cpu_time).transpose()
    }

    /// The processes in it.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn processes(&self) -> Result<Vec<Pid>, Error> {
        let Some(leaf) = self.leaves.first() else { return Ok(Vec::new()) };
        match leaf.read("cgroup.procs") {
            Ok(text) => Ok(process::pids(&text).collect()),
            Err(error) if error.errno == Errno::NODEV || error.errno == Errno::NOENT => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Has its processes go after those of younger groups where processors are short.
    ///
    /// # Errors
    /// Its weight cannot be set.
    pub fn lower_priority(&self) -> Result<(), Error> {
        self.cpu.as_ref().map_or(Ok(()), Leaf::lower_weight)
    }

    /// Lets its processes have all the CPU time there is: to end takes some, and a fork bomb that is held to
    /// a small rate would take long to die.
    ///
    /// # Errors
    /// The limit cannot be lifted.
    pub fn lift_cpu_limit(&self) -> Result<(), Error> {
        self.cpu.as_ref().map_or(Ok(()), Leaf::lift_cpu)
    }

    /// Kills every process in it but one. No new one can start.
    ///
    /// # Errors
    /// A process cannot be listed or killed.
    pub fn kill_others(&self, spared: Pid) -> Result<(), Error> {
        self.kill_listed(Some(spared))
    }

    /// Kills every process in it.
    ///
    /// # Errors
    /// A process cannot be listed or killed.
    pub fn kill_all(&self) -> Result<(), Error> {
        match self.leaves.iter().find(|leaf| leaf.version == Version::Two) {
            Some(leaf) => match leaf.write("cgroup.kill", 1) {
                // Kernels before 5.14 have no such file.
                Err(error) if error.errno == Errno::NOENT => self.kill_listed(None),
                answer => answer,
            },
            None => self.kill_listed(None),
        }
    }

    fn kill_listed(&self, spared: Option<Pid>) -> Result<(), Error> {
        if let Some(leaf) = &self.pids {
            // Without it a fork bomb may outrun the list.
            leaf.limit_pids(0)?;
        }
        for pid in self.processes()?.into_iter().filter(|pid| Some(*pid) != spared) {
            process::kill(pid).map_err(|errno| Error::new("kill process", pid.to_string(), errno))?;
        }
        Ok(())
    }

    /// Removes its directories.
    ///
    /// # Errors
    /// The first one that could not be removed: `EBUSY` while a process is in it. Those that could
    /// not be removed may be tried again.
    pub fn remove(&mut self) -> Result<(), Error> {
        let mut first = Ok(());
        self.leaves.retain(|leaf| match fs::remove_dir(&leaf.dir) {
            Ok(()) => false,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(error) => {
                if first.is_ok() {
                    first = Err(Error::io("remove cgroup", &leaf.dir)(error));
                }
                true
            }
        });
        first
    }

    /// Its directories that exist.
    pub fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        self.leaves.iter().map(|leaf| &leaf.dir)
    }
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

    const UNIFIED: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];

    /// A group of version 2 without limits, if this host lets us make one.
    fn version_2_group() -> Option<Group> {
        let root = UNIFIED.into_iter().map(Path::new).find(|dir| dir.join("cgroup.procs").exists())?;
        let mut group = Group::default();
        let name = format!("codelia-test-{}", std::process::id());
        group.build(&Hierarchy::counting_in(root), &name, Limits::default()).ok()?;
        (!group.leaves.is_empty()).then_some(group)
    }

    #[test]
    fn a_group_that_steps_back_weighs_less_until_it_has_to_hurry() {
        for (version, names) in
            [(Version::One, ["cpu.shares", "cpu.cfs_quota_us"]), (Version::Two, ["cpu.weight", "cpu.max"])]
        {
            let dir = tempfile::tempdir().unwrap();
            names.iter().for_each(|name| fs::write(dir.path().join(name), "").unwrap());
            let leaf = Leaf { dir: dir.path().to_owned(), version };
            let group = Group { cpu: Some(leaf.clone()), ..Group::default() };
            let weight = || leaf.read(names[0]).unwrap().parse::<u64>().unwrap();
            group.lift_cpu_limit().unwrap();
            let usual = weight();
            fs::write(dir.path().join(names[0]), "").unwrap();
            group.lower_priority().unwrap();
            assert_eq!(weight(), usual / 8);
        }
    }

    #[test]
    fn a_version_2_group_kills_all_its_processes_at_once_and_can_be_removed() {
        let Some(mut group) = version_2_group() else {
            let required = std::env::var("CODELIA_TEST_REQUIRE").unwrap_or_default();
            assert!(!required.contains("cgroup"), "no version 2 group can be made here");
            println!("skipped: no version 2 group can be made here");
            return;
        };
        let mut sleeper = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let entry = group.leaves[0].dir.join("cgroup.procs");
        fs::File::options()
            .write(true)
            .open(entry)
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
