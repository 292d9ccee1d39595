//! Signals: dispositions, the signal mask, and a descriptor for the exit of children.

use std::os::fd::{AsFd, BorrowedFd};

use nix::{
    libc,
    sys::{
        signal::{SigSet, SigmaskHow, Signal, sigprocmask},
        signalfd::{SfdFlags, SignalFd},
    },
};
use rustix::io::Errno;

use crate::call::from_nix;

/// The size of the kernel's signal set. There is one signal for each bit.
pub(crate) const SIGNAL_SET_BYTES: usize = 8;

/// Gives every signal its default disposition, since ignored ones stay ignored after an exec.
///
/// Makes system calls only, so that it can run in a child that shares this process's memory.
pub fn reset_dispositions() {
    // The kernel's layout: handler (zero is the default), flags, restorer, mask.
    let default = [0_u64; 4];
    for number in 1..=SIGNAL_SET_BYTES * 8 {
        // Not through libc, which reserves two signals and would leave them ignored if they were.
        // The kernel refuses SIGKILL and SIGSTOP, which always have their default.
        // SAFETY: the kernel reads `default`, which has the layout it expects, and writes nothing
        // since the pointer for the previous action is null.
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

/// Unblocks every signal.
///
/// # Errors
/// As `sigprocmask(2)`.
pub fn unblock_all() -> Result<(), Errno> {
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None).map_err(from_nix)
}

/// A descriptor that becomes readable when a child exits. SIGCHLD must be blocked.
#[derive(Debug)]
pub struct ChildEvents(SignalFd);

impl ChildEvents {
    /// Opens the descriptor.
    ///
    /// # Errors
    /// As `signalfd(2)`.
    pub fn open() -> Result<Self, Errno> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let set = SigSet::from(Signal::SIGCHLD);
        SignalFd::with_flags(&set, flags).map(Self).map_err(from_nix)
    }

    /// Consumes the pending events. One event may stand for several children.
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
