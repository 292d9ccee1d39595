//! Whose a group is. Its name says which process made it, so that the groups of a process that was
//! killed can be told from those of one that lives, and removed by whoever comes next.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{Controller, Hierarchy};
use crate::{Error, process_id::ProcessId};

const PREFIX: &str = "codelia-";

/// The name of a group that this process makes.
pub(super) fn mark(name: &str) -> Result<String, Error> {
    Ok(format!("{PREFIX}{}-{name}", ProcessId::current()?))
}

impl Hierarchy {
    /// Removes the groups that processes which are gone left empty, each parent with all below it; those that are not
    /// empty yet stay for the next time. Tells how many it removed.
    ///
    /// # Errors
    /// A parent cannot be listed.
    pub fn remove_orphans(&self) -> Result<usize, Error> {
        let mut removed = 0;
        for dir in self.directories() {
            for group in orphans(&dir)? {
                removed += remove(&group);
            }
        }
        Ok(removed)
    }

    fn directories(&self) -> Vec<PathBuf> {
        // Parents of processes lie beside each other.
        let dir = |controller| Some(self.base(controller).ok()?.dir.parent()?.to_owned());
        let mut dirs: Vec<_> =
            Controller::ALL.into_iter().filter_map(dir).filter(|dir| dir.exists()).collect();
        dirs.sort();
        dirs.dedup();
        dirs
    }
}

/// A group and those below it. Tells how many there were.
fn remove(group: &Path) -> usize {
    let below = fs::read_dir(group).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    let removed = below.map(|entry| usize::from(fs::remove_dir(entry.path()).is_ok())).sum::<usize>();
    removed + usize::from(fs::remove_dir(group).is_ok())
}

fn orphans(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(Error::io("list", dir))?;
    let owner = |name: &str| ProcessId::from_name_prefix(name.strip_prefix(PREFIX)?);
    let orphaned = |name: &str| owner(name).is_some_and(|owner| !owner.is_alive());
    Ok(entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(orphaned))
        .map(|entry| entry.path())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_of_processes_that_are_gone_are_orphans() {
        let dir = tempfile::tempdir().unwrap();
        let mine = mark("a-b").unwrap();
        // No process started before the first one.
        let gone = format!("codelia-{}-0-x", std::process::id());
        for name in [mine.as_str(), gone.as_str(), "codelia-other", "somebody-1-2-x", "codelia-x-1-y"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(orphans(dir.path()).unwrap(), [dir.path().join(gone)]);
    }
}
