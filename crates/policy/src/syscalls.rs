//! Lists of system calls: allowed by default, added by `debug`, and never allowed.
//!
//! The allow-list has what glibc and musl, Python, Node, Go, Rust, Java, git, gcc and make use. A
//! policy that names a call in none of the lists is refused. The backends filter arguments.

use std::sync::{Arc, LazyLock};

/// System calls that are allowed by default, in groups.
#[rustfmt::skip]
const ALLOWED: &[&[&str]] = &[
    // Files by descriptor.
    &[
        "read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2",
        "close", "close_range", "lseek", "dup", "dup2", "dup3", "fcntl", "flock", "ioctl", "pipe", "pipe2",
        "fsync", "fdatasync", "sync_file_range", "ftruncate", "fallocate", "fadvise64", "readahead",
        "sendfile", "splice", "tee", "vmsplice", "copy_file_range", "cachestat",
    ],
    // Files by name; the mounts decide which names exist. `mknod` makes FIFOs and sockets; devices
    // need a capability that no command has. `openat2` is answered with ENOSYS, because its mode is
    // in memory that no filter can read; policies may still name it.
    &[
        "open", "openat", "openat2", "creat", "access", "faccessat", "faccessat2", "stat", "lstat", "fstat",
        "newfstatat", "statx", "statfs", "fstatfs", "getdents", "getdents64", "getcwd", "chdir", "fchdir",
        "mkdir", "mkdirat", "rmdir", "rename", "renameat", "renameat2", "link", "linkat", "symlink",
        "symlinkat", "readlink", "readlinkat", "unlink", "unlinkat", "mknod", "mknodat", "truncate", "chmod",
        "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "umask", "utime", "utimes",
        "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "getxattr", "lgetxattr", "fgetxattr",
        "listxattr", "llistxattr", "flistxattr", "removexattr", "lremovexattr", "fremovexattr",
        "inotify_init", "inotify_init1", "inotify_add_watch", "inotify_rm_watch",
    ],
    // Waiting for descriptors.
    &[
        "poll", "ppoll", "select", "pselect6", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_wait",
        "epoll_pwait", "epoll_pwait2", "eventfd", "eventfd2", "signalfd", "signalfd4", "timerfd_create",
        "timerfd_settime", "timerfd_gettime",
    ],
    // Memory. `memfd_create` is how runtimes hold generated code; `get_mempolicy` only reads.
    &[
        "brk", "mmap", "munmap", "mprotect", "mremap", "msync", "mincore", "madvise", "mlock", "mlock2",
        "munlock", "mlockall", "munlockall", "mseal", "memfd_create", "pkey_mprotect", "pkey_alloc",
        "pkey_free", "map_shadow_stack", "get_mempolicy", "membarrier",
    ],
    // Processes and threads. The namespace flags of `clone` are refused by an argument filter;
    // `clone3` is answered with ENOSYS, so it is not here and glibc falls back to `clone`.
    &[
        "clone", "fork", "vfork", "execve", "execveat", "exit", "exit_group", "wait4", "waitid", "getpid",
        "getppid", "gettid", "getpgid", "getpgrp", "setpgid", "getsid", "setsid", "pidfd_open",
        "pidfd_send_signal", "set_tid_address", "set_robust_list", "get_robust_list", "rseq", "arch_prctl",
        "prctl", "personality", "restart_syscall", "futex", "futex_waitv", "futex_wake", "futex_wait", "futex_requeue",
    ],
    // Scheduling, within the limits.
    &[
        "sched_yield", "sched_setparam", "sched_getparam", "sched_setscheduler", "sched_getscheduler",
        "sched_get_priority_max", "sched_get_priority_min", "sched_rr_get_interval", "sched_setaffinity",
        "sched_getaffinity", "sched_setattr", "sched_getattr", "getpriority", "setpriority", "ioprio_get",
        "ioprio_set", "getcpu",
    ],
    // Signals; a command can only name processes of its sandbox.
    &[
        "kill", "tkill", "tgkill", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigpending",
        "rt_sigtimedwait", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "rt_sigsuspend", "sigaltstack", "pause",
    ],
    // Reading clocks and setting timers.
    &[
        "time", "gettimeofday", "times", "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep",
        "alarm", "getitimer", "setitimer", "timer_create", "timer_settime", "timer_gettime",
        "timer_getoverrun", "timer_delete",
    ],
    // Ids and capabilities; a command can only drop them.
    &[
        "getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid", "getgroups", "setuid", "setgid",
        "setreuid", "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups", "capget",
        "capset",
    ],
    // Limits and system information.
    &["getrlimit", "setrlimit", "prlimit64", "getrusage", "sysinfo", "uname", "getrandom"],
    // Sockets; an argument filter restricts the families.
    &[
        "socket", "socketpair", "bind", "listen", "accept", "accept4", "connect", "shutdown", "getsockname",
        "getpeername", "getsockopt", "setsockopt", "sendto", "recvfrom", "sendmsg", "recvmsg", "sendmmsg",
        "recvmmsg",
    ],
    // System V and POSIX IPC, in a private IPC namespace.
    &[
        "shmget", "shmat", "shmdt", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd",
        "msgrcv", "msgctl", "mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify",
        "mq_getsetattr",
    ],
    // Further restriction of the process itself; new filters are refused by an argument filter.
    &["seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"],
];

