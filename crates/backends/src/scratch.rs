//! Directories that a tool makes on the host for each user and does not remove. The last sandbox of
//! a user that ends takes them away; before that they are in use.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

/// How many sandboxes of each user this process has.
static USERS: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// One sandbox's use of its user's directories.
#[derive(Debug)]
pub(crate) struct Scratch {
    uid: u32,
    directories: Vec<PathBuf>,
}

impl Scratch {
    /// Counts a sandbox in, before its tool starts.
    pub(crate) fn enter(uid: u32, directories: Vec<PathBuf>) -> Self {
        *USERS.lock().unwrap_or_else(PoisonError::into_inner).entry(uid).or_default() += 1;
        Self { uid, directories }
    }
}

impl Drop for Scratch {
    /// Under the lock, so that no tool of this process starts meanwhile.
    fn drop(&mut self) {
        let mut users = USERS.lock().unwrap_or_else(PoisonError::into_inner);
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
        let enter = || Scratch::enter(7, vec![directory.clone(), temp.path().join("absent")]);
        let (first, second) = (enter(), enter());
        drop(first);
        assert!(directory.exists());
        drop(second);
        assert!(!directory.exists());
    }
}
