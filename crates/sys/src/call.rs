//! Results of system calls: those that are made without a wrapper, and errors of other libraries.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

use nix::libc;
use rustix::io::Errno;

/// The error of this thread's last system call.
pub(crate) fn last_errno() -> Errno {
    Errno::from_raw_os_error(nix::errno::Errno::last_raw())
}

/// The error of a call that returned a negative number.
pub(crate) fn check(result: impl Into<i64>) -> Result<(), Errno> {
    if result.into() < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Takes the descriptor that a call has just created.
///
/// # Safety
/// The call returned a new descriptor that nothing else owns, or a negative number.
pub(crate) unsafe fn new_descriptor(result: libc::c_long) -> Result<OwnedFd, Errno> {
    let number = RawFd::try_from(result).ok().filter(|fd| *fd >= 0).ok_or_else(last_errno)?;
    // SAFETY: the caller vouches for it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Converts the error number of the `nix` crate.
pub(crate) fn from_nix(errno: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(errno as i32)
}

/// Converts an error of the standard library's file functions. These carry an errno, except for
/// text that is not UTF-8.
pub(crate) fn from_io(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::ILSEQ)
}