/// System calls that `process.debug` adds: access to processes of the same sandbox.
const DEBUG: &[&str] = &["ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"];

/// System calls that no policy can allow, in groups.
#[rustfmt::skip]
const NEVER: &[&[&str]] = &[
    // Mounts and roots: they could leave the file tree.
    &[
        "mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "fsopen",
        "fsconfig", "fsmount", "fspick", "mount_setattr", "statmount", "listmount",
    ],
    // Files by handle bypass the file tree.
    &["open_by_handle_at", "name_to_handle_at"],
    // Namespaces.
    &["unshare", "setns"],
    // The namespace flags are in memory that no filter can read.
    &["clone3"],
    // Large kernel interfaces with a history of escapes.
    &[
        "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "bpf", "perf_event_open",
        "fanotify_init", "fanotify_mark", "add_key", "request_key", "keyctl", "memfd_secret",
    ],
    // Asynchronous I/O: its contexts are one pool for the whole host. Answered with ENOSYS.
    &["io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents", "io_pgetevents"],
    // Flush the host's file systems, which stalls every tenant. `fsync` of a file is allowed.
    &["sync", "syncfs"],
    // The kernel itself.
    &[
        "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module",
        "get_kernel_syms", "query_module", "reboot", "syslog", "_sysctl", "sysfs", "lookup_dcookie",
    ],
    // The machine's clock, name, disks and accounting.
    &[
        "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname",
        "swapon", "swapoff", "quotactl", "quotactl_fd", "acct", "nfsservctl", "vhangup",
    ],
    // Hardware ports and segments.
    &["iopl", "ioperm", "modify_ldt", "set_thread_area", "get_thread_area"],
    // Memory of other processes, pages and nodes.
    &[
        "migrate_pages", "move_pages", "mbind", "set_mempolicy", "set_mempolicy_home_node",
        "process_madvise", "process_mrelease",
    ],
    // Security modules.
    &["lsm_get_self_attr", "lsm_set_self_attr", "lsm_list_modules"],
    // Obsolete or never implemented.
    &[
        "uselib", "ustat", "remap_file_pages", "epoll_ctl_old", "epoll_wait_old", "getpmsg", "putpmsg",
        "afs_syscall", "tuxcall", "security", "vserver", "setxattrat", "getxattrat", "listxattrat",
        "removexattrat", "file_getattr", "file_setattr",
    ],
];

/// Calls that no ordinary program makes: they serve to administer a machine, or to take it over. An
/// attempt is a sign of an escape.
#[rustfmt::skip]
const HOSTILE: &[&str] = &[
    "mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "open_by_handle_at", "setns", "bpf", "kexec_load", "kexec_file_load", "init_module",
    "finit_module", "delete_module", "reboot",
];

/// Calls that an escape needs and that some ordinary programs try: debuggers, browsers, container
/// tools, asynchronous runtimes. Of `clone`, only the flags for namespaces are blocked.
#[rustfmt::skip]
const DANGEROUS: &[&str] = &[
    "ptrace", "perf_event_open", "userfaultfd", "io_uring_setup", "chroot", "unshare", "clone", "clone3", "keyctl",
];

