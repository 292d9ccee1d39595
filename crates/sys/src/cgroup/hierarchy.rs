//! The mounted cgroup hierarchies, and the parent of our cgroups in each.

use std::{
    ffi::OsStr,
    fs,
    io::ErrorKind,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{io::Errno, process::Pid};

use super::{
    controller::{Controller, Version},
    delegation,
    group_dir::GroupDir,
    name::owned_name,
    pool::Pool,
};
use crate::{
    Error,
    proc_self::{MountLine, has_option},
};

/// The name of the cgroup that holds all sandboxes of a process.
const PARENT_NAME: &str = "sandboxes";

/// For each controller, the parent of our cgroups in the hierarchy that has the controller, or why
/// there is none. Dropping it removes the parents.
#[derive(Debug)]
pub struct Hierarchy {
    /// In the order of [`Controller::ALL`].
    parents: [Result<ParentGroup, Error>; Controller::ALL.len()],
    /// Directories of ended cgroups for the next ones.
    pub(super) pool: Arc<Pool>,
}

/// The parent of all sandbox cgroups of this process in one hierarchy. Created with the first of
/// them, removed with the [`Hierarchy`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParentGroup {
    pub(super) dir: PathBuf,
    pub(super) version: Version,
    /// Whether to set `cpu.idle`.
    cpu_idle: bool,
}

/// Where cgroups are created, and their CPU priority.
#[derive(Debug, Clone, Default)]
pub struct CgroupParent {
    /// The cgroup below which to create them, the same path in each hierarchy; `None` for the
    /// cgroup of this process. In version 2 it must have no processes.
    pub name: Option<String>,
    /// Whether they run only when nothing outside needs the CPU (`cpu.idle`).
    pub cpu_idle: bool,
}

impl Hierarchy {
    /// Finds the parents: the named cgroup in each hierarchy, else the cgroup of this process, or
    /// in version 2 its nearest ancestor whose children can have controllers. A controller without
    /// a parent returns its error when it is used.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn detect(config: &CgroupParent) -> Result<Self, Error> {
        let named = config.name.as_deref().map(Path::new);
        let read = |path: &str| fs::read_to_string(path).map_err(Error::io("read", path));
        let mounts = read("/proc/self/mountinfo")?;
        let own = read("/proc/self/cgroup")?;
        let in_v1 = |controller| {
            let dir = group_path(Version::V1, controller, &mounts, &own, named)?;
            let cpu_idle = config.cpu_idle && controller == Controller::Cpu;
            Some(ParentGroup { dir, version: Version::V1, cpu_idle })
        };
        let missing_in_v1: Vec<_> = Controller::LIMITING
            .into_iter()
            .filter(|&controller| in_v1(controller).is_none())
            .collect();
        let v2_dir = find_v2_dir(&mounts, &own, named, &missing_in_v1);
        let parent_name = owned_name(PARENT_NAME)?;
        let parent = |controller| {
            // `cpu.idle` belongs in the hierarchy that limits CPU time.
            let cpu_idle = config.cpu_idle && in_v1(Controller::Cpu).is_none();
            let in_v2 = || Ok(ParentGroup { cpu_idle, ..v2_parent(v2_dir.clone(), controller)? });
            let found = in_v1(controller).map_or_else(in_v2, Ok)?;
            Ok(ParentGroup { dir: found.dir.join(&parent_name), ..found })
        };
        Ok(Self::from_fn(parent))
    }

    /// The cgroups of a process.
    ///
    /// # Errors
    /// The process does not exist.
    pub(super) fn of_process(pid: Pid) -> Result<Self, Error> {
        let read = |path: String| fs::read_to_string(&path).map_err(Error::io("read", path));
        let mounts = read("/proc/self/mountinfo".to_owned())?;
        let own = read(format!("/proc/{pid}/cgroup"))?;
        Ok(Self::from_fn(|controller| find_group(controller, &mounts, &own)))
    }

    fn from_fn(parent: impl Fn(Controller) -> Result<ParentGroup, Error>) -> Self {
        Self { parents: Controller::ALL.map(parent), pool: Arc::default() }
    }

    pub(super) fn parent(&self, controller: Controller) -> Result<&ParentGroup, Error> {
        self.parents[controller as usize].as_ref().map_err(Clone::clone)
    }

    /// Removes the parents that this process created, with the cgroups that wait in them. One that
    /// another `Hierarchy` of this process uses is not empty and stays, or is created again.
    pub fn remove_parents(&self) {
        self.pool.close();
        let Ok(own) = owned_name(PARENT_NAME) else { return };
        for parent in self.parents.iter().flatten() {
            if parent.dir.ends_with(&own) {
                let _ = fs::remove_dir(&parent.dir);
            }
        }
    }
}

