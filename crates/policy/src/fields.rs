//! The fields of a policy.
//!
//! [`policy_table`](crate::policy_table) lists them. Everything that must know each field is made
//! from it: the document, merging, the size check, delegation, what `explain` shows, and in
//! `codelia-proto` the conversions.

use std::{fmt, path::PathBuf, time::Duration};

use codelia_types::{NetworkMode, optional_duration};
use serde::{Deserialize, Serialize};

use crate::{
    EnvironmentMode, FilesystemMode, IsolationLevel, LayoutDirectory, Limit, SyscallMode,
    VolumeMount, merge::values, size::Value,
};

/// A field that a scope may delegate to the scopes below.
const DELEGABLE: bool = true;
/// A field that lower scopes only tighten: lists of what is denied, what several fields decide
/// together, and `network`, which workers enforce while a command runs.
const TIGHTENS: bool = false;

/// Calls the macro `$reader` with the table of policy fields. A new field is a row here, a field of
/// its message in `policy.proto`, and a row in `docs/policy.md`.
///
/// A row has the field with its type, the function of `merge::values` that combines two policies,
/// whether a scope may delegate it, and what holds if no policy sets it.
#[macro_export]
macro_rules! policy_table {
    ($reader:ident) => {
        $reader! {
            /// The host files that a command sees, in addition to the read-only runtime and its
            /// workspace.
            filesystem: FilesystemPolicy {
                /// Whether the command may change host files, and read them without asking.
                mode: Option<FilesystemMode>, max, TIGHTENS,
                    "writes to read_write_paths reach the host, and no read waits";
                /// Host paths that the command may read.
                read_only_paths: Option<Vec<PathBuf>>, below, DELEGABLE, "none";
                /// Host paths that the command may read and write.
                // Only equal paths: the command could have replaced a path below a writable one
                // with a symlink.
                read_write_paths: Option<Vec<PathBuf>>, equal, DELEGABLE, "none";
                /// Host directories that the command may change without affecting the host: the
                /// changes are kept for its session.
                // Only equal paths: a session's changes belong to one path, not to paths above or
                // below it.
                overlay_paths: Option<Vec<PathBuf>>, equal, DELEGABLE, "none";
                /// Paths that the command cannot access, even below the paths above.
                denied_paths: Vec<PathBuf>, union, TIGHTENS, "none";
                /// Size of the largest file that the command may write, in bytes.
                max_file_bytes: Option<u64>, min, DELEGABLE, Limit::FileBytes.field();
                /// Size of all files of the session together, in bytes.
                max_total_bytes: Option<u64>, min, DELEGABLE, Limit::DiskBytes.field();
                /// Number of files, directories and links of the session together.
                max_inodes: Option<u64>, min, DELEGABLE, Limit::Inodes.field();
                /// Volumes of the tenant that the command sees. A run has only volumes of its
                /// session.
                volumes: Option<Vec<VolumeMount>>, equal, DELEGABLE, "none";
            }

            /// Which part of its workspace a command may change, and where files can be executed.
            /// All paths are relative to the workspace.
            layout: LayoutPolicy {
                /// Whether commands cannot change the workspace, except for `directories`. File
                /// calls can. Default: false.
                read_only_workspace: Option<bool>, max, TIGHTENS, "false";
                /// Directories that are created for the session and that commands may change.
                directories: Vec<LayoutDirectory>, with_others, TIGHTENS, "none";
                /// The only places where files can be executed, among those that commands can write
                /// to. Absent allows all.
                executable_paths: Option<Vec<PathBuf>>, below, TIGHTENS, "everywhere";
            }

            /// The container image of a command.
            container: ContainerPolicy {
                /// The name that the operator gave an image, such as `python`. If absent, the
                /// worker's default image.
                profile: Option<String>, upper, DELEGABLE, "the worker's default image";
            }

            /// The processes that a command may start.
            process: ProcessPolicy {
                /// Maximum number of concurrent processes, including threads.
                max_processes: Option<u64>, min, DELEGABLE, Limit::Pids.field();
                /// Whether the command may start processes. It may always start threads.
                /// Default: true.
                allow_fork: Option<bool>, min, DELEGABLE, "true";
                /// Whether the command may execute another program. Default: true.
                allow_exec: Option<bool>, min, DELEGABLE, "true";
                /// The only programs that the command may execute, by absolute path.
                allowed_executables: Option<Vec<PathBuf>>, equal, DELEGABLE, "any visible program";
                /// Whether the command's processes may trace each other. Default: false.
                debug: Option<bool>, min, DELEGABLE, "false";
            }

            /// The network that a command may reach.
            ///
            /// All fields but `mode` say what the egress proxy enforces, so they need mode `proxy`.
            network: NetworkPolicy {
                /// The network mode. `none` and `proxy` take effect. `host` only permits the mode:
                /// a session or run must request it.
                mode: Option<NetworkMode>, min, TIGHTENS, "none; the host's network in mode logical";
                /// Patterns of the hosts that the command may reach: a name; `*.` and a name for
                /// all names below it; `*` for all names; a name with one `*` inside a label, such
                /// as `api-*.example.com`; an IP address; or `set:NAME` for a named set. Without
                /// this list and `ask_hosts`: none.
                allowed_hosts: Option<Vec<String>>, with_others, TIGHTENS, "none";
                /// Patterns of the hosts that need a person's decision, unless `allowed_hosts` has
                /// them too.
                ask_hosts: Option<Vec<String>>, with_others, TIGHTENS, "none";
                /// Patterns of the hosts that the command may never reach. They win over the other
                /// lists.
                blocked_hosts: Vec<String>, hosts, TIGHTENS, "none";
                /// The only ports that the command may reach. Default: 80 and 443.
                allowed_ports: Option<Vec<u16>>, equal, TIGHTENS, "80 and 443";
                /// Maximum number of concurrent connections. Default: 128.
                max_connections: Option<u32>, min, TIGHTENS, "128";
                /// Maximum number of new connections in each second. Default: 64.
                max_connections_per_second: Option<u32>, min, TIGHTENS, "64";
                /// Maximum number of bytes that the command may send. Default: no limit.
                max_sent_bytes: Option<u64>, min, TIGHTENS, "no limit";
                /// Maximum number of bytes that the command may receive. Default: no limit.
                max_received_bytes: Option<u64>, min, TIGHTENS, "no limit";
                /// A connection without traffic ends after this time. Default: 5m.
                #[serde(with = "optional_duration")]
                idle_timeout: Option<Duration>, min, TIGHTENS, "5m";
                /// Names of the installation's credentials that the proxy attaches to requests.
                /// Default: none.
                credentials: Option<Vec<String>>, equal, TIGHTENS, "none";
                /// The only programs that get the network, by absolute path. No mode can enforce it
                /// yet, so it is refused.
                executables: Option<Vec<PathBuf>>, equal, TIGHTENS, "any";
            }

            /// Maximum resources of a command. The limits of a run never exceed them.
            resources: ResourcePolicy {
                /// CPU time of all processes together.
                #[serde(with = "optional_duration")]
                max_cpu_time: Option<Duration>, min, DELEGABLE, Limit::CpuTime.field();
                /// CPU rate, in thousandths of a core. CPU time is `max_cpu_time`.
                max_cpu_millicores: Option<u64>, min, DELEGABLE, Limit::CpuMillicores.field();
                /// Wall time from start to end.
                #[serde(with = "optional_duration")]
                max_wall_time: Option<Duration>, min, DELEGABLE, Limit::Timeout.field();
                /// Memory of all processes together, in bytes.
                max_memory_bytes: Option<u64>, min, DELEGABLE, Limit::MemoryBytes.field();
                /// Number of open files of each process.
                max_open_files: Option<u64>, min, DELEGABLE, Limit::OpenFiles.field();
                /// Maximum number of concurrent threads, including processes.
                max_threads: Option<u64>, min, DELEGABLE, Limit::Pids.field();
                /// Output to keep, in bytes.
                max_output_bytes: Option<u64>, min, DELEGABLE, Limit::OutputBytes.field();
                /// Size of each private temporary file system, in bytes.
                max_tmp_bytes: Option<u64>, min, DELEGABLE, Limit::TmpBytes.field();
                /// Bytes per second that the command may read from the device of its session.
                max_read_bytes_per_second: Option<u64>, min, DELEGABLE, "no limit";
                /// Bytes per second that the command may write to the device of its session.
                max_write_bytes_per_second: Option<u64>, min, DELEGABLE, "no limit";
                /// Read operations per second on the device of its session.
                max_reads_per_second: Option<u64>, min, DELEGABLE, "no limit";
                /// Write operations per second on the device of its session.
                max_writes_per_second: Option<u64>, min, DELEGABLE, "no limit";
                /// The only processors that the command runs on, by the host's numbers from 0.
                cpus: Option<Vec<u32>>, equal, DELEGABLE, "any";
                /// Release output and outcome only at multiples of this interval, so that their
                /// timing reveals less. The longer interval wins.
                #[serde(with = "optional_duration")]
                release_interval: Option<Duration>, max, DELEGABLE, "immediately";
            }

            /// The system calls that a command may make. A policy can only narrow the default list.
            syscalls: SyscallPolicy {
                /// Whether `names` are allowed or denied.
                mode: Option<SyscallMode>, with_others, TIGHTENS, "the default allow-list";
                /// Names of system calls.
                names: Vec<String>, with_others, TIGHTENS, "the default allow-list";
                /// The number of blocked calls that ends the run, from 1 to 1000. Default: 50.
                violation_limit: Option<u32>, min, DELEGABLE, "50";
            }

            /// The environment variables that a command gets.
            environment: EnvironmentPolicy {
                /// Where the variables come from.
                mode: Option<EnvironmentMode>, max, TIGHTENS, "clean";
                /// The variables that a run may set. Needs mode `explicit`.
                names: Option<Vec<String>>, equal, DELEGABLE, "any";
            }

            /// The commands that are refused before they start.
            ///
            /// This saves the caller a run that would fail. It is not a security boundary: the same
            /// command can be written in more ways than patterns can match.
            command: CommandPolicy {
                /// Regular expressions. The command must match at least one.
                allowed_patterns: Option<Vec<String>>, equal, DELEGABLE, "any";
                /// Regular expressions. The command must match none.
                blocked_patterns: Vec<String>, union, TIGHTENS, "none";
                /// Maximum length of the command, in bytes.
                max_length: Option<u64>, min, DELEGABLE, "any";
            }

            /// Actions of a command that are logged, for people who want to know. What one policy
            /// wants to be logged is logged. Not a security boundary: a command can have the log
            /// show another name than the one that it uses.
            logging: LoggingPolicy {
                /// Whether signals that the command sends are logged. Default: false.
                signals: Option<bool>, max, TIGHTENS, "false";
                /// Whether operations that change files are logged. Default: false.
                file_operations: Option<bool>, max, TIGHTENS, "false";
            }
        }
    };
}