/// Calls that `LEVEL_1` allows in addition: they are not needed by most programs, and neither leave
/// the sandbox nor change the host. All of them are in [`NEVER`].
#[rustfmt::skip]
const PROCESS_LEVEL: &[&str] = &[
    "name_to_handle_at", "statmount", "listmount", "memfd_secret", "ustat", "sysfs", "remap_file_pages",
    "mbind", "set_mempolicy", "set_mempolicy_home_node", "migrate_pages", "move_pages", "process_madvise",
    "process_mrelease", "modify_ldt", "set_thread_area", "get_thread_area", "lsm_get_self_attr",
    "lsm_list_modules", "setxattrat", "getxattrat", "listxattrat", "removexattrat", "file_getattr",
];

/// The names of the system calls that `LEVEL_1` allows: those of the default list and all others
/// that are not dangerous.
#[must_use]
pub fn allowed_at_process_level(debug: bool) -> Arc<[String]> {
    static LISTS: LazyLock<[Arc<[String]>; 2]> =
        LazyLock::new(|| [false, true].map(|debug| default_names(debug, PROCESS_LEVEL)));
    LISTS[usize::from(debug)].clone()
}

/// The names of the system calls that are allowed by default.
#[must_use]
pub fn allowed(debug: bool) -> Arc<[String]> {
    static LISTS: LazyLock<[Arc<[String]>; 2]> =
        LazyLock::new(|| [false, true].map(|debug| default_names(debug, &[])));
    LISTS[usize::from(debug)].clone()
}

fn default_names(debug: bool, others: &[&str]) -> Arc<[String]> {
    let debug = if debug { DEBUG } else { &[] };
    ALLOWED
        .iter()
        .copied()
        .flatten()
        .chain(debug)
        .chain(others)
        .map(|&name| name.to_owned())
        .collect()
}

/// Whether a system call is allowed by default.
#[must_use]
pub fn is_allowed(name: &str, debug: bool) -> bool {
    ALLOWED.iter().any(|group| group.contains(&name)) || debug && DEBUG.contains(&name)
}

/// The calls that no policy can allow.
pub fn never_allowed() -> impl Iterator<Item = &'static str> {
    NEVER.iter().copied().flatten().copied()
}

/// Whether no ordinary program makes this call.
pub(crate) fn is_hostile(name: &str) -> bool {
    HOSTILE.contains(&name)
}

/// Whether an escape needs this call, and ordinary programs try it as well.
pub(crate) fn is_dangerous(name: &str) -> bool {
    DANGEROUS.contains(&name)
}

/// Whether this is the name of a system call.
#[must_use]
pub fn is_known(name: &str) -> bool {
    is_allowed(name, true) || NEVER.iter().any(|group| group.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_call_is_listed_twice() {
        let all: Vec<_> = ALLOWED.iter().chain(NEVER).copied().flatten().chain(DEBUG).collect();
        let distinct: HashSet<_> = all.iter().collect();
        assert_eq!(all.len(), distinct.len());
    }

    /// All dangerous calls but `clone`, of which only some flags are blocked.
    fn dangerous() -> impl Iterator<Item = &'static str> {
        HOSTILE.iter().chain(DANGEROUS).copied().filter(|name| *name != "clone")
    }

    #[test]
    fn dangerous_calls_are_not_allowed() {
        for name in dangerous() {
            assert!(!is_allowed(name, false), "{name}");
            assert!(is_known(name), "{name}");
        }
    }

    #[test]
    fn process_level_adds_no_dangerous_call() {
        assert!(PROCESS_LEVEL.iter().all(|name| NEVER.iter().any(|group| group.contains(name))));
        let allowed = allowed_at_process_level(false);
        for name in dangerous().chain(["sync"]) {
            assert!(!allowed.iter().any(|allowed| allowed == name), "{name}");
        }
    }

    #[test]
    fn debug_adds_only_tracing() {
        let plain: HashSet<_> = allowed(false).iter().cloned().collect();
        let debug: HashSet<_> = allowed(true).iter().cloned().collect();
        assert_eq!(debug.difference(&plain).count(), DEBUG.len());
        assert!(debug.is_superset(&plain));
    }
}
