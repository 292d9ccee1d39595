//! Fork and exec in a process with a single thread.

use std::{
    ffi::{CStr, CString},
    marker::PhantomData,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

use nix::libc;
use rustix::{io::Errno, process::Pid};

use super::{PidFd, from_nix};
use crate::fd::{close_range, last_errno};

/// Proof that this process has one thread and no descriptors except stdin, stdout, stderr and those
/// opened since. Only such a process may run ordinary code between fork and exec.
#[derive(Debug)]
pub struct SingleThread {
    /// Makes the type neither `Send` nor `Sync`.
    not_send: PhantomData<*const ()>,
}

impl SingleThread {
    /// Closes every descriptor above stderr. Call it first in `main`, before anything is opened, in
    /// a program that starts no thread.
    ///
    /// # Errors
    /// `EINVAL` if there is another thread; as `close_range(2)`.
    pub fn claim() -> Result<Self, Errno> {
        // SAFETY: takes no pointers. With CLONE_THREAD alone it changes nothing, and fails if the
        // process has another thread.
        if unsafe { libc::unshare(libc::CLONE_THREAD) } != 0 {
            return Err(last_errno());
        }
        close_range(3, 0)?;
        Ok(Self { not_send: PhantomData })
    }

    /// Forks. The child runs `child` and exits with the returned code; the parent gets its pid.
    ///
    /// # Errors
    /// As `fork(2)`.
    pub fn fork(&self, child: impl FnOnce() -> i32) -> Result<Pid, Errno> {
        // SAFETY: there is no other thread that could hold a lock which the child would wait for.
        match unsafe { libc::fork() } {
            0 => exit_immediately(child()),
            pid if pid > 0 => Pid::from_raw(pid).ok_or(Errno::INVAL),
            _ => Err(last_errno()),
        }
    }

    /// Forks into new user, mount, PID and IPC namespaces, where the child is PID 1.
    ///
    /// # Errors
    /// As `clone3(2)`.
    pub fn fork_isolated(&self, child: impl FnOnce() -> i32) -> Result<(Pid, PidFd), Errno> {
        let namespaces = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC;
        let mut pidfd: RawFd = -1;
        // SAFETY: all fields are numbers, for which zero is valid and means nothing.
        let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
        arguments.flags = u64::from((namespaces | libc::CLONE_PIDFD).cast_unsigned());
        arguments.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
        arguments.pidfd = (&raw mut pidfd).expose_provenance() as u64;
        // SAFETY: the arguments have the size passed and point to `pidfd`, which outlives the call.
        // Without a stack and without CLONE_VM this is a fork, and no other thread can hold a
        // lock that the child would wait for.
        match unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size_of_val(&arguments)) } {
            0 => exit_immediately(child()),
            pid if pid > 0 => {
                // SAFETY: CLONE_PIDFD has just created this descriptor; nothing else owns it.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
                Ok((pid, pidfd.into()))
            }
            _ => Err(last_errno()),
        }
    }
}

/// Exits without flushing buffers or running destructors and exit handlers.
fn exit_immediately(code: i32) -> ! {
    // SAFETY: ends the process; no code runs after it.
    unsafe { libc::_exit(code) }
}

/// Replaces the program of this process. Returns only on failure.
#[must_use]
pub fn exec(program: &CStr, argv: &[CString], env: &[CString]) -> Errno {
    let Err(errno) = nix::unistd::execve(program, argv, env);
    from_nix(errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_fails_with_other_threads() {
        // The test harness has threads, and the claim fails before it closes anything.
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || receiver.recv());
            assert_eq!(SingleThread::claim().unwrap_err(), Errno::INVAL);
            drop(sender);
        });
    }
}