/// Defines the document and what is done to each field.
macro_rules! define {
    ($(
        $(#[$group_doc:meta])+
        $group:ident: $Group:ident {$(
            $(#[$attribute:meta])+
            $field:ident: $type:ty, $merge:ident, $is_delegable:ident, $default:expr;
        )+}
    )+) => {
        /// A policy document: the actions that a command may take. Every field is optional. If it
        /// is absent, the policy above decides, and finally the default.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Policy {
            /// The minimum isolation that the command needs.
            #[serde(skip_serializing_if = "is_absent")]
            pub isolation_level: Option<IsolationLevel>,
            $($(#[$group_doc])+ pub $group: $Group,)+
            /// Fields that the scopes below may set freely, such as `resources.max_memory_bytes`,
            /// within the policy of the installation. Only a policy of a scope has it.
            #[serde(skip_serializing_if = "is_absent")]
            pub delegate: Vec<String>,
        }

        $(
            $(#[$group_doc])+
            #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
            #[serde(deny_unknown_fields, default)]
            pub struct $Group {
                $(
                    $(#[$attribute])+
                    #[serde(skip_serializing_if = "is_absent")]
                    pub $field: $type,
                )+
            }
        )+

        /// Every field of a policy that a command or session obeys, in the order of the document.
        pub const FIELDS: &[Field] = &[
            Field {
                path: "isolation_level",
                api_path: "policy.isolation_level",
                default: "the level of the mode",
                is_delegable: TIGHTENS,
                value: |policy| &policy.isolation_level,
                clear: |policy| policy.isolation_level = None,
            },
            $($(Field {
                path: concat!(stringify!($group), ".", stringify!($field)),
                api_path: concat!("policy.", stringify!($group), ".", stringify!($field)),
                default: $default,
                is_delegable: $is_delegable,
                value: |policy| &policy.$group.$field,
                clear: |policy| policy.$group.$field = <$type>::default(),
            },)+)+
        ];

        impl Policy {
            /// Merges each field, except those that `with_others` leaves to [`Policy::merge`].
            pub(crate) fn merge_fields(&self, lower: &Self) -> Self {
                Self {
                    isolation_level: values::max(&self.isolation_level, &lower.isolation_level),
                    $($group: $Group {
                        $($field: values::$merge(&self.$group.$field, &lower.$group.$field),)+
                    },)+
                    // Only scopes delegate: see `Scopes`.
                    delegate: Vec::new(),
                }
            }
        }
    };
}

policy_table!(define);

/// A field of a policy.
pub struct Field {
    /// The path of the field in the document.
    pub path: &'static str,
    /// The path of the field in requests of the API, which have a policy as a field.
    pub(crate) api_path: &'static str,
    /// The rule that holds if no policy sets it.
    pub default: &'static str,
    is_delegable: bool,
    value: fn(&Policy) -> &dyn Value,
    clear: fn(&mut Policy),
}

impl Field {
    /// The fields that a scope may delegate.
    pub fn delegable() -> impl Iterator<Item = &'static Self> {
        FIELDS.iter().filter(|field| field.is_delegable)
    }

    /// The field with this path that a scope may delegate.
    #[must_use]
    pub fn find_delegable(path: &str) -> Option<&'static Self> {
        Self::delegable().find(|field| field.path == path)
    }

    pub(crate) fn value<'a>(&self, policy: &'a Policy) -> &'a dyn Value {
        (self.value)(policy)
    }

    pub(crate) fn clear(&self, policy: &mut Policy) {
        (self.clear)(policy);
    }
}

impl fmt::Debug for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path)
    }
}

fn is_absent(value: &impl Value) -> bool {
    !value.is_set()
}
