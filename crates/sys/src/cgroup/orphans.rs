//! Orphans: cgroups of dead processes, which a later process removes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{controller::Controller, hierarchy::Hierarchy, name};
use crate::Error;

impl Hierarchy {
    /// Removes the empty cgroups of dead processes, each parent with all below it. Those that still
    /// have processes stay for the next call. Returns how many were removed.
    ///
    /// # Errors
    /// A directory cannot be listed.
    pub fn remove_orphans(&self) -> Result<usize, Error> {
        let mut removed = 0;
        for dir in self.orphan_dirs() {
            for group in orphans(&dir)? {
                removed += remove_tree(&group);
            }
        }
        Ok(removed)
    }

    /// The directories that hold the parent cgroups of all Codelia processes.
    fn orphan_dirs(&self) -> Vec<PathBuf> {
        let dir = |controller| Some(self.parent(controller).ok()?.dir.parent()?.to_owned());
        let mut dirs: Vec<_> =
            Controller::ALL.into_iter().filter_map(dir).filter(|dir| dir.exists()).collect();
        dirs.sort();
        dirs.dedup();
        dirs
    }
}

/// Removes a cgroup and its children. Returns how many were removed.
fn remove_tree(group: &Path) -> usize {
    let children =
        fs::read_dir(group).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    let removed =
        children.map(|entry| usize::from(fs::remove_dir(entry.path()).is_ok())).sum::<usize>();
    removed + usize::from(fs::remove_dir(group).is_ok())
}

fn orphans(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(Error::io("list cgroups in", dir))?;
    let is_orphan = |name: &str| name::owner(name).is_some_and(|owner| !owner.is_alive());
    Ok(entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(is_orphan))
        .map(|entry| entry.path())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cgroups_of_dead_processes_are_orphans() {
        let dir = tempfile::tempdir().unwrap();
        let own = name::owned_name("a-b").unwrap();
        // This pid exists, but no process has start time 0.
        let dead = format!("codelia-{}-0-x", std::process::id());
        for name in [own.as_str(), dead.as_str(), "codelia-other", "other-1-2-x", "codelia-x-1-y"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(orphans(dir.path()).unwrap(), [dir.path().join(dead)]);
    }
}
