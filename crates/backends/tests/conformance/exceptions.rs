//! What a kind of sandbox is known not to do, each with its reason. What is not here must hold.

use crate::harness::Kind;

/// Attacks that are seen to get through, in the order of the suite. They must: a needless one fails it.
const ATTACKS: [(Kind, &str, &str); 6] = [
    (Kind::Runc, "see homes", OWN_HOME),
    (Kind::Runc, "have a set-user-id program of the host", OWN_PROGRAMS),
    (Kind::Podman, "see homes", OWN_HOME),
    (Kind::Podman, "have a set-user-id program of the host", OWN_PROGRAMS),
    (Kind::Runsc, "see homes", OWN_HOME),
    (Kind::Runsc, "see the kernel's devices and groups", "gVisor makes up a /sys of its own, not the host's"),
];

const OWN_HOME: &str = "the image has an empty /home of its own";
const OWN_PROGRAMS: &str =
    "the programs are the image's and no engine mounts an image nosuid: no_new_privs makes the bit void";
const UNTOLD: &str = "gVisor tells nobody of a blocked call: it is refused, without an event and uncounted";
const NO_LANDLOCK: &str = "gVisor has no Landlock: such a plan is refused by its field";
const OTHER_PROCESSES: &str =
    "processes of a gVisor sandbox are not processes of the host, which the case looks at";
const STATX: &str = "this gVisor refuses statx(AT_NO_AUTOMOUNT), which `ls` and `stat` of coreutils 9 ask";
const OWN_TICKS: &str = "gVisor tells a command ticks of its own, by which the case measures, not the processor time that it used";
const ROUGH_PIDS: &str =
    "gVisor's own threads are what the host counts: the limit is rough, and over it the sandbox ends";

/// Cases that mean nothing to gVisor, or that it is known to fail.
const RUNSC: [(&str, &str); 34] = [
    ("blocked_call_is_reported", UNTOLD),
    ("too_many_blocked_calls_kill_the_run", UNTOLD),
    ("ptrace_needs_debug_policy", UNTOLD),
    ("seccomp_listener_is_refused", UNTOLD),
    ("unknown_call_is_reported_by_number", UNTOLD),
    ("dangerous_calls_are_refused_and_reported", UNTOLD),
    ("clone_with_namespace_flags_is_refused", UNTOLD),
    ("dangerous_socket_families_are_refused", UNTOLD),
    ("violation_limit_kills_the_run", UNTOLD),
    ("threads_start_without_allow_fork", UNTOLD),
    ("allow_exec_false_is_enforced", UNTOLD),
    ("command_itself_starts_without_allow_exec", UNTOLD),
    ("only_allowed_executables_run", NO_LANDLOCK),
    ("only_allowed_executables_start", NO_LANDLOCK),
    ("rename_and_link_work_with_allowed_executables", NO_LANDLOCK),
    (
        "denied_runtime_programs_are_hidden",
        "gVisor masks no path of an image: such a plan is refused by its field",
    ),
    ("kill_tree_kills_processes_that_ignore_signals", OTHER_PROCESSES),
    ("discarded_sandbox_leaves_nothing", OTHER_PROCESSES),
    ("killed_prepared_sandbox_is_not_alive", OTHER_PROCESSES),
    ("cpu_rate_is_limited", OWN_TICKS),
    ("usage_is_reported", OWN_TICKS),
    ("usage_counts_writes_and_processes", "gVisor writes for its processes and tells them nothing of it"),
    ("pids_limit_is_reported_as_outcome", ROUGH_PIDS),
    ("threads_count_as_processes", ROUGH_PIDS),
    ("throttled_fork_bomb_can_be_killed", ROUGH_PIDS),
    ("private_file_systems_have_size_limits", STATX),
    ("command_inherits_only_three_streams", STATX),
    ("dev_is_minimal", STATX),
    (
        "terminal_is_controlling_and_new_ptys_open",
        "gVisor takes no terminal of the host: a run with one is refused",
    ),
    ("init_cannot_be_killed_from_inside", "gVisor lets process 1 be killed, which ends the sandbox"),
    (
        "init_cannot_be_inspected",
        "gVisor knows no processes that cannot be dumped: a command may falsify its own outcome",
    ),
    ("foreign_abi_calls_kill", "gVisor has no other ABI"),
    ("perl_and_shell_tools_work", STATX),
    (
        "hidden_processes_die_with_the_command",
        "gVisor hangs up a process group with a stopped process, the command's own, where Linux does not",
    ),
];

/// The attacks that this kind lets through.
pub(crate) fn attacks(kind: Kind) -> Vec<&'static str> {
    ATTACKS.iter().filter(|(of, ..)| *of == kind).map(|(_, name, _)| *name).collect()
}

/// Why a case is not run against this kind, if it is not.
pub(crate) fn reason(kind: Kind, case: &str) -> Option<&'static str> {
    let listed = RUNSC.iter().filter(|_| kind == Kind::Runsc);
    listed.filter(|(name, _)| *name == case).map(|(_, reason)| *reason).next()
}
