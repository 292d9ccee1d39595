//! Where groups can be made: the hierarchies that are mounted, and the parent in each.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use rustix::{io::Errno, process::Pid};

use super::{Controller, Version, delegation, leaf::Leaf, owner};
use crate::Error;

/// The parent of our groups, for each controller.
#[derive(Debug)]
pub struct Hierarchy {
    memory: Result<Base, Error>,
    pids: Result<Base, Error>,
    cpu: Result<Base, Error>,
    cpu_time: Result<Base, Error>,
    io: Result<Base, Error>,
    processors: Result<Base, Error>,
}

/// What the parent of all groups of a process is called.
const PARENT: &str = "sandboxes";

/// A directory below which groups are made: the process's own, in the one that was found. It is made with the first group
/// and removed with the hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Base {
    pub(super) dir: PathBuf,
    pub(super) version: Version,
    /// Whether all below it get only what processor time others leave.
    cpu_idle: bool,
}

/// Where groups are made, and what they are to everybody else.
#[derive(Debug, Clone, Default)]
pub struct CgroupParent {
    /// The group below which they are made, the same in each hierarchy; else the process's own. In version 2 it must have
    /// no processes of its own.
    pub name: Option<String>,
    /// Whether they get only the processor time that everybody outside leaves.
    pub cpu_idle: bool,
}

impl Hierarchy {
    /// Finds the parents: the group that is named in each hierarchy, else the group of this process, in
    /// version 2 the nearest one that can have limited children. A controller without one says so when
    /// it is used.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn detect(asked: &CgroupParent) -> Result<Self, Error> {
        let parent = asked.name.as_deref().map(Path::new);
        let read = |path: &str| fs::read_to_string(path).map_err(Error::io("read", path));
        let mounts = read("/proc/self/mountinfo")?;
        let own = read("/proc/self/cgroup")?;
        let one = |controller| {
            let dir = parent_in(Version::One, controller, &mounts, &own, parent)?;
            Some(Base {
                dir,
                version: Version::One,
                cpu_idle: asked.cpu_idle && controller == Controller::Cpu,
            })
        };
        let needed: Vec<_> = Controller::LIMITING.into_iter().filter(|&it| one(it).is_none()).collect();
        let two = version_2(&mounts, &own, parent, &needed);
        let parent = owner::mark(PARENT)?;
        let base = |controller| {
            // Processes yield in the hierarchy where their processor time is limited.
            let cpu_idle = asked.cpu_idle && one(Controller::Cpu).is_none();
            let in_two = || Ok(Base { cpu_idle, ..limited(two.clone(), controller)? });
            let found = one(controller).map_or_else(in_two, Ok)?;
            Ok(Base { dir: found.dir.join(&parent), ..found })
        };
        Ok(Self {
            memory: base(Controller::Memory),
            pids: base(Controller::Pids),
            cpu: base(Controller::Cpu),
            cpu_time: base(Controller::Cpuacct),
            io: base(Controller::Io),
            processors: base(Controller::Cpuset),
        })
    }

    /// The groups that a process is in.
    ///
    /// # Errors
    /// The process is gone.
    pub(super) fn of_process(pid: Pid) -> Result<Self, Error> {
        let read = |path: String| fs::read_to_string(&path).map_err(Error::io("read", path));
        let mounts = read("/proc/self/mountinfo".to_owned())?;
        let own = read(format!("/proc/{pid}/cgroup"))?;
        let base = |controller| locate(controller, &mounts, &own);
        Ok(Self {
            memory: base(Controller::Memory),
            pids: base(Controller::Pids),
            cpu: base(Controller::Cpu),
            cpu_time: base(Controller::Cpuacct),
            io: base(Controller::Io),
            processors: base(Controller::Cpuset),
        })
    }

    pub(super) fn base(&self, controller: Controller) -> Result<&Base, Error> {
        match controller {
            Controller::Memory => &self.memory,
            Controller::Pids => &self.pids,
            Controller::Cpu => &self.cpu,
            Controller::Cpuacct => &self.cpu_time,
            Controller::Io => &self.io,
            Controller::Cpuset => &self.processors,
        }
        .as_ref()
        .map_err(Clone::clone)
    }
}

