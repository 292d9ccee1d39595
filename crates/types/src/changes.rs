//! The changes that a transactional run made to its workspace.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::words;

/// The fate of the changes of a transactional run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransactionMode {
    /// They are applied if the run succeeds, else dropped.
    Apply,
    /// They are always dropped.
    Preview,
    /// If the run succeeds, they wait for a decision, at most for this long.
    Hold {
        /// The changes are dropped after this time.
        timeout: Duration,
    },
}

impl TransactionMode {
    /// How long held changes wait if the caller does not say.
    pub const DEFAULT_HOLD: Duration = Duration::from_secs(3600);
    /// The longest time that they may wait.
    pub const MAX_HOLD: Duration = Duration::from_secs(24 * 3600);
}

words! {
    /// Whether changes are in the workspace.
    pub enum ChangesState {
        /// All of them are.
        Applied = "applied",
        /// None of them is.
        Dropped = "dropped",
        /// None of them is; they wait for a decision.
        Held = "held",
    }
}

/// The changes of a run: all are counted, the first ones are listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Whether they are in the workspace.
    pub state: ChangesState,
    /// Files and directories that were added.
    pub added: u64,
    /// Files and directories that were changed or replaced.
    pub changed: u64,
    /// Files and directories that were removed. A removed directory counts once.
    pub removed: u64,
    /// At most [`Changes::MAX_LISTED`] of them, with at most [`Changes::MAX_PATH_BYTES`] in all
    /// paths.
    pub entries: Vec<Change>,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Whether the file was added, changed or removed.
    pub kind: ChangeKind,
    /// The type of the file.
    pub file: ChangedFile,
    /// The size in bytes of a regular file: of a removed one as it was, else as it is.
    pub size: u64,
    /// The path in the workspace. Bytes that are not UTF-8 are replaced.
    pub path: String,
}

/// A way in which a file changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// The file was added.
    Added,
    /// The content or the attributes were changed, or the file was replaced.
    Changed,
    /// The file was removed.
    Removed,
}

/// The type of a changed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangedFile {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO or a socket.
    Special,
}

impl Changes {
    /// Maximum number of changes to list, so that a command cannot fill the store.
    pub const MAX_LISTED: usize = 1000;
    /// Maximum length of all listed paths together.
    pub const MAX_PATH_BYTES: usize = 64 * 1024;

    /// No changes.
    #[must_use]
    pub fn none(state: ChangesState) -> Self {
        Self { state, added: 0, changed: 0, removed: 0, entries: Vec::new() }
    }

    /// The number of changes, listed or not.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.added.saturating_add(self.changed).saturating_add(self.removed)
    }

    /// Counts a change and lists it if there is room.
    pub fn add(&mut self, change: Change) {
        let count = match change.kind {
            ChangeKind::Added => &mut self.added,
            ChangeKind::Changed => &mut self.changed,
            ChangeKind::Removed => &mut self.removed,
        };
        *count = count.saturating_add(1);
        // Once one is left out, all later ones are: the list is a beginning.
        let is_complete = self.entries.len() as u64 + 1 == self.total();
        if is_complete && self.entries.len() < Self::MAX_LISTED && self.has_room(change.path.len())
        {
            self.entries.push(change);
        }
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.entries.iter().map(|entry| entry.path.len()).sum::<usize>() + bytes
            <= Self::MAX_PATH_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(path: String) -> Change {
        Change { kind: ChangeKind::Added, file: ChangedFile::Regular, size: 1, path }
    }

    #[test]
    fn changes_are_all_counted_and_partly_listed() {
        let mut many = Changes::none(ChangesState::Dropped);
        (0..2000).for_each(|number| many.add(change(number.to_string())));
        assert_eq!((many.added, many.entries.len()), (2000, Changes::MAX_LISTED));
        let mut long = Changes::none(ChangesState::Dropped);
        (0..100).for_each(|_| long.add(change("x".repeat(4000))));
        long.add(change("short".to_owned()));
        assert_eq!((long.total(), long.entries.len()), (101, Changes::MAX_PATH_BYTES / 4000));
    }
}
