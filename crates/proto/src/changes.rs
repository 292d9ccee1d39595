//! Transactional runs and their changes.

use std::time::Duration;

use codelia_types::{Change, ChangeKind, ChangedFile, Changes, ChangesState, TransactionMode};

use crate::v1;

impl From<TransactionMode> for v1::TransactionMode {
    fn from(mode: TransactionMode) -> Self {
        match mode {
            TransactionMode::Apply => Self::Apply,
            TransactionMode::Preview => Self::Preview,
            TransactionMode::Hold { .. } => Self::Hold,
        }
    }
}

impl v1::TransactionMode {
    /// The mode; `None` if it is unspecified. Held changes wait for `hold_timeout`.
    #[must_use]
    pub fn to_mode(self, hold_timeout: Duration) -> Option<TransactionMode> {
        match self {
            Self::Unspecified => None,
            Self::Apply => Some(TransactionMode::Apply),
            Self::Preview => Some(TransactionMode::Preview),
            Self::Hold => Some(TransactionMode::Hold { timeout: hold_timeout }),
        }
    }
}

impl From<&Changes> for v1::Changes {
    fn from(changes: &Changes) -> Self {
        let count = |number| i64::try_from(number).unwrap_or(i64::MAX);
        let state = match changes.state {
            ChangesState::Applied => v1::ChangesState::Applied,
            ChangesState::Dropped => v1::ChangesState::Dropped,
            ChangesState::Held => v1::ChangesState::Held,
        };
        Self {
            state: state.into(),
            added: count(changes.added),
            changed: count(changes.changed),
            removed: count(changes.removed),
            entries: changes.entries.iter().map(Into::into).collect(),
            expire_time: None,
        }
    }
}

impl From<&Change> for v1::Change {
    fn from(change: &Change) -> Self {
        let kind = match change.kind {
            ChangeKind::Added => v1::ChangeKind::Added,
            ChangeKind::Changed => v1::ChangeKind::Changed,
            ChangeKind::Removed => v1::ChangeKind::Removed,
        };
        let file = match change.file {
            ChangedFile::Regular => v1::FileKind::Regular,
            ChangedFile::Directory => v1::FileKind::Directory,
            ChangedFile::Symlink => v1::FileKind::Symlink,
            ChangedFile::Special => v1::FileKind::Special,
        };
        Self {
            kind: kind.into(),
            file_kind: file.into(),
            path: change.path.clone(),
            size_bytes: i64::try_from(change.size).unwrap_or(i64::MAX),
        }
    }
}
