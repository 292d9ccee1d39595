//! Generates `docs/syscalls.md` from the lists and rules, so that the document cannot differ from
//! them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    path::Path,
};

use codelia_policy::syscalls;

use super::{
    denials::{Answer, DENIALS},
    rules::{self, Rules},
};

/// Known calls that Docker's default profile denies to a container with default capabilities.
#[rustfmt::skip]
const DOCKER_DENIES: &[&str] = &[
    "_sysctl", "acct", "add_key", "afs_syscall", "bpf", "clock_settime", "clone3", "create_module",
    "delete_module", "fanotify_init", "file_getattr", "file_setattr", "finit_module", "fsconfig", "fsmount",
    "fsopen", "fspick", "get_kernel_syms", "get_mempolicy", "getpmsg", "init_module", "io_uring_enter",
    "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load",
    "keyctl", "lookup_dcookie", "lsm_get_self_attr", "lsm_list_modules", "lsm_set_self_attr", "mbind",
    "migrate_pages", "mount", "mount_setattr", "move_mount", "move_pages", "nfsservctl",
    "open_by_handle_at", "open_tree", "open_tree_attr", "perf_event_open", "pidfd_getfd", "pivot_root",
    "process_madvise", "putpmsg", "query_module", "quotactl", "quotactl_fd", "reboot", "request_key",
    "security", "set_mempolicy", "set_mempolicy_home_node", "setdomainname", "sethostname", "setns",
    "settimeofday", "swapoff", "swapon", "sysfs", "syslog", "tuxcall", "umount2", "unshare", "uselib",
    "userfaultfd", "ustat", "vhangup", "vserver",
];

/// Known calls that Docker's default profile restricts by their arguments.
const DOCKER_FILTERS: &[&str] = &["clone", "personality", "socket"];

/// Known calls that gVisor's kernel does not implement (amd64).
#[rustfmt::skip]
const GVISOR_LACKS: &[&str] = &[
    "_sysctl", "acct", "add_key", "adjtimex", "afs_syscall", "cachestat", "clock_adjtime", "copy_file_range",
    "create_module", "delete_module", "epoll_ctl_old", "epoll_wait_old", "fanotify_init", "fanotify_mark",
    "fchmodat2", "file_getattr", "file_setattr", "finit_module", "fspick", "futex_requeue", "futex_wait",
    "futex_waitv", "futex_wake", "get_kernel_syms", "get_thread_area", "getpmsg", "getxattrat",
    "init_module", "io_pgetevents", "io_uring_register", "ioperm", "iopl", "kcmp", "kexec_file_load",
    "kexec_load", "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "listmount",
    "listxattrat", "lookup_dcookie", "lsm_get_self_attr", "lsm_list_modules", "lsm_set_self_attr",
    "map_shadow_stack", "memfd_secret", "migrate_pages", "modify_ldt", "mount_setattr", "move_pages",
    "mq_getsetattr", "mq_notify", "mq_timedreceive", "mq_timedsend", "mseal", "name_to_handle_at",
    "nfsservctl", "open_by_handle_at", "open_tree_attr", "perf_event_open", "pkey_alloc", "pkey_free",
    "pkey_mprotect", "process_madvise", "process_mrelease", "putpmsg", "query_module", "quotactl",
    "quotactl_fd", "reboot", "remap_file_pages", "removexattrat", "request_key", "sched_rr_get_interval",
    "sched_setparam", "security", "set_mempolicy_home_node", "set_thread_area", "setfsgid", "setfsuid",
    "settimeofday", "setxattrat", "statmount", "swapoff", "swapon", "sysfs", "tuxcall", "uselib",
    "userfaultfd", "ustat", "vhangup", "vmsplice", "vserver",
];

/// Why Codelia allows what Docker's default profile denies.
const WIDER: &[(&str, &str)] = &[
    (
        "get_mempolicy",
        "returns the memory policy of the process itself; Java and numeric libraries ask for it at their start",
    ),
    (
        "kcmp",
        "with `process.debug` only: debuggers compare descriptors of processes in the same sandbox",
    ),
    (
        "pidfd_getfd",
        "with `process.debug` only: debuggers copy descriptors of processes in the same sandbox",
    ),
];

const INTRODUCTION: &str = "\
# System calls

Use this page to see which system calls a command may make in the isolating modes, next to Docker's
default profile and to what gVisor's kernel implements. With `runsc` the same filter applies in
front of gVisor's kernel. A policy can narrow the list, never widen it ([policy](policy.md)).

<!-- Generated: CODELIA_BLESS=1 cargo test -p codelia-backends --lib documented_table -->

`arguments` means that some arguments are denied. `debug` means that the policy must set
`process.debug`. Docker's column is for a container with default capabilities.

";

const ARGUMENTS: &str = "
## Denied arguments

These are denied whatever the policy allows. A *violation* is reported and counted, and fails with
`EPERM`. The others are not reported, because ordinary programs try them.

| denied | answer | reason |
|---|---|---|
";

const ALLOWED_ARGUMENTS: &str = "
These calls are allowed with the named arguments only. Anything else is a violation.

