//! Declared exceptions: what a kind of sandbox is known not to do, with the reason.

use crate::harness::Kind;

/// Attacks that succeed, in the order of the suite. A declared attack that fails is an error too.
const ATTACKS: [(Kind, &str, &str); 4] = [
    (Kind::Runc, "see homes", OWN_HOME),
    (Kind::Podman, "see homes", OWN_HOME),
    (Kind::Runsc, "see homes", OWN_HOME),
    (Kind::Runsc, "see the kernel's devices and groups", "gVisor has its own /sys, not the host's"),
];

const OWN_HOME: &str = "the image has its own empty /home";
const NOT_REPORTED: &str = "gVisor does not report blocked calls: it refuses them without an event";
const NO_LANDLOCK: &str = "gVisor has no Landlock: the plan is refused by field";
const OTHER_PROCESSES: &str =
    "processes in a gVisor sandbox are not host processes, which the case looks at";
const STATX: &str = "this gVisor refuses statx(AT_NO_AUTOMOUNT), which coreutils 9 uses";
const OWN_TICKS: &str = "gVisor reports its own clock ticks to a command, not the CPU time it used";
const NO_TERMINAL: &str = "gVisor passes no terminal out of its sandbox: a run with one is refused";
const NO_PROGRAM: &str = "the test image has no Java, Go or npm";
const ROUGH_PIDS: &str =
    "the host counts gVisor's threads: the limit is approximate and ends the sandbox";

/// Cases that do not apply to gVisor, or that it fails.
const RUNSC: [(&str, &str); 49] = [
    (
        "workspace_allows_no_setuid_and_no_devices",
        "gVisor's mounts are its own: nothing sets their flags",
    ),
    ("watch_sees_files_of_other_runs", "gVisor sees no changes that another sandbox makes"),
    (
        "proc_tells_nothing_about_host",
        "gVisor's /proc tells about its own kernel, not about the host's",
    ),
    ("blocked_call_is_reported", NOT_REPORTED),
    ("too_many_blocked_calls_kill_the_run", NOT_REPORTED),
    ("ptrace_needs_debug_policy", NOT_REPORTED),
    ("gdb_is_refused_without_debug_policy", NOT_REPORTED),
    ("denied_arguments_are_reported", NOT_REPORTED),
    ("unknown_call_is_reported_by_number", NOT_REPORTED),
    ("dangerous_calls_are_refused_and_reported", NOT_REPORTED),
    ("clone_with_namespace_flags_is_refused", NOT_REPORTED),
    ("dangerous_sockets_are_refused", NOT_REPORTED),
    ("violation_limit_kills_the_run", NOT_REPORTED),
    ("threads_start_without_allow_fork", NOT_REPORTED),
    ("allow_exec_false_is_enforced", NOT_REPORTED),
    ("command_itself_starts_without_allow_exec", NOT_REPORTED),
    ("only_allowed_executables_run", NO_LANDLOCK),
    ("cost_of_listed_programs_is_printed", NO_LANDLOCK),
    ("only_allowed_executables_start", NO_LANDLOCK),
    ("rename_and_link_work_with_allowed_executables", NO_LANDLOCK),
    ("loader_runs_no_other_program", NO_LANDLOCK),
    ("libraries_of_the_command_are_not_mapped", NO_LANDLOCK),
    ("listed_programs_map_their_libraries", NO_LANDLOCK),
    ("terminals_are_limited", "gVisor has its own terminals, which take nothing of the host"),
    (
        "inotify_instances_are_counted_by_session",
        "gVisor has its own inotify instances without a limit",
    ),
    ("core_limit_stays_at_one", "gVisor writes no core dumps and does not show the limit"),
    ("personality_is_limited", "gVisor has no personalities"),
    ("other_arguments_pass", "gVisor returns other errors for bad arguments"),
    (
        "denied_runtime_programs_are_hidden",
        "gVisor cannot mask paths of an image: the plan is refused by field",
    ),
    ("kill_tree_kills_processes_that_ignore_signals", OTHER_PROCESSES),
    ("discarded_sandbox_leaves_nothing", OTHER_PROCESSES),
    ("killed_prepared_sandbox_is_not_alive", OTHER_PROCESSES),
    ("cpu_rate_is_limited", OWN_TICKS),
    ("usage_is_reported", OWN_TICKS),
    ("usage_counts_writes_and_processes", "gVisor does not attribute writes to its processes"),
    ("pids_limit_is_reported_as_outcome", ROUGH_PIDS),
    ("threads_count_as_processes", ROUGH_PIDS),
    ("running_command_shows_its_usage", OTHER_PROCESSES),
    ("throttled_fork_bomb_can_be_killed", ROUGH_PIDS),
    ("private_file_systems_have_size_limits", STATX),
    ("command_inherits_only_three_streams", STATX),
    ("dev_is_minimal", STATX),
    ("terminal_is_controlling_and_new_ptys_open", NO_TERMINAL),
    ("terminal_is_found_in_own_devpts", NO_TERMINAL),
    (
        "init_cannot_be_killed_from_inside",
        "gVisor lets a command kill process 1, which ends the sandbox",
    ),
    (
        "init_cannot_be_inspected",
        "gVisor has no undumpable processes: a command may falsify its outcome",
    ),
    ("foreign_abi_calls_kill", "gVisor has no other ABI"),
    ("perl_and_shell_tools_work", STATX),
    (
        "hidden_processes_die_with_the_command",
        "gVisor hangs up the command's process group if a process in it is stopped; Linux does not",
    ),
];

/// Cases that do not apply to any container.
const CONTAINERS: [(&str, &str); 3] = [
    ("java_threads_and_security_settings_work", NO_PROGRAM),
    ("go_builds_and_talks_on_loopback", NO_PROGRAM),
    ("npm_installs_from_local_sources", NO_PROGRAM),
];

/// Returns the attacks that succeed against this kind.
pub(crate) fn attacks(kind: Kind) -> Vec<&'static str> {
    ATTACKS.iter().filter(|(of, ..)| *of == kind).map(|(_, name, _)| *name).collect()
}

/// Returns why a case does not run against this kind, if it is an exception.
pub(crate) fn reason(kind: Kind, case: &str) -> Option<&'static str> {
    let runsc = RUNSC.iter().filter(|_| kind == Kind::Runsc);
    let containers = CONTAINERS.iter().filter(|_| kind.is_container());
    runsc.chain(containers).find(|(name, _)| *name == case).map(|(_, reason)| *reason)
}
