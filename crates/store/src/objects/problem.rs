//! Failures of the store of objects.

use std::io;

/// Why an object could not be written, read or removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectProblem {
    /// The object does not exist.
    #[error("not found")]
    Missing,
    /// The object is shorter than its row says.
    #[error("shorter than {expected} bytes")]
    Shortened {
        /// The size that the row asks for.
        expected: u64,
    },
    /// The process has no store.
    #[error("this process has output.store = postgres: set it as the workers do and restart")]
    NotConfigured,
    /// The call took too long. The same call may succeed later.
    #[error("timed out")]
    Timeout,
    /// The disk or the server failed. The same call may succeed later.
    #[error("{0}")]
    Failed(String),
}

impl From<io::Error> for ObjectProblem {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::NotFound {
            Self::Missing
        } else {
            Self::Failed(error.to_string())
        }
    }
}

impl From<object_store::Error> for ObjectProblem {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::Missing,
            error => Self::Failed(error.to_string()),
        }
    }
}
