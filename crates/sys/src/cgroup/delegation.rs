//! The parent of our groups in version 2. Only a group without processes of its own can have limited
//! children, so that the group a worker was started in serves only once the worker has left it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Access, access},
    io::Errno,
};

use super::{Controller, owner};
use crate::{Error, process};

/// What this process calls the group below that it moves into.
const ASIDE: &str = "worker";

/// Finds the nearest group, from `own` up to the mount point, whose children these controllers can
/// limit. Where this process is alone in its own group it steps aside into one below. If there is none,
/// the answer is `own`, and its use tells why not.
pub(super) fn choose(point: &Path, own: PathBuf, controllers: &[Controller]) -> PathBuf {
    let own = match own.parent() {
        Some(parent) if own.file_name() == aside_name().as_deref().map(AsRef::as_ref) => parent.to_owned(),
        _ => own,
    };
    let serves = |dir: &&Path| may_have_children(dir) && delegate(dir, controllers).is_ok();
    if serves(&own.as_path()) || step_aside(&own, controllers).is_ok() {
        return own;
    }
    let above = own.ancestors().skip(1).take_while(|dir| dir.starts_with(point));
    let found = above.into_iter().find(serves).map(Path::to_owned);
    found.unwrap_or(own)
}

/// Lets the children of a group be limited, by all of these or none. `EBUSY` where the group has processes
/// of its own: the kernel would refuse some controllers, and others would make children that no process
/// can enter.
pub(super) fn delegate(dir: &Path, controllers: &[Controller]) -> Result<(), Error> {
    let path = dir.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let is_missing = |name: &&str| !enabled.split_ascii_whitespace().any(|word| word == *name);
    let missing = controllers.iter().map(|controller| controller.as_str()).filter(is_missing);
    let words: Vec<_> = missing.map(|name| format!("+{name}")).collect();
    if words.is_empty() {
        return Ok(());
    }
    if has_processes(dir)? {
        return Err(Error::new("delegate controllers in", path, Errno::BUSY));
    }
    fs::write(&path, words.join(" ")).map_err(Error::io("delegate controllers in", &path))
}

/// Whether the children of a group are limited by this controller.
pub(super) fn gives(dir: &Path, controller: Controller) -> bool {
    let given = fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
    given.split_ascii_whitespace().any(|word| word == controller.as_str())
}

/// The kernel's own root may have some, and is the only group without a type.
fn has_processes(dir: &Path) -> Result<bool, Error> {
    let path = dir.join("cgroup.procs");
    let listed = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    Ok(!listed.trim().is_empty() && dir.join("cgroup.type").exists())
}

/// Whether this process may make groups below and move its own into them.
fn may_have_children(dir: &Path) -> bool {
    [dir, &dir.join("cgroup.procs")].into_iter().all(|path| access(path, Access::WRITE_OK).is_ok())
}

fn step_aside(dir: &Path, controllers: &[Controller]) -> Result<(), Error> {
    let entry = dir.join("cgroup.procs");
    let processes = fs::read_to_string(&entry).map_err(Error::io("read", &entry))?;
    let is_alone = process::pids(&processes).eq([process::own_pid()]);
    let Some(name) = aside_name().filter(|_| is_alone) else {
        return Err(Error::new("leave", dir, Errno::BUSY));
    };
    let aside = dir.join(name);
    fs::create_dir(&aside).map_err(Error::io("create cgroup", &aside))?;
    let moved = enter(&aside).and_then(|()| delegate(dir, controllers));
    if moved.is_err() {
        // As it was: it may never have left, and the first error is the one to tell.
        let _ = enter(dir).and_then(|()| fs::remove_dir(&aside).map_err(Error::io("remove cgroup", &aside)));
    }
    moved
}

fn enter(dir: &Path) -> Result<(), Error> {
    let entry = dir.join("cgroup.procs");
    fs::write(&entry, "0").map_err(Error::io("enter cgroup", &entry))
}

fn aside_name() -> Option<String> {
    owner::mark(ASIDE).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_told_once_to_limit_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("cgroup.subtree_control");
        fs::write(&control, "cpu\n").unwrap();
        fs::write(dir.path().join("cgroup.procs"), "").unwrap();
        delegate(dir.path(), &[Controller::Cpu]).unwrap();
        assert_eq!(fs::read_to_string(&control).unwrap(), "cpu\n");
        delegate(dir.path(), &Controller::LIMITING).unwrap();
        assert_eq!(fs::read_to_string(&control).unwrap(), "+memory +pids");
    }
}
