//! Seccomp: installing a filter of system calls, and answering for the calls it notifies of.

use std::{
    mem::zeroed,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use nix::libc;
use rustix::io::Errno;

/// Filters the calls of this thread, and of all it starts, for good. Each word is one BPF
/// instruction as it is in memory. Answers the listener, closed on exec, of a filter that `tells`. Needs
/// `no_new_privs`.
///
/// # Errors
/// As `seccomp(2)`.
pub fn install(filter: &[u64], tells: bool) -> Result<Option<OwnedFd>, Errno> {
    let length = u16::try_from(filter.len()).map_err(|_| Errno::TOOBIG)?;
    if !tells {
        return set_filter(filter, length, 0).map(|_| None);
    }
    let listener = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // A call that is being answered is then interrupted by nothing but death.
    let answer = match set_filter(filter, length, listener | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV) {
        // Kernels before 5.19.
        Err(Errno::INVAL) => set_filter(filter, length, listener),
        answer => answer,
    };
    // SAFETY: with this flag the answer is a new descriptor of ours.
    answer.map(|fd| Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}

fn set_filter(filter: &[u64], length: u16, flags: libc::c_ulong) -> Result<RawFd, Errno> {
    let program = libc::sock_fprog { len: length, filter: filter.as_ptr().cast_mut().cast() };
    // SAFETY: an instruction has eight bytes and no stricter alignment than a word; the kernel copies
    // as many as `len` says, which is how many there are.
    let answer =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    RawFd::try_from(answer).ok().filter(|fd| *fd >= 0).ok_or_else(crate::fd::last_errno)
}

/// A call that waits for its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notification {
    id: u64,
    /// The number of the call.
    pub nr: i32,
    /// Its arguments.
    pub args: [u64; 6],
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    /// It fails with this errno.
    Fail(Errno),
    /// The kernel carries it out. Its memory may change in between, so this must not be an answer to a
    /// program that is not trusted.
    Continue,
}

/// Takes the next call that waits. Blocks if there is none: poll first.
///
/// # Errors
/// `ENOENT` if its process has ended meanwhile; as `ioctl(SECCOMP_IOCTL_NOTIF_RECV)`.
pub fn receive(listener: impl AsFd) -> Result<Notification, Errno> {
    // SAFETY: plain numbers, for which zero is a value; the kernel asks for zeros.
    let mut notification: libc::seccomp_notif = unsafe { zeroed() };
    control(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut notification)?;
    let data = notification.data;
    Ok(Notification { id: notification.id, nr: data.nr, args: data.args })
}

/// Answers for a call. One whose process has ended is fine.
///
/// # Errors
/// As `ioctl(SECCOMP_IOCTL_NOTIF_SEND)`.
pub fn respond(listener: impl AsFd, call: Notification, answer: Response) -> Result<(), Errno> {
    let (error, flags) = match answer {
        Response::Fail(errno) => (-errno.raw_os_error(), 0),
        Response::Continue => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
    };
    let mut response = libc::seccomp_notif_resp { id: call.id, val: 0, error, flags };
    match control(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut response) {
        Err(Errno::NOENT) => Ok(()),
        answer => answer,
    }
}

fn control<T>(listener: impl AsFd, request: libc::Ioctl, argument: *mut T) -> Result<(), Errno> {
    // SAFETY: each request of the listener goes with the one structure that its callers pass, of the
    // size the request's number tells.
    let answer = unsafe { libc::ioctl(listener.as_fd().as_raw_fd(), request, argument) };
    if answer == 0 { Ok(()) } else { Err(crate::fd::last_errno()) }
}