impl Base {
    /// Makes the process's own parent, or lets its children have this controller too. Where processors are short, it has
    /// the usual weight: all sandboxes together count as one process outside, so that those who serve everybody go first;
    /// or none at all if it cpu_idle.
    pub(super) fn make(&self, controller: Controller) -> Result<(), Error> {
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(Error::io("create cgroup", &self.dir)(error));
            }
            _ => {}
        }
        match self.version {
            Version::Two => self.delegate(controller)?,
            Version::One if controller == Controller::Cpuset => self.inherit_processors()?,
            Version::One => {}
        }
        let own = Leaf { dir: self.dir.clone(), version: self.version };
        if self.cpu_idle { own.write("cpu.idle", 1) } else { Ok(()) }
    }

    /// Children get what their parent has and its parent gives on.
    fn delegate(&self, controller: Controller) -> Result<(), Error> {
        let above = self.dir.parent().unwrap_or(&self.dir);
        let wanted = match controller {
            Controller::Io | Controller::Cpuset => vec![controller],
            _ => Controller::LIMITING.into_iter().filter(|&it| delegation::gives(above, it)).collect(),
        };
        delegation::delegate(above, &wanted)?;
        delegation::delegate(&self.dir, &wanted)
    }

    /// A group of version 1 has neither processors nor memory until it is told.
    fn inherit_processors(&self) -> Result<(), Error> {
        let leaf = |dir: &Path| Leaf { dir: dir.to_owned(), version: Version::One };
        let (own, above) = (leaf(&self.dir), leaf(self.dir.parent().unwrap_or(&self.dir)));
        ["cpuset.cpus", "cpuset.mems"]
            .into_iter()
            .try_for_each(|name| own.write(name, above.read(name)?.trim()))
    }
}

impl Hierarchy {
    /// Removes the process's own parents. What another hierarchy of this process still uses is not empty, or is
    /// made again.
    pub fn remove_parents(&self) {
        for controller in Controller::ALL {
            if let Ok(base) = self.base(controller)
                && base
                    .dir
                    .file_name()
                    .is_some_and(|name| owner::mark(PARENT).is_ok_and(|own| name == own.as_str()))
            {
                let _ = fs::remove_dir(&base.dir);
            }
        }
    }
}

impl Drop for Hierarchy {
    fn drop(&mut self) {
        self.remove_parents();
    }
}

/// The one parent of version 2, for all controllers: a process is in one group there.
fn version_2(mounts: &str, own: &str, parent: Option<&Path>, needed: &[Controller]) -> Option<PathBuf> {
    let mount = mounted(Version::Two, Controller::Cpuacct, mounts)?;
    let dir = parent_in(Version::Two, Controller::Cpuacct, mounts, own, parent)?;
    Some(if parent.is_some() || needed.is_empty() {
        dir
    } else {
        delegation::choose(mount.point, dir, needed)
    })
}

fn locate(controller: Controller, mounts: &str, own: &str) -> Result<Base, Error> {
    let found = [Version::One, Version::Two].into_iter().find_map(|version| {
        let dir = parent_in(version, controller, mounts, own, None)?;
        Some(Base { dir, version, cpu_idle: false })
    });
    found.ok_or_else(|| Error::new("find a cgroup hierarchy for", controller.as_str(), Errno::NODEV))
}

fn limited(dir: Option<PathBuf>, controller: Controller) -> Result<Base, Error> {
    let absent = || Error::new("find a cgroup hierarchy for", controller.as_str(), Errno::NODEV);
    let dir = dir.ok_or_else(absent)?;
    if Controller::LIMITING.contains(&controller) {
        delegation::delegate(&dir, &[controller])?;
    }
    Ok(Base { dir, version: Version::Two, cpu_idle: false })
}

