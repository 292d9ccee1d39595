//! Control groups of sandboxes whose worker died: the kernel ended their processes, nobody removed
//! the groups.

use std::{collections::HashSet, fs, path::PathBuf};

use codelia_sys::cgroup::Hierarchy;

use crate::{Error, groups};

/// Finds and removes what is left of sandboxes, also of those of other workers beside this one.
#[derive(Debug)]
pub struct Leftovers {
    hierarchy: Hierarchy,
    /// What was there the last time. A group that is just being made is not, the next time, empty.
    seen: HashSet<PathBuf>,
}

impl Leftovers {
    /// Looks below the same groups that the modes make theirs in.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn new(cgroup_parent: Option<&str>) -> Result<Self, Error> {
        Ok(Self {
            hierarchy: Hierarchy::detect(cgroup_parent.map(std::path::Path::new))?,
            seen: HashSet::new(),
        })
    }

    /// Removes the groups that were there the last time and are empty, and tells how many. Sweeps
    /// must be further apart than it takes to make a sandbox.
    pub fn sweep(&mut self) -> usize {
        let found: HashSet<PathBuf> = self.hierarchy.children(groups::PREFIX).collect();
        // The kernel refuses to remove a group that has processes.
        let removed = found.intersection(&self.seen).filter(|group| fs::remove_dir(group).is_ok()).count();
        self.seen = found;
        removed
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::RunId;
    use codelia_sys::cgroup::{Group, Limits};

    use super::*;

    #[test]
    fn an_empty_group_is_removed_when_it_is_seen_again() {
        let mut leftovers = Leftovers::new(None).unwrap();
        let name = format!("{}{}", groups::PREFIX, RunId::generate());
        let limits = Limits { pids: Some(1), ..Limits::default() };
        let Ok(_left) = Group::create(&leftovers.hierarchy, &name, limits) else {
            return println!("skipped: groups cannot be made here");
        };
        leftovers.sweep();
        assert!(leftovers.hierarchy.children(&name).next().is_some(), "it might be about to be used");
        leftovers.sweep();
        assert!(leftovers.hierarchy.children(&name).next().is_none());
    }
}
