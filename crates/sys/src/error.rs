//! Errors: of an operation that makes several system calls, and of one call.

use std::{fmt, io, path::PathBuf};

use rustix::io::Errno;

use crate::call::from_io;

/// A step failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    /// The step, as a verb phrase: `create cgroup`.
    pub step: &'static str,
    /// The file, directory or other object of the step.
    pub path: PathBuf,
    /// The kernel's error.
    pub errno: Errno,
}

impl Error {
    pub(crate) fn new(step: &'static str, path: impl Into<PathBuf>, errno: Errno) -> Self {
        Self { step, path: path.into(), errno }
    }

    /// Wraps an error of the standard library's file functions, for `map_err`.
    pub(crate) fn io(
        step: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::new(step, path, from_io(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.step, self.path.display(), self.errno)
    }
}