impl Drop for Hierarchy {
    fn drop(&mut self) {
        self.remove_parents();
    }
}

impl ParentGroup {
    /// Creates the parent, or enables another controller for its children.
    ///
    /// The parent keeps the default CPU weight, so that under contention all sandboxes weigh as
    /// much as one process next to it; with `cpu_idle` they get only idle CPU time.
    pub(super) fn create(&self, controller: Controller) -> Result<(), Error> {
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(Error::io("create cgroup", &self.dir)(error));
            }
            _ => {}
        }
        let own = GroupDir { path: self.dir.clone(), version: self.version };
        match self.version {
            Version::V2 => self.enable_controller(controller)?,
            Version::V1 if controller == Controller::Cpuset => self.inherit_cpuset()?,
            Version::V1 if controller == Controller::Memory => own.count_sockets()?,
            Version::V1 => {}
        }
        if self.cpu_idle { own.write("cpu.idle", 1) } else { Ok(()) }
    }

    /// Enables it in the cgroup above first: a child can have only its parent's controllers.
    fn enable_controller(&self, controller: Controller) -> Result<(), Error> {
        let above = self.dir.parent().unwrap_or(&self.dir);
        let needed = match controller {
            Controller::Io | Controller::Cpuset => vec![controller],
            _ => Controller::LIMITING
                .into_iter()
                .filter(|&controller| delegation::is_enabled(above, controller))
                .collect(),
        };
        delegation::enable_controllers(above, &needed)?;
        delegation::enable_controllers(&self.dir, &needed)
    }

    /// Copies CPUs and memory nodes from the cgroup above: a new version 1 cgroup has none.
    fn inherit_cpuset(&self) -> Result<(), Error> {
        let group = |dir: &Path| GroupDir { path: dir.to_owned(), version: Version::V1 };
        let own = group(&self.dir);
        let above = group(self.dir.parent().unwrap_or(&self.dir));
        ["cpuset.cpus", "cpuset.mems"]
            .into_iter()
            .try_for_each(|name| own.write(name, above.read(name)?.trim()))
    }
}

/// The one directory in version 2, where all controllers share a hierarchy.
fn find_v2_dir(
    mounts: &str,
    own: &str,
    named: Option<&Path>,
    needed: &[Controller],
) -> Option<PathBuf> {
    let mount = find_mount(Version::V2, Controller::Cpuacct, mounts)?;
    let dir = group_path(Version::V2, Controller::Cpuacct, mounts, own, named)?;
    Some(if named.is_some() || needed.is_empty() {
        dir
    } else {
        delegation::choose_parent(path(mount.target), dir, needed)
    })
}

fn find_group(controller: Controller, mounts: &str, own: &str) -> Result<ParentGroup, Error> {
    let found = [Version::V1, Version::V2].into_iter().find_map(|version| {
        let dir = group_path(version, controller, mounts, own, None)?;
        Some(ParentGroup { dir, version, cpu_idle: false })
    });
    found.ok_or_else(|| no_hierarchy(controller))
}

