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
    ("what_a_blocked_call_tried_is_told", UNTOLD),
    ("too_many_blocked_calls_end_the_run", UNTOLD),
    ("processes_are_debugged_only_where_the_policy_says_so", UNTOLD),
    ("a_listener_of_its_own_is_refused_to_a_command", UNTOLD),
    ("a_call_newer_than_we_know_is_told_by_number", UNTOLD),
    ("dangerous_calls_are_refused_and_told", UNTOLD),
    ("namespaces_are_refused_to_clone", UNTOLD),
    ("sockets_of_dangerous_families_are_refused", UNTOLD),
    ("the_limit_of_violations_ends_the_run", UNTOLD),
    ("without_the_right_to_fork_threads_still_start", UNTOLD),
    ("other_programs_are_forbidden_by_the_kernel", UNTOLD),
    ("without_the_right_to_execute_the_command_itself_is_executed_and_nothing_else", UNTOLD),
    ("only_listed_programs_can_be_executed", NO_LANDLOCK),
    ("only_named_programs_are_executed", NO_LANDLOCK),
    ("files_are_renamed_and_linked_across_directories_whatever_may_be_executed", NO_LANDLOCK),
    (
        "denied_programs_of_the_runtime_are_gone",
        "gVisor masks no path of an image: such a plan is refused by its field",
    ),
    ("a_killed_tree_is_dead_whatever_it_does_against_it", OTHER_PROCESSES),
    ("nothing_is_left_of_a_sandbox", OTHER_PROCESSES),
    ("a_prepared_sandbox_that_was_killed_says_so", OTHER_PROCESSES),
    ("the_rate_of_processor_time_is_limited", OWN_TICKS),
    ("what_was_used_is_told", OWN_TICKS),
    ("what_was_written_and_started_is_told", "gVisor writes for its processes and tells them nothing of it"),
    ("processes_over_the_limit_are_refused_and_told", ROUGH_PIDS),
    ("threads_count_as_processes", ROUGH_PIDS),
    ("a_fork_bomb_with_little_processor_time_dies_all_the_same", ROUGH_PIDS),
    ("the_private_file_systems_are_full_at_their_size", STATX),
    ("a_command_has_its_three_streams_and_no_other_descriptor", STATX),
    ("dev_has_only_what_programs_need", STATX),
    (
        "a_terminal_is_the_controlling_one_and_new_ones_can_be_opened",
        "gVisor takes no terminal of the host: a run with one is refused",
    ),
    (
        "the_first_process_cannot_be_killed_from_inside",
        "gVisor lets process 1 be killed, which ends the sandbox",
    ),
    (
        "init_cannot_be_looked_into",
        "gVisor knows no processes that cannot be dumped: a command may falsify its own outcome",
    ),
    ("the_calls_of_other_abis_kill", "gVisor has no other ABI"),
    ("perl_and_shell_tools_work", STATX),
    (
        "processes_that_hide_are_gone_when_the_command_has_ended",
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
