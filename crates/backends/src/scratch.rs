//! Directories that a tool makes on the host for each user and does not remove. The last sandbox of
//! a user that ends takes them away; before that they are in use.

use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use codelia_policy::Ids;

/// How many sandboxes of each user there are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scratch(Arc<Mutex<HashMap<u32, usize>>>);

/// One sandbox's use of its user's directories.
#[derive(Debug)]
pub(crate) struct ScratchUse {
    scratch: Scratch,
    uid: u32,
    directories: Vec<PathBuf>,
}

impl Scratch {
    /// Counts a sandbox in, before its tool starts.
    pub(crate) fn enter(&self, ids: Ids, directories: Vec<PathBuf>) -> ScratchUse {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(ids.uid).or_default() += 1;
        ScratchUse { scratch: self.clone(), uid: ids.uid, directories }
    }
}

impl Drop for ScratchUse {
    /// Under the lock, so that no tool starts meanwhile.
    fn drop(&mut self) {
        let mut users = self.scratch.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = users.get(&self.uid).map_or(0, |count| count - 1);
        if left > 0 {
            users.insert(self.uid, left);
            return;
        }
        users.remove(&self.uid);
        for directory in &self.directories {
            match fs::remove_dir(directory) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::warn!(%error, directory = %directory.display(), "a tool's directory is left");
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_sandbox_of_a_user_takes_its_directories_away() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("nsjail.7.root");
        fs::create_dir(&directory).unwrap();
        let (scratch, ids) = (Scratch::default(), Ids { uid: 7, gid: 7 });
        let enter = |ids| scratch.enter(ids, vec![directory.clone(), temp.path().join("absent")]);
        let (first, second) = (enter(ids), enter(ids));
        drop(first);
        assert!(directory.exists());
        drop(second);
        assert!(!directory.exists());
    }
}