fn v2_parent(dir: Option<PathBuf>, controller: Controller) -> Result<ParentGroup, Error> {
    let dir = dir.ok_or_else(|| no_hierarchy(controller))?;
    if Controller::LIMITING.contains(&controller) {
        delegation::enable_controllers(&dir, &[controller])?;
    }
    Ok(ParentGroup { dir, version: Version::V2, cpu_idle: false })
}

fn no_hierarchy(controller: Controller) -> Error {
    Error::new("find a cgroup hierarchy for", controller.as_str(), Errno::NODEV)
}

/// The directory of the named cgroup, else of the process's own cgroup, in a hierarchy.
fn group_path(
    version: Version,
    controller: Controller,
    mounts: &str,
    own: &str,
    named: Option<&Path>,
) -> Option<PathBuf> {
    let mount = find_mount(version, controller, mounts)?;
    let group = match named {
        Some(named) => named.to_owned(),
        // Paths in `/proc/self/cgroup` start at the root of the hierarchy, of which only a part may
        // be mounted.
        None => {
            own_group(version, controller, own)?.strip_prefix(path(mount.root)).ok()?.to_owned()
        }
    };
    Some(path(mount.target).join(group.strip_prefix("/").unwrap_or(&group)))
}

fn find_mount(version: Version, controller: Controller, mounts: &str) -> Option<MountLine<'_>> {
    MountLine::parse_all(mounts.as_bytes()).find(|mount| match version {
        Version::V1 => {
            mount.file_system == b"cgroup"
                && has_option(mount.file_system_options, controller.name_v1())
        }
        Version::V2 => mount.file_system == b"cgroup2",
    })
}

fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// The path of the process in the text of `/proc/self/cgroup`: lines of `id:controllers:path`.
fn own_group(version: Version, controller: Controller, own: &str) -> Option<&Path> {
    own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let controllers = fields.nth(1)?;
        let path = fields.next()?;
        let matches = match version {
            Version::V1 => controllers.split(',').any(|name| name == controller.name_v1()),
            Version::V2 => controllers.is_empty(),
        };
        matches.then_some(Path::new(path))
    })
}

#[cfg(test)]
impl Hierarchy {
    /// Only this version 2 directory, and only to count CPU time.
    pub(super) fn cpuacct_in(dir: &Path) -> Self {
        Self::from_fn(|controller| match controller {
            Controller::Cpuacct => {
                Ok(ParentGroup { dir: dir.to_owned(), version: Version::V2, cpu_idle: false })
            }
            other => Err(no_hierarchy(other)),
        })
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

    fn v1_path(controller: Controller, named: Option<&str>) -> Option<PathBuf> {
        group_path(Version::V1, controller, HYBRID, OWN, named.map(Path::new))
    }

    #[test]
    fn own_cgroup_is_found_below_the_mount_point() {
        assert_eq!(v1_path(Controller::Memory, None), Some("/sys/fs/cgroup/memory/job".into()));
        assert_eq!(v1_path(Controller::Cpu, None), Some("/sys/fs/cgroup/cpu,cpuacct".into()));
        assert_eq!(v1_path(Controller::Cpuacct, None), Some("/sys/fs/cgroup/cpu,cpuacct".into()));
        assert_eq!(v1_path(Controller::Pids, None), None);
        let v2 = group_path(Version::V2, Controller::Pids, HYBRID, OWN, None);
        assert_eq!(v2, Some("/sys/fs/cgroup/unified/user.slice".into()));
    }

    #[test]
    fn named_parent_replaces_the_own_cgroup() {
        assert_eq!(
            v1_path(Controller::Cpu, Some("/a/b")),
            Some("/sys/fs/cgroup/cpu,cpuacct/a/b".into())
        );
        assert_eq!(
            v1_path(Controller::Cpu, Some("a")),
            Some("/sys/fs/cgroup/cpu,cpuacct/a".into())
        );
    }
}