| call | allowed |
|---|---|
| `clone` | without namespace flags |
| `socket` | `AF_UNIX`; `AF_INET` and `AF_INET6` for TCP, UDP and ping; `AF_NETLINK` for `NETLINK_ROUTE` |
| `socketpair` | `AF_UNIX` |
| `personality` | 0 and `0xffffffff` (query); with `process.debug` also `ADDR_NO_RANDOMIZE` |

Where `process.allowed_executables` is set, `memfd_create` needs `MFD_NOEXEC_SEAL`, and the
supervisor decides about executable memory ([ADR 5](adr/0005-the-waiting-command.md)). Where
`layout.executable_paths` is set, `memfd_create` without `MFD_NOEXEC_SEAL` fails with `EACCES`.

## Wider than Docker

| call | reason |
|---|---|
";

fn default_rules() -> Rules {
    Rules {
        allowed: BTreeSet::new(),
        fork: true,
        exec: true,
        debug: false,
        only_listed: false,
        seals_memory_files: false,
        notify: true,
        asks: false,
        logged: Default::default(),
    }
}

/// How Codelia decides about a call by default.
fn verdict(name: &str) -> &'static str {
    if !syscalls::is_allowed(name, true) {
        return "denied";
    }
    if !syscalls::is_allowed(name, false) {
        return "debug";
    }
    let mut denials = DENIALS
        .iter()
        .flat_map(|group| group.denials)
        .filter(|denial| denial.call == name)
        .peekable();
    if denials.peek().is_some_and(|denial| denial.arguments == [None, None]) {
        return "denied";
    }
    let is_conditional = rules::conditions(name, &default_rules()) != [Vec::new()];
    if is_conditional || denials.peek().is_some() { "arguments" } else { "allowed" }
}

fn docker(name: &str) -> &'static str {
    match (DOCKER_DENIES.contains(&name), DOCKER_FILTERS.contains(&name)) {
        (true, _) => "denied",
        (_, true) => "arguments",
        _ => "allowed",
    }
}

fn known() -> BTreeSet<String> {
    syscalls::allowed(true)
        .iter()
        .cloned()
        .chain(syscalls::never_allowed().map(str::to_owned))
        .collect()
}

fn document() -> String {
    let mut rows: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for name in known() {
        let gvisor = if GVISOR_LACKS.contains(&name.as_str()) { "no" } else { "yes" };
        let columns = (verdict(&name), docker(&name), gvisor);
        rows.entry(columns).or_default().push(format!("`{name}`"));
    }
    let mut text = INTRODUCTION.to_owned();
    text.push_str("| Codelia | Docker | in gVisor | calls |\n|---|---|---|---|\n");
    for ((codelia, docker, gvisor), names) in rows {
        writeln!(text, "| {codelia} | {docker} | {gvisor} | {} |", names.join(", ")).unwrap();
    }
    text.push_str(ARGUMENTS);
    for group in DENIALS {
        let answer = match group.denials[0].answer {
            Answer::Violation => "violation".to_owned(),
            Answer::Fail(errno) => format!("`{}`", errno_name(errno)),
            Answer::Ignore => "success, no effect".to_owned(),
        };
        writeln!(text, "| {} | {answer} | {} |", group.what, group.why).unwrap();
    }
    text.push_str(ALLOWED_ARGUMENTS);
    for (name, reason) in WIDER {
        writeln!(text, "| `{name}` | {reason} |").unwrap();
    }
    text.push_str(
        "| `personality` | `ADDR_NO_RANDOMIZE` with `process.debug` only: debuggers set it |\n",
    );
    text
}

fn errno_name(errno: codelia_sys::Errno) -> String {
    let names = [
        (codelia_sys::Errno::NOSYS, "ENOSYS"),
        (codelia_sys::Errno::PERM, "EPERM"),
        (codelia_sys::Errno::INVAL, "EINVAL"),
        (codelia_sys::Errno::PROTONOSUPPORT, "EPROTONOSUPPORT"),
    ];
    names.iter().find(|(known, _)| *known == errno).map(|(_, name)| (*name).to_owned()).unwrap()
}

#[test]
fn documented_table_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/syscalls.md");
    if std::env::var_os("CODELIA_BLESS").is_some_and(|value| value == "1") {
        fs::write(&path, document()).unwrap();
    }
    let documented = fs::read_to_string(&path).unwrap();
    assert!(
        documented == document(),
        "docs/syscalls.md is out of date: run `CODELIA_BLESS=1 cargo test -p codelia-backends --lib documented_table`"
    );
}

#[test]
fn every_wider_call_has_a_reason() {
    let is_wider = |name: &String| verdict(name) != "denied" && docker(name) == "denied";
    let wider: Vec<_> = known().into_iter().filter(is_wider).collect();
    assert_eq!(wider, WIDER.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>());
}

#[test]
fn compared_lists_name_known_calls() {
    let known = known();
    for name in [DOCKER_DENIES, DOCKER_FILTERS, GVISOR_LACKS].concat() {
        assert!(known.contains(name), "{name}");
    }
    for denial in DENIALS.iter().flat_map(|group| group.denials) {
        assert!(known.contains(denial.call), "{}", denial.call);
    }
    for group in DENIALS {
        assert!(
            group.denials.iter().all(|denial| denial.answer == group.denials[0].answer),
            "{}",
            group.what
        );
    }
}
