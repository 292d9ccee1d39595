//! A failed step.

use std::{fmt, io, path::PathBuf};

use rustix::io::Errno;

/// A step of several failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    /// What was to be done.
    pub step: &'static str,
    /// To which file or directory.
    pub path: PathBuf,
    /// How the kernel refused.
    pub errno: Errno,
}

impl Error {
    pub(crate) fn new(step: &'static str, path: impl Into<PathBuf>, errno: Errno) -> Self {
        Self { step, path: path.into(), errno }
    }

    /// Wraps a failure of the standard library's file calls, for `map_err`.
    pub(crate) fn io(step: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        // The errors of plain file calls carry an errno, but for text that is not UTF-8.
        move |error| Self::new(step, path, Errno::from_io_error(&error).unwrap_or(Errno::ILSEQ))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.step, self.path.display(), self.errno)
    }
}
