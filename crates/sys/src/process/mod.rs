//! Processes: attributes of this one, fork and exec, killing, reaping.

mod kill;
mod list;
mod own;
mod place;
mod reap;
mod single_thread;
mod tree;

pub(crate) use kill::parse_pids;
pub use kill::{PidFd, descendants, is_alive, kill, kill_all_others, signal_process_group};
pub use list::{ListedProcess, list};
pub use own::{
    allowed_cpus, become_subreaper, change_directory, change_directory_below, change_user,
    die_with_parent, new_session, own_gid, own_pid, own_uid, set_controlling_terminal,
    set_dumpable, set_host_name, set_name, set_not_dumpable, thread_cpu_time,
};
pub use place::{NAMESPACES, Place, first_of_namespace, program_name};
pub use reap::{ChildrenUsage, ExitStatus, Reaped, children_usage, reap_next, try_reap};
pub use single_thread::{IsolatedChild, SingleThread, exec};
pub use tree::{Tree, TreeRoot};
