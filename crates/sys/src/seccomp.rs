//! Seccomp: installing a system call filter and responding to its notifications.

use std::{
    mem::zeroed,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::libc;
use rustix::io::Errno;

use crate::call::{check, new_descriptor};

/// Installs a filter on this thread and all its children, irrevocably. Each word of `filter` is one
/// BPF instruction in memory layout. With `notify` it returns the listener of the filter,
/// close-on-exec. Needs `no_new_privs`.
///
/// # Errors
/// As `seccomp(2)`.
pub fn install(filter: &[u64], notify: bool) -> Result<Option<OwnedFd>, Errno> {
    let length = u16::try_from(filter.len()).map_err(|_| Errno::TOOBIG)?;
    if !notify {
        return check(set_filter(filter, length, 0)).map(|()| None);
    }
    let listener = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // Once the supervisor has received a call, only a fatal signal can interrupt it.
    let flags = listener | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    // SAFETY: with NEW_LISTENER the call returns a new descriptor that nothing else owns.
    let installed = unsafe { new_descriptor(set_filter(filter, length, flags)) };
    match installed {
        // Kernels before 5.19 lack that flag.
        // SAFETY: the same.
        Err(Errno::INVAL) => unsafe { new_descriptor(set_filter(filter, length, listener)) },
        installed => installed,
    }
    .map(Some)
}

fn set_filter(filter: &[u64], length: u16, flags: libc::c_ulong) -> libc::c_long {
    let program = libc::sock_fprog { len: length, filter: filter.as_ptr().cast_mut().cast() };
    // SAFETY: an instruction has eight bytes and no stricter alignment than a `u64`; the kernel
    // copies `len` of them, which is the length of `filter`.
    unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    }
}

/// A system call that waits for a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notification {
    id: u64,
    /// The thread that called, in the receiver's PID namespace; 0 if it is not visible there.
    pub pid: u32,
    /// The system call number.
    pub nr: i32,
    /// The arguments of the call.
    pub args: [u64; 6],
}

/// The response to a notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    /// The call fails with this errno.
    Fail(Errno),
    /// The kernel executes the call. The memory behind its arguments may have changed since it was
    /// inspected, so never decide by that memory.
    Continue,
}

/// Receives the next notification. Blocks until there is one: poll first.
///
/// # Errors
/// `ENOENT` if the calling process has ended meanwhile; as `ioctl(SECCOMP_IOCTL_NOTIF_RECV)`.
pub fn receive(listener: impl AsFd) -> Result<Notification, Errno> {
    // SAFETY: the struct holds only integers, for which zero is valid; the kernel requires zeros.
    let mut notification: libc::seccomp_notif = unsafe { zeroed() };
    ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut notification)?;
    let data = notification.data;
    Ok(Notification { id: notification.id, pid: notification.pid, nr: data.nr, args: data.args })
}

/// Responds to a notification. Succeeds if the calling process has ended.
///
/// # Errors
/// As `ioctl(SECCOMP_IOCTL_NOTIF_SEND)`.
pub fn respond(listener: impl AsFd, call: Notification, response: Response) -> Result<(), Errno> {
    let (error, flags) = match response {
        Response::Fail(errno) => (-errno.raw_os_error(), 0),
        Response::Continue => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
    };
    let mut message = libc::seccomp_notif_resp { id: call.id, val: 0, error, flags };
    match ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut message) {
        Err(Errno::NOENT) => Ok(()),
        result => result,
    }
}

/// Asks the kernel to continue callers on the processor of the responder, which saves the wake-up
/// of another one. Has no effect on kernels before 6.6.
pub fn wake_on_same_processor(listener: impl AsFd) {
    /// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`.
    const SYNC_WAKE_UP: libc::c_ulong = 1;
    let listener = listener.as_fd().as_raw_fd();
    // SAFETY: takes a number, no pointer.
    unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS, SYNC_WAKE_UP) };
}

/// Whether the call still waits: its thread has not ended, and its id names no other one.
///
/// # Errors
/// As `ioctl(SECCOMP_IOCTL_NOTIF_ID_VALID)`.
pub fn is_waiting(listener: impl AsFd, call: Notification) -> Result<bool, Errno> {
    let mut id = call.id;
    match ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &raw mut id) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Responds to a notification with a copy of a descriptor: the call returns its number. Succeeds if
/// the calling process has ended. The errors that the calling process can cause, such as too many
/// open files, become those of its call.
///
/// # Errors
/// As `ioctl(SECCOMP_IOCTL_NOTIF_ADDFD)`.
pub fn respond_with(
    listener: impl AsFd,
    call: Notification,
    fd: BorrowedFd<'_>,
    close_on_exec: bool,
) -> Result<(), Errno> {
    let mut message = libc::seccomp_notif_addfd {
        id: call.id,
        flags: libc::SECCOMP_ADDFD_FLAG_SEND as u32,
        // The kernel only has unsigned fields here.
        srcfd: fd.as_raw_fd() as u32,
        newfd: 0,
        newfd_flags: if close_on_exec { libc::O_CLOEXEC as u32 } else { 0 },
    };
    // The call returns the number of the new descriptor.
    match ioctl(&listener, libc::SECCOMP_IOCTL_NOTIF_ADDFD, &raw mut message) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => {
            respond(listener, call, Response::Fail(errno))
        }
        Err(errno) => Err(errno),
    }
}

fn ioctl<T>(listener: impl AsFd, request: libc::Ioctl, argument: *mut T) -> Result<(), Errno> {
    // SAFETY: all callers pass the struct that belongs to their request, of the size encoded in
    // the request number; it lives until the call returns.
    check(unsafe { libc::ioctl(listener.as_fd().as_raw_fd(), request, argument) })
}
