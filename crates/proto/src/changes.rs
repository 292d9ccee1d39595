//! Transactional runs and their changes.

use std::time::Duration;

use codelia_types::{Change, Changes, TransactionMode};

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
        Self {
            state: v1::ChangesState::from(changes.state).into(),
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
        Self {
            kind: v1::ChangeKind::from(change.kind).into(),
            file_kind: v1::FileKind::from(change.file).into(),
            path: change.path.clone(),
            size_bytes: i64::try_from(change.size).unwrap_or(i64::MAX),
        }
    }
}
