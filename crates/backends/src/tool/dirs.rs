//! Directories that a tool creates on the host for each user and does not remove. The last sandbox
//! of a user removes them when it ends. The upkeep removes those of killed workers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::status::ProcessStatus;

/// The number of this process's sandboxes for each user.
static SANDBOXES: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// One sandbox's use of its user's directories.
#[derive(Debug)]
pub(super) struct ToolDirs {
    /// `None` once released.
    uid: Option<u32>,
    directories: Vec<PathBuf>,
}

impl ToolDirs {
    /// Registers a sandbox. Call it before its tool starts.
    pub(super) fn acquire(uid: u32, directories: Vec<PathBuf>) -> Self {
        *sandboxes().entry(uid).or_default() += 1;
        Self { uid: Some(uid), directories }
    }

    /// Unregisters the sandbox. The last one of a user removes the directories; returns how many
    /// could not be removed.
    pub(super) fn release(mut self) -> usize {
        self.release_once()
    }

    /// Removes under the lock, so that no tool of this process starts in the meantime.
    fn release_once(&mut self) -> usize {
        let Some(uid) = self.uid.take() else { return 0 };
        let mut sandboxes = sandboxes();
        let others = sandboxes.remove(&uid).map_or(0, |count| count - 1);
        if others > 0 {
            sandboxes.insert(uid, others);
            return 0;
        }
        self.directories.iter().filter(|directory| !remove_empty(directory)).count()
    }
}

impl Drop for ToolDirs {
    fn drop(&mut self) {
        self.release_once();
    }
}

fn sandboxes() -> MutexGuard<'static, BTreeMap<u32, usize>> {
    SANDBOXES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes a directory unless it is a symbolic link or not empty. Returns whether it is gone.
fn remove_empty(directory: &Path) -> bool {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, directory = %directory.display(), "tool directory not removed");
            false
        }
        _ => true,
    }
}

/// Removes the directories in `parent` that belong to users without a process on this host.
/// `owner_of` maps a directory's name to its user, or to `None` if it must not be removed. The
/// directory must really belong to that user.
pub(super) fn remove_abandoned(
    parent: &Path,
    owner_of: impl Fn(&str) -> Option<u32>,
) -> io::Result<usize> {
    let entries = match fs::read_dir(parent) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let found: Vec<_> = entries
        .flatten()
        .filter_map(|entry| Some((owner_of(entry.file_name().to_str()?)?, entry.path())))
        .filter(|(uid, path)| is_directory_of(path, *uid))
        .collect();
    if found.is_empty() {
        return Ok(0);
    }
    let in_use = sandboxes();
    let active = users_with_processes()?;
    let abandoned =
        found.iter().filter(|(uid, _)| !in_use.contains_key(uid) && !active.contains(uid));
    Ok(abandoned.filter(|(_, path)| remove_empty(path)).count())
}

fn is_directory_of(path: &Path, uid: u32) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == uid)
}

/// The users of all processes. Reads `status`, because root owns the `/proc/PID` directory of a
/// process that is not dumpable.
fn users_with_processes() -> io::Result<BTreeSet<u32>> {
    let statuses = fs::read_dir("/proc")?.flatten();
    Ok(statuses.filter_map(|entry| Some(ProcessStatus::read(&entry.path())?.uid)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::require::available;

    #[test]
    fn last_sandbox_of_a_user_removes_directories() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("nsjail.7.root");
        fs::create_dir(&directory).unwrap();
        let acquire = || ToolDirs::acquire(7, vec![directory.clone(), temp.path().join("absent")]);
        let (first, second) = (acquire(), acquire());
        drop(first);
        assert!(directory.exists());
        drop(second);
        assert!(!directory.exists());
    }

    #[test]
    fn directory_that_cannot_be_removed_is_counted() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("root/full")).unwrap();
        assert_eq!(ToolDirs::acquire(8, vec![temp.path().join("root")]).release(), 1);
        fs::remove_dir(temp.path().join("root/full")).unwrap();
        assert_eq!(ToolDirs::acquire(8, vec![temp.path().join("root")]).release(), 0);
    }

    #[test]
    fn only_directories_without_user_processes_are_abandoned() {
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
        assert_eq!(remove_abandoned(temp.path(), named(own)).unwrap(), 0, "the user has processes");
        assert_eq!(
            remove_abandoned(temp.path(), named(own + 1)).unwrap(),
            0,
            "they belong to another user"
        );
        assert_eq!(remove_abandoned(&path("absent"), named(own)).unwrap(), 0);

        let unused = 0x6fff_fff0;
        let owned_by_others = ["ours.1", "full.1"]
            .iter()
            .all(|name| std::os::unix::fs::chown(path(name), Some(unused), None).is_ok());
        if !available("root", (!owned_by_others).then_some("only root can change the owner")) {
            return;
        }
        std::os::unix::fs::lchown(path("link.1"), Some(unused), None).unwrap();
        assert_eq!(remove_abandoned(temp.path(), named(unused)).unwrap(), 1);
        assert!(!path("ours.1").exists());
        assert!(["other", "full.1", "target", "link.1"].iter().all(|name| path(name).exists()));
    }
}
