//! Failures of system calls, by step.

use std::io;

use codelia_init::{Failure, Step};
use codelia_sys::Errno;

/// For `map_err`: adds the step to an errno.
pub(crate) fn at(step: Step) -> impl FnOnce(Errno) -> Failure {
    move |errno| Failure::new(step, errno)
}

/// For `map_err`: adds the step to an I/O error.
pub(crate) fn at_io(step: Step) -> impl FnOnce(io::Error) -> Failure {
    move |error| Failure::new(step, errno(&error))
}

/// The errno of an I/O error.
pub(crate) fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
