//! Whose a group is. Its name says which process made it, so that the groups of a process that was
//! killed can be told from those of one that lives, and removed by whoever comes next.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use super::{Controller, Hierarchy};
use crate::Error;

const PREFIX: &str = "codelia-";

/// A process for ever: its id may be used again, but not with the same start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Owner {
    pid: u32,
    /// In clock ticks since boot.
    started: u64,
}

static THIS_PROCESS: LazyLock<Option<Owner>> = LazyLock::new(|| {
    let pid = std::process::id();
    Some(Owner { pid, started: start_of(pid)? })
});

impl Owner {
    /// Reads `codelia-{pid}-{started}-…`.
    fn parse(name: &str) -> Option<Self> {
        let mut words = name.strip_prefix(PREFIX)?.splitn(3, '-');
        let owner = Self { pid: words.next()?.parse().ok()?, started: words.next()?.parse().ok()? };
        words.next().map(|_| owner)
    }

    fn lives(self) -> bool {
        start_of(self.pid) == Some(self.started)
    }
}

/// The name of a group that this process makes.
pub(super) fn mark(name: &str) -> Result<String, Error> {
    let unknown = || Error::new("read the start of", "/proc/self/stat", rustix::io::Errno::PROTO);
    let Owner { pid, started } = THIS_PROCESS.ok_or_else(unknown)?;
    Ok(format!("{PREFIX}{pid}-{started}-{name}"))
}

impl Hierarchy {
    /// Removes the groups that processes which are gone left empty; those that are not empty yet
    /// stay for the next time. Tells how many it removed.
    ///
    /// # Errors
    /// A parent cannot be listed.
    pub fn remove_orphans(&self) -> Result<usize, Error> {
        let mut removed = 0;
        for dir in self.directories() {
            for group in orphans(&dir)? {
                removed += usize::from(fs::remove_dir(group).is_ok());
            }
        }
        Ok(removed)
    }

    fn directories(&self) -> Vec<PathBuf> {
        let controllers = Controller::LIMITING.into_iter().chain([Controller::CpuTime]);
        let mut dirs: Vec<_> =
            controllers.filter_map(|controller| Some(self.base(controller).ok()?.dir.clone())).collect();
        dirs.sort();
        dirs.dedup();
        dirs
    }
}

fn orphans(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(Error::io("list", dir))?;
    let orphaned = |name: &str| Owner::parse(name).is_some_and(|owner| !owner.lives());
    Ok(entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(orphaned))
        .map(|entry| entry.path())
        .collect())
}

/// When a process started, if it is there: the 22nd field of its `stat`, counted behind the name,
/// which may hold anything.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, behind_name) = stat.rsplit_once(") ")?;
    behind_name.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_of_processes_that_are_gone_are_orphans() {
        let dir = tempfile::tempdir().unwrap();
        let mine = mark("a-b").unwrap();
        let own_start = start_of(std::process::id()).unwrap();
        let gone = format!("codelia-{}-{}-x", std::process::id(), own_start + 1);
        for name in [mine.as_str(), gone.as_str(), "codelia-other", "somebody-1-2-x", "codelia-x-1-y"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(orphans(dir.path()).unwrap(), [dir.path().join(gone)]);
    }
}
