//! Fork and exec in a process with a single thread.

use std::{
    ffi::{CStr, CString},
    marker::PhantomData,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use nix::libc;
use rustix::{io::Errno, process::Pid};

use super::kill::PidFd;
use crate::{
    call::{check, from_nix, last_errno},
    fd::close_range,
};

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
        check(unsafe { libc::unshare(libc::CLONE_THREAD) })?;
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

    /// Forks into new user, mount, PID and IPC namespaces, where the child is PID 1. It starts in
    /// the cgroup of version 2 with this directory if the kernel permits it; the argument
    /// of `child` says whether it did.
    ///
    /// # Errors
    /// As `clone(2)`.
    pub fn fork_isolated(
        &self,
        group: Option<BorrowedFd<'_>>,
        child: impl FnOnce(bool) -> i32,
    ) -> Result<IsolatedChild, Errno> {
        let mut pidfd: RawFd = -1;
        let in_group = group.map_or(-1, |group| clone_into(group, &mut pidfd));
        let pid = if in_group < 0 { clone_isolated(&mut pidfd) } else { in_group };
        if pid == 0 {
            exit_immediately(child(in_group == 0));
        }
        check(pid)?;
        // SAFETY: CLONE_PIDFD has just created this descriptor; nothing else owns it.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
        Ok(IsolatedChild { pid, pidfd: pidfd.into() })
    }
}

/// A process in namespaces of its own.
#[derive(Debug)]
pub struct IsolatedChild {
    /// The id of the process in the namespace of the parent.
    pub pid: Pid,
    /// A descriptor of the process, safe from reuse.
    pub pidfd: PidFd,
}

const ISOLATED: libc::c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_PIDFD;

/// Forks. The older call, because filters of container engines deny the newer one.
fn clone_isolated(pidfd: &mut RawFd) -> libc::c_long {
    // SAFETY: with CLONE_PIDFD the kernel writes a descriptor to `pidfd`, which outlives the call.
    // Without a stack and without CLONE_VM this is a fork, and no other thread can hold a lock that
    // the child would wait for.
    unsafe { libc::syscall(libc::SYS_clone, ISOLATED | libc::SIGCHLD, 0, &raw mut *pidfd, 0, 0) }
}

/// Forks into a cgroup, without the lock over all processes that joining it takes.
fn clone_into(group: BorrowedFd<'_>, pidfd: &mut RawFd) -> libc::c_long {
    // SAFETY: all fields are numbers, for which zero is valid and means nothing.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = u64::from(ISOLATED.cast_unsigned()) | CLONE_INTO_CGROUP;
    arguments.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    arguments.pidfd = (&raw mut *pidfd).expose_provenance() as u64;
    arguments.cgroup = u64::from(group.as_raw_fd().cast_unsigned());
    // SAFETY: the arguments have the size passed and point to `pidfd`, which outlives the call. It
    // is a fork as above.
    unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size_of_val(&arguments)) }
}

/// The constant of libc has a type that cannot hold it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

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
    use std::{
        fs::{self, File},
        os::fd::AsFd,
        path::Path,
    };

    use super::*;
    use crate::require::available;

    /// An empty version 2 cgroup, if this host allows one.
    fn v2_directory() -> Option<std::path::PathBuf> {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(Path::new);
        let root = mounts.into_iter().find(|dir| dir.join("cgroup.controllers").exists())?;
        let dir = root.join(format!("codelia-clone-{}", std::process::id()));
        fs::create_dir(&dir).ok().map(|()| dir)
    }

    #[test]
    fn child_starts_in_its_group() {
        let dir = v2_directory();
        available("cgroup", dir.is_none().then_some("cannot create a version 2 cgroup"));
        let Some(dir) = dir else { return };
        let group = File::open(&dir).unwrap();
        let mut pidfds = [-1; 2];
        let start = |pid: libc::c_long| {
            if pid == 0 {
                // SAFETY: takes no pointers, and is allowed after a fork of a process with threads.
                unsafe { libc::pause() };
                exit_immediately(0);
            }
            assert!(pid > 0, "{}", last_errno());
            pid.to_string()
        };
        let inside = start(clone_into(group.as_fd(), &mut pidfds[0]));
        start(clone_isolated(&mut pidfds[1]));
        let listed = fs::read_to_string(dir.join("cgroup.procs")).unwrap();
        for pidfd in pidfds {
            // SAFETY: CLONE_PIDFD has created it; nothing else owns it.
            let pidfd = PidFd::from(unsafe { OwnedFd::from_raw_fd(pidfd) });
            pidfd.kill().unwrap();
            rustix::process::waitid(
                rustix::process::WaitId::PidFd(pidfd.as_fd()),
                rustix::process::WaitIdOptions::EXITED,
            )
            .unwrap();
        }
        fs::remove_dir(&dir).unwrap();
        assert_eq!(listed.trim(), inside, "this one, and not the other");
    }

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
