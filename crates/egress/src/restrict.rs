//! Gives up what the proxy does not need: its user, its capabilities, and most system calls.

use std::io;

use codelia_sys::{Errno, capability, process};
use libseccomp::{
    ScmpAction, ScmpArgCompare, ScmpCompareOp, ScmpFilterContext, ScmpSyscall, error::SeccompError,
};

use crate::config::User;

/// System calls that serving takes: sockets, events, memory, threads and time.
#[rustfmt::skip]
const ALLOWED: [&str; 68] = [
    "accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt", "listen", "recvfrom", "recvmsg",
    "sendmsg", "sendto", "setsockopt", "shutdown", "socket", "socketpair",
    "close", "dup", "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "eventfd2",
    "fcntl", "ioctl", "pipe2", "poll", "ppoll", "read", "readv", "splice", "write", "writev",
    "brk", "madvise", "mremap", "munmap",
    "futex", "futex_wait", "futex_wake", "futex_waitv", "get_robust_list", "gettid", "getpid", "membarrier",
    "rseq", "sched_getaffinity", "sched_yield", "set_robust_list", "sigaltstack", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "tgkill", "exit", "exit_group", "restart_syscall",
    "clock_getres", "clock_gettime", "clock_nanosleep", "gettimeofday", "nanosleep", "getrandom",
    "geteuid", "getuid", "getegid", "getgid", "time",
];

/// Calls that libraries try and do without: looking at files, and `clone3`, whose flags no filter
/// can read.
const FAILING: [(&str, Errno); 17] = [
    ("open", Errno::ACCESS),
    ("openat", Errno::ACCESS),
    ("access", Errno::ACCESS),
    ("faccessat", Errno::ACCESS),
    ("faccessat2", Errno::ACCESS),
    ("stat", Errno::ACCESS),
    ("lstat", Errno::ACCESS),
    ("newfstatat", Errno::ACCESS),
    ("fstat", Errno::ACCESS),
    ("statx", Errno::ACCESS),
    ("readlink", Errno::ACCESS),
    ("readlinkat", Errno::ACCESS),
    ("getcwd", Errno::ACCESS),
    ("sysinfo", Errno::ACCESS),
    ("uname", Errno::ACCESS),
    ("prctl", Errno::INVAL),
    ("clone3", Errno::NOSYS),
];

const PROT_EXEC: u64 = 4;
const CLONE_THREAD: u64 = 0x0001_0000;
const PR_SET_NAME: u64 = 15;

/// A restriction that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RestrictError {
    /// Root started the proxy without another user.
    #[error("the egress proxy must not run as root: give it a user")]
    Root,
    /// The user is root.
    #[error("the user and group of the egress proxy must not be 0")]
    RootUser,
    /// A system call failed.
    #[error("cannot {step}")]
    Step {
        /// The step, for people.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The filter cannot be made or installed.
    #[error("cannot install the system call filter")]
    Filter(#[from] SeccompError),
}

fn step(step: &'static str) -> impl FnOnce(Errno) -> RestrictError {
    move |errno| RestrictError::Step { step, source: errno.into() }
}

/// The steps, in order. The first ones need what the later ones drop.
pub(crate) fn restrict(user: Option<User>) -> Result<(), RestrictError> {
    if process::own_uid() == 0 {
        let user = user.ok_or(RestrictError::Root)?;
        if user.uid == 0 || user.gid == 0 {
            return Err(RestrictError::RootUser);
        }
        capability::drop_bounding_set().map_err(step("drop the bounding set"))?;
        process::change_user(user.uid, user.gid).map_err(step("change the user"))?;
    }
    capability::clear_ambient_set().map_err(step("clear the ambient set"))?;
    capability::drop_all().map_err(step("drop capabilities"))?;
    capability::set_no_new_privs().map_err(step("set no_new_privs"))?;
    process::set_not_dumpable().map_err(step("make the process undumpable"))?;
    Ok(filter()?.load()?)
}

/// Any other call kills the process: the worker starts another one.
fn filter() -> Result<ScmpFilterContext, SeccompError> {
    let mut filter = ScmpFilterContext::new(ScmpAction::KillProcess)?;
    filter.set_act_badarch(ScmpAction::KillProcess)?;
    // For all threads that exist, if there are others.
    filter.set_ctl_tsync(true)?;
    for name in ALLOWED {
        add(&mut filter, ScmpAction::Allow, name, &[])?;
    }
    for (name, errno) in FAILING {
        let conditions: &[ScmpArgCompare] = match name {
            "prctl" => &[ScmpArgCompare::new(0, ScmpCompareOp::NotEqual, PR_SET_NAME)],
            _ => &[],
        };
        add(&mut filter, ScmpAction::Errno(errno.raw_os_error()), name, conditions)?;
    }
    let masked =
        |index, mask, value| ScmpArgCompare::new(index, ScmpCompareOp::MaskedEqual(mask), value);
    for name in ["mmap", "mprotect"] {
        add(&mut filter, ScmpAction::Allow, name, &[masked(2, PROT_EXEC, 0)])?;
    }
    add(&mut filter, ScmpAction::Allow, "clone", &[masked(0, CLONE_THREAD, CLONE_THREAD)])?;
    add(
        &mut filter,
        ScmpAction::Allow,
        "prctl",
        &[ScmpArgCompare::new(0, ScmpCompareOp::Equal, PR_SET_NAME)],
    )?;
    // Reading limits, not setting them.
    add(
        &mut filter,
        ScmpAction::Allow,
        "prlimit64",
        &[ScmpArgCompare::new(2, ScmpCompareOp::Equal, 0)],
    )?;
    Ok(filter)
}

/// Adds a rule, unless this architecture or libseccomp does not know the call.
fn add(
    filter: &mut ScmpFilterContext,
    action: ScmpAction,
    name: &str,
    conditions: &[ScmpArgCompare],
) -> Result<(), SeccompError> {
    match ScmpSyscall::from_name(name) {
        Ok(call) => filter.add_rule_conditional(action, call, conditions).map(|_| ()),
        Err(_) => Ok(()),
    }
}