fn parent_in(
    version: Version,
    controller: Controller,
    mounts: &str,
    own: &str,
    parent: Option<&Path>,
) -> Option<PathBuf> {
    let mount = mounted(version, controller, mounts)?;
    let group = match parent {
        Some(parent) => parent.to_owned(),
        // Paths of groups count from the root of the hierarchy, which need not be what is mounted.
        None => own_path(version, controller, own)?.strip_prefix(mount.root).ok()?.to_owned(),
    };
    Some(mount.point.join(group.strip_prefix("/").unwrap_or(&group)))
}

fn mounted(version: Version, controller: Controller, mounts: &str) -> Option<Mount<'_>> {
    mounts.lines().filter_map(Mount::parse).find(|mount| mount.serves(version, controller))
}

/// The path of this process in `/proc/self/cgroup`: lines of `id:controllers:path`.
fn own_path(version: Version, controller: Controller, own: &str) -> Option<&Path> {
    own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let serves = match version {
            Version::One => controllers.split(',').any(|name| name == controller.name_in_version_1()),
            Version::Two => controllers.is_empty(),
        };
        serves.then_some(Path::new(path))
    })
}

/// A line of `/proc/self/mountinfo`.
struct Mount<'a> {
    root: &'a Path,
    point: &'a Path,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let mut after = after.split(' ');
        Some(Self {
            root: Path::new(before.next()?),
            point: Path::new(before.next()?),
            kind: after.next()?,
            options: after.nth(1)?,
        })
    }

    fn serves(&self, version: Version, controller: Controller) -> bool {
        match version {
            Version::One => {
                self.kind == "cgroup" && self.options.split(',').any(|o| o == controller.name_in_version_1())
            }
            Version::Two => self.kind == "cgroup2",
        }
    }
}

#[cfg(test)]
impl Hierarchy {
    /// Only this version 2 directory, and only to count CPU time in.
    pub(super) fn counting_in(dir: &Path) -> Self {
        let absent = || Err(Error::new("find", "controller", Errno::NODEV));
        let cpu_time = Ok(Base { dir: dir.to_owned(), version: Version::Two, cpu_idle: false });
        let [memory, pids, cpu, io, processors] = [(); 5].map(|()| absent());
        Self { memory, pids, cpu, cpu_time, io, processors }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
    const OWN: &str = "4:memory:/docker/abc/job\n2:cpu,cpuacct:/\n0::/user.slice";

    fn one(controller: Controller, parent: Option<&str>) -> Option<PathBuf> {
        parent_in(Version::One, controller, HYBRID, OWN, parent.map(Path::new))
    }

    #[test]
    fn the_own_group_is_found_below_what_is_mounted() {
        assert_eq!(one(Controller::Memory, None), Some("/sys/fs/cgroup/memory/job".into()));
        assert_eq!(one(Controller::Cpu, None), Some("/sys/fs/cgroup/cpu,cpuacct".into()));
        assert_eq!(one(Controller::Cpuacct, None), Some("/sys/fs/cgroup/cpu,cpuacct".into()));
        assert_eq!(one(Controller::Pids, None), None);
        let two = parent_in(Version::Two, Controller::Pids, HYBRID, OWN, None);
        assert_eq!(two, Some("/sys/fs/cgroup/unified/user.slice".into()));
    }

    #[test]
    fn a_parent_that_was_given_takes_the_place_of_the_own_group() {
        assert_eq!(one(Controller::Cpu, Some("/a/b")), Some("/sys/fs/cgroup/cpu,cpuacct/a/b".into()));
        assert_eq!(one(Controller::Cpu, Some("a")), Some("/sys/fs/cgroup/cpu,cpuacct/a".into()));
    }
}
