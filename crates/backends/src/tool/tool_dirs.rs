//! Directories that a tool makes on the host for each user and does not remove. The last sandbox of
//! a user that ends takes them away; before that they are in use. Those of a worker that was killed are
//! taken away by the sweep of the next one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// How many sandboxes of each user this process has.
static USERS: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// One sandbox's use of its user's directories.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// `None` once it has ended.
    uid: Option<u32>,
    directories: Vec<PathBuf>,
}

impl Scratch {
    /// Counts a sandbox in, before its tool starts.
    pub(crate) fn enter(uid: u32, directories: Vec<PathBuf>) -> Self {
        *users().entry(uid).or_default() += 1;
        Self { uid: Some(uid), directories }
    }

    /// Counts it out; answers how many directories are left that should not be.
    pub(crate) fn leave(mut self) -> usize {
        self.end()
    }

    /// Under the lock, so that no tool of this process starts meanwhile.
    fn end(&mut self) -> usize {
        let Some(uid) = self.uid.take() else { return 0 };
        let mut users = users();
        let others = users.remove(&uid).map_or(0, |count| count - 1);
        if others > 0 {
            users.insert(uid, others);
            return 0;
        }
        self.directories.iter().filter(|directory| !is_removed(directory)).count()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.end();
    }
}

fn users() -> MutexGuard<'static, BTreeMap<u32, usize>> {
    USERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Never what a link leads to, and never what is not empty.
fn is_removed(directory: &Path) -> bool {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, directory = %directory.display(), "a tool's directory is left");
            false
        }
        _ => true,
    }
}

/// Removes the directories in `place` that belong to users without a process on this host. `user_of` tells
/// whose a directory of that name is, if it may be taken away; it must belong to that user indeed.
pub(crate) fn remove_abandoned(place: &Path, user_of: impl Fn(&str) -> Option<u32>) -> io::Result<usize> {
    let entries = match fs::read_dir(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        answer => answer?,
    };
    let found: Vec<_> = entries
        .flatten()
        .filter_map(|entry| Some((user_of(entry.file_name().to_str()?)?, entry.path())))
        .filter(|(uid, path)| belongs_to(path, *uid))
        .collect();
    if found.is_empty() {
        return Ok(0);
    }
    let in_use = users();
    let alive = living_users()?;
    let gone = found.iter().filter(|(uid, _)| !in_use.contains_key(uid) && !alive.contains(uid));
    Ok(gone.filter(|(_, path)| is_removed(path)).count())
}

fn belongs_to(path: &Path, uid: u32) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == uid)
}

/// The users of all processes. The owner of a process's directory will not do: it is root's where the
/// process hides its memory.
fn living_users() -> io::Result<BTreeSet<u32>> {
    let processes = fs::read_dir("/proc")?.flatten().map(|entry| entry.path().join("status"));
    let statuses = processes.filter_map(|path| fs::read_to_string(path).ok());
    Ok(statuses.filter_map(|status| user_in(&status)).collect())
}

fn user_in(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_sandbox_of_a_user_takes_its_directories_away() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("nsjail.7.root");
        fs::create_dir(&directory).unwrap();
        let enter = || Scratch::enter(7, vec![directory.clone(), temp.path().join("absent")]);
        let (first, second) = (enter(), enter());
        drop(first);
        assert!(directory.exists());
        drop(second);
        assert!(!directory.exists());
    }

    #[test]
    fn a_directory_that_cannot_be_removed_is_counted() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("root/full")).unwrap();
        assert_eq!(Scratch::enter(8, vec![temp.path().join("root")]).leave(), 1);
        fs::remove_dir(temp.path().join("root/full")).unwrap();
        assert_eq!(Scratch::enter(8, vec![temp.path().join("root")]).leave(), 0);
    }

    #[test]
    fn only_directories_of_users_that_are_gone_are_abandoned() {
        let temp = tempfile::tempdir().unwrap();
        let path = |name: &str| temp.path().join(name);
        for name in ["ours.1", "other", "full.1"] {
            fs::create_dir(path(name)).unwrap();
        }
        fs::create_dir(path("full.1/inner")).unwrap();
        fs::create_dir(path("target")).unwrap();
        std::os::unix::fs::symlink(path("target"), path("link.1")).unwrap();
        let own = fs::metadata(temp.path()).unwrap().uid();
        let named = |uid| move |name: &str| name.ends_with(".1").then_some(uid);
        assert_eq!(remove_abandoned(temp.path(), named(own)).unwrap(), 0, "we live");
        assert_eq!(remove_abandoned(temp.path(), named(own + 1)).unwrap(), 0, "they belong to us");
        assert_eq!(remove_abandoned(&path("absent"), named(own)).unwrap(), 0);

        let gone = 0x6fff_fff0;
        if ["ours.1", "full.1"]
            .iter()
            .any(|name| std::os::unix::fs::chown(path(name), Some(gone), None).is_err())
        {
            println!("skipped: only root gives directories away");
            return;
        }
        std::os::unix::fs::lchown(path("link.1"), Some(gone), None).unwrap();
        assert_eq!(remove_abandoned(temp.path(), named(gone)).unwrap(), 1);
        assert!(!path("ours.1").exists());
        assert!(["other", "full.1", "target", "link.1"].iter().all(|name| path(name).exists()));
    }
}
