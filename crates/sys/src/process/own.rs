//! Attributes of this process.

use std::{
    ffi::{CStr, OsString},
    os::{fd::AsFd, unix::ffi::OsStringExt},
    path::PathBuf,
    time::Duration,
};

use nix::{
    libc,
    unistd::{Gid, Uid, setgroups, setresgid, setresuid},
};
use rustix::{
    io::Errno,
    process::{DumpableBehavior, Pid, Signal},
    time::{ClockId, clock_gettime},
};

use crate::{
    Error,
    call::{check, from_nix},
};

/// The pid of this process.
#[must_use]
pub fn own_pid() -> Pid {
    rustix::process::getpid()
}

/// The effective user id of this process.
#[must_use]
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The effective group id of this process.
#[must_use]
pub fn own_gid() -> u32 {
    rustix::process::getegid().as_raw()
}

/// The CPU time that the calling thread has used, without what it waited for.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // Neither is negative.
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// The CPUs that this process may run on, by the host's numbers.
///
/// # Errors
/// As `sched_getaffinity(2)`.
pub fn allowed_cpus() -> Result<Vec<u32>, Error> {
    let set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0));
    let set =
        set.map_err(|errno| Error::new("list the CPUs of", "this process", from_nix(errno)))?;
    let is_set = |number: &u32| set.is_set(*number as usize).unwrap_or(false);
    Ok((0..u32::try_from(nix::sched::CpuSet::count()).unwrap_or_default()).filter(is_set).collect())
}

/// Starts a new session without a terminal. Succeeds if this process leads a session already, as
/// the first process of a container does.
///
/// # Errors
/// As `setsid(2)`.
pub fn new_session() -> Result<(), Errno> {
    match rustix::process::setsid() {
        Err(Errno::PERM) if rustix::process::getsid(None)? == own_pid() => Ok(()),
        result => result.map(drop),
    }
}

/// Makes a terminal the controlling terminal of this session.
///
/// # Errors
/// As `ioctl(TIOCSCTTY)`.
pub fn set_controlling_terminal(terminal: impl AsFd) -> Result<(), Errno> {
    rustix::process::ioctl_tiocsctty(terminal)
}

/// Changes the working directory.
///
/// # Errors
/// As `fchdir(2)`.
pub fn change_directory(directory: impl AsFd) -> Result<(), Errno> {
    rustix::process::fchdir(directory)
}

/// Changes the working directory to a path below a directory. Works under filters that answer
/// `openat2` with `ENOSYS`. After an error the working directory is unspecified.
///
/// # Errors
/// `EXDEV` if the path leaves the directory; as `fchdir(2)`, `chdir(2)` and `getcwd(2)`.
pub fn change_directory_below(directory: impl AsFd, path: &str) -> Result<(), Errno> {
    change_directory(directory)?;
    if path.is_empty() {
        return Ok(());
    }
    let root = working_directory()?;
    rustix::process::chdir(path)?;
    if working_directory()?.starts_with(root) { Ok(()) } else { Err(Errno::XDEV) }
}

fn working_directory() -> Result<PathBuf, Errno> {
    let path = rustix::process::getcwd(Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(path.into_bytes())))
}

/// Changes the user and group of this process, irrevocably, and leaves all other groups. Without
/// user 0 all its threads lose their capabilities.
///
/// # Errors
/// As `setgroups(2)`, `setresgid(2)` and `setresuid(2)`.
pub fn change_user(uid: u32, gid: u32) -> Result<(), Errno> {
    let uid = Uid::from_raw(uid);
    let gid = Gid::from_raw(gid);
    // Unlike the system calls, the functions of the C library change every thread.
    let changed = setgroups(&[])
        .and_then(|()| setresgid(gid, gid, gid))
        .and_then(|()| setresuid(uid, uid, uid));
    changed.map_err(from_nix)
}

/// Makes this process undumpable: other processes of its user cannot read, trace or dump it.
///
/// # Errors
/// As `prctl(PR_SET_DUMPABLE)`.
pub fn set_not_dumpable() -> Result<(), Errno> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
}

/// Lets this process write its own files in `/proc` again, such as the id maps of a new user
/// namespace.
///
/// # Errors
/// As `prctl(PR_SET_DUMPABLE)`.
pub fn set_dumpable() -> Result<(), Errno> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)
}

/// Sets the name of this process, as `ps` shows it.
///
/// # Errors
/// As `prctl(PR_SET_NAME)`.
pub fn set_name(name: &CStr) -> Result<(), Errno> {
    rustix::thread::set_name(name)
}

/// Sets the host name in the UTS namespace of this process.
///
/// # Errors
/// As `sethostname(2)`.
pub fn set_host_name(name: &str) -> Result<(), Errno> {
    // SAFETY: the pointer and the length are those of the name.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) })
}

/// Makes this process the parent of every orphan among its descendants.
///
/// # Errors
/// As `prctl(PR_SET_CHILD_SUBREAPER)`.
pub fn become_subreaper() -> Result<(), Errno> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
}

/// Has the kernel kill this process when its parent exits.
///
/// # Errors
/// As `prctl(PR_SET_PDEATHSIG)`.
pub fn die_with_parent() -> Result<(), Errno> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
}
