//! Delegation in version 2: choosing the parent of our cgroups and enabling controllers for its
//! children. A cgroup with processes cannot have children with controllers ("no internal
//! processes"), so the cgroup in which a worker was started is usable only after the worker has
//! left it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Access, access},
    io::Errno,
};

use super::{controller::Controller, name::owned_name};
use crate::{Error, process};

/// The name of the child cgroup that this process moves into.
const OWN_CHILD: &str = "worker";

/// Finds the nearest cgroup, from `own` up to the mount point, whose children can have these
/// controllers. If this process is alone in its own cgroup, it moves into a child of it first.
/// Returns `own` if there is none; using it then fails with the reason.
pub(super) fn choose_parent(
    mount_point: &Path,
    own: PathBuf,
    controllers: &[Controller],
) -> PathBuf {
    let own = match own.parent() {
        Some(parent) if own.file_name() == own_child_name().as_deref().map(AsRef::as_ref) => {
            parent.to_owned()
        }
        _ => own,
    };
    let is_usable =
        |dir: &&Path| can_create_children(dir) && enable_controllers(dir, controllers).is_ok();
    if is_usable(&own.as_path()) || move_into_child(&own, controllers).is_ok() {
        return own;
    }
    let ancestors = own.ancestors().skip(1).take_while(|dir| dir.starts_with(mount_point));
    let found = ancestors.into_iter().find(is_usable).map(Path::to_owned);
    found.unwrap_or(own)
}

/// Enables controllers for the children of a cgroup, all or none. Fails with `EBUSY` if the cgroup
/// has processes: the kernel would refuse some controllers, and with others no process could enter
/// the children.
pub(super) fn enable_controllers(dir: &Path, controllers: &[Controller]) -> Result<(), Error> {
    let path = dir.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let is_missing = |name: &&str| !enabled.split_ascii_whitespace().any(|word| word == *name);
    let missing = controllers.iter().map(|controller| controller.as_str()).filter(is_missing);
    let words: Vec<_> = missing.map(|name| format!("+{name}")).collect();
    if words.is_empty() {
        return Ok(());
    }
    if has_processes(dir)? {
        return Err(Error::new("enable controllers in", path, Errno::BUSY));
    }
    fs::write(&path, words.join(" ")).map_err(Error::io("enable controllers in", &path))
}

/// Whether a controller is enabled for the children of a cgroup.
pub(super) fn is_enabled(dir: &Path, controller: Controller) -> bool {
    let enabled = fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
    enabled.split_ascii_whitespace().any(|word| word == controller.as_str())
}

/// Whether a cgroup has processes that keep its children from having controllers. The root cgroup,
/// the only one without `cgroup.type`, is exempt.
fn has_processes(dir: &Path) -> Result<bool, Error> {
    let path = dir.join("cgroup.procs");
    let listed = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    Ok(!listed.trim().is_empty() && dir.join("cgroup.type").exists())
}

/// Whether this process may create cgroups below and move its children into them.
fn can_create_children(dir: &Path) -> bool {
    [dir, &dir.join("cgroup.procs")].into_iter().all(|path| access(path, Access::WRITE_OK).is_ok())
}

/// Moves this process into a child of its cgroup, if it is the only process there.
fn move_into_child(dir: &Path, controllers: &[Controller]) -> Result<(), Error> {
    let procs = dir.join("cgroup.procs");
    let processes = fs::read_to_string(&procs).map_err(Error::io("read", &procs))?;
    let is_alone = process::parse_pids(&processes).eq([process::own_pid()]);
    let Some(name) = own_child_name().filter(|_| is_alone) else {
        return Err(Error::new("leave cgroup", dir, Errno::BUSY));
    };
    let child = dir.join(name);
    fs::create_dir(&child).map_err(Error::io("create cgroup", &child))?;
    let result = enter(&child).and_then(|()| enable_controllers(dir, controllers));
    if result.is_err() {
        // Best effort: return the first error, not one of this cleanup.
        let _ = enter(dir)
            .and_then(|()| fs::remove_dir(&child).map_err(Error::io("remove cgroup", &child)));
    }
    result
}

fn enter(dir: &Path) -> Result<(), Error> {
    let procs = dir.join("cgroup.procs");
    fs::write(&procs, "0").map_err(Error::io("enter cgroup", &procs))
}

fn own_child_name() -> Option<String> {
    owned_name(OWN_CHILD).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_controllers_are_enabled() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("cgroup.subtree_control");
        fs::write(&control, "cpu\n").unwrap();
        fs::write(dir.path().join("cgroup.procs"), "").unwrap();
        enable_controllers(dir.path(), &[Controller::Cpu]).unwrap();
        assert_eq!(fs::read_to_string(&control).unwrap(), "cpu\n");
        enable_controllers(dir.path(), &Controller::LIMITING).unwrap();
        assert_eq!(fs::read_to_string(&control).unwrap(), "+memory +pids");
    }
}
