//! Signals: dispositions, the mask, and children's ends as something to poll.

use std::{
    os::fd::{AsFd, BorrowedFd},
    time::Instant,
};

use nix::{
    libc,
    sys::{
        signal::{SigSet, SigmaskHow, Signal, sigprocmask},
        signalfd::{SfdFlags, SignalFd},
    },
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};

use crate::process::from_nix;

/// How many bytes the kernel's set of signals has; it has as many signals as that has bits.
const SIGNAL_SET_BYTES: usize = 8;

/// Gives every signal its default disposition: ignored ones survive an exec.
pub fn reset_dispositions() {
    // The kernel's own form: handler (zero is the default), flags, restorer, mask.
    let default = [0_u64; 4];
    for number in 1..=SIGNAL_SET_BYTES * 8 {
        // Not through libc, which keeps two signals to itself and lets an inherited ignore of them
        // stand. The kernel refuses SIGKILL and SIGSTOP, which are at their default.
        // SAFETY: the kernel reads no more than `default` and writes nothing.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                number,
                default.as_ptr(),
                std::ptr::null::<u64>(),
                SIGNAL_SET_BYTES,
            )
        };
    }
}

/// Blocks every signal.
///
/// # Errors
/// As `sigprocmask(2)`.
pub fn block_all() -> Result<(), Errno> {
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None).map_err(from_nix)
}

/// Blocks none.
///
/// # Errors
/// As `sigprocmask(2)`.
pub fn unblock_all() -> Result<(), Errno> {
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None).map_err(from_nix)
}

/// The ends of children, to be polled. SIGCHLD must be blocked.
#[derive(Debug)]
pub struct ChildEvents(SignalFd);

impl ChildEvents {
    /// Opens it.
    ///
    /// # Errors
    /// As `signalfd(2)`.
    pub fn open() -> Result<Self, Errno> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let set = SigSet::from(Signal::SIGCHLD);
        SignalFd::with_flags(&set, flags).map(Self).map_err(from_nix)
    }

    /// Forgets what has been seen. Signals of several children are one.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn clear(&self) -> Result<(), Errno> {
        while self.0.read_signal().map_err(from_nix)?.is_some() {}
        Ok(())
    }
}

impl AsFd for ChildEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of two descriptors can be read or is at its end; says which. Neither is if it is too late before.
///
/// # Errors
/// As `poll(2)`.
pub fn wait_readable(
    first: impl AsFd,
    second: impl AsFd,
    until: Option<Instant>,
) -> Result<(bool, bool), Errno> {
    let mut fds = [PollFd::new(&first, PollFlags::IN), PollFd::new(&second, PollFlags::IN)];
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(Timespec::try_from).transpose().map_err(|_| Errno::INVAL)?;
        match rustix::event::poll(&mut fds, left.as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) => return Ok((!fds[0].revents().is_empty(), !fds[1].revents().is_empty())),
        }
    }
}
