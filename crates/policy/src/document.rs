//! The policy document.
//!
//! Every field is optional. If it is absent, the policy above decides, and finally the default.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use codelia_types::{Mode, NetworkMode, UnknownValue};

use crate::{LayoutPolicy, VolumeMount, duration_text};

/// What a command may do: a policy document.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// The minimum isolation that the command needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation_level: Option<IsolationLevel>,
    /// The host files that the command sees.
    pub filesystem: FilesystemPolicy,
    /// Which part of its workspace the command may change, and where files can be executed.
    #[serde(skip_serializing_if = "LayoutPolicy::is_empty")]
    pub layout: LayoutPolicy,
    /// The container image.
    pub container: ContainerPolicy,
    /// The processes that the command may start.
    pub process: ProcessPolicy,
    /// The network that the command may reach.
    pub network: NetworkPolicy,
    /// The resources that the command may use.
    pub resources: ResourcePolicy,
    /// The system calls that the command may make.
    pub syscalls: SyscallPolicy,
    /// The environment variables that the command gets.
    pub environment: EnvironmentPolicy,
    /// The commands that are refused before they start. Not a security boundary.
    pub command: CommandPolicy,
    /// What the command does that is logged.
    #[serde(skip_serializing_if = "LoggingPolicy::is_empty")]
    pub logging: LoggingPolicy,
    /// Fields that the scopes below may set freely, such as `resources.max_memory_bytes`, within the
    /// policy of the installation. Only a policy of a scope has it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub delegate: Vec<String>,
}

/// How much isolation a command needs, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum IsolationLevel {
    /// `LEVEL_0`: none. Mode `logical` only.
    #[serde(rename = "LEVEL_0")]
    None,
    /// `LEVEL_1`: private processes, limits and files.
    #[serde(rename = "LEVEL_1")]
    Process,
    /// `LEVEL_2`: every namespace, a private root, no network, filtered system calls.
    #[serde(rename = "LEVEL_2")]
    Full,
}

impl IsolationLevel {
    /// All levels, weakest first.
    pub const ALL: [Self; 3] = [Self::None, Self::Process, Self::Full];

    /// The word for the level, as in documents.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "LEVEL_0",
            Self::Process => "LEVEL_1",
            Self::Full => "LEVEL_2",
        }
    }

    /// The level that a mode provides.
    #[must_use]
    pub fn of(mode: Mode) -> Self {
        match mode {
            Mode::Logical => Self::None,
            Mode::Bwrap | Mode::Nsjail | Mode::Native | Mode::Container => Self::Full,
        }
    }
}

impl fmt::Display for IsolationLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for IsolationLevel {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        Self::ALL
            .into_iter()
            .find(|level| level.as_str() == text)
            .ok_or_else(|| UnknownValue { value: text.to_owned(), allowed: "LEVEL_0, LEVEL_1, LEVEL_2" })
    }
}

/// Whether a command may change host files, and whether it may read them without asking. Least strict
/// first: each mode has the restrictions of the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesystemMode {
    /// Never modify host files: `read_write_paths` must be empty, and changes in `overlay_paths` stay
    /// in the session.
    Static,
    /// The first read of a file below `read_only_paths` waits for a person's decision.
    /// `overlay_paths` must be empty too.
    Dynamic,
}

/// The host files that a command sees, in addition to the read-only runtime and its workspace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FilesystemPolicy {
    /// Whether the command may change host files, and read them without asking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<FilesystemMode>,
    /// The path of the session's directory in the sandbox. Must be `/workspace`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_path: Option<PathBuf>,
    /// Host paths that the command may read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only_paths: Option<Vec<PathBuf>>,
    /// Host paths that the command may read and write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_write_paths: Option<Vec<PathBuf>>,
    /// Host directories that the command may change without affecting the host: the changes are kept
    /// for its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlay_paths: Option<Vec<PathBuf>>,
    /// Paths that the command cannot access, even below the paths above.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub denied_paths: Vec<PathBuf>,
    /// Size of the largest file that the command may write, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_file_bytes: Option<u64>,
    /// Size of all files of the session together, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_total_bytes: Option<u64>,
    /// Number of files, directories and links of the session together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_inodes: Option<u64>,
    /// Volumes of the tenant that the command sees. A run has only volumes of its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<VolumeMount>>,
}

/// The container image of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ContainerPolicy {
    /// The name that the operator gave an image, such as `python`. If absent, the worker's default image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
}

/// The processes that a command may start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProcessPolicy {
    /// Maximum number of concurrent processes, including threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_processes: Option<u64>,
    /// Whether the command may start processes. It may always start threads. Default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_fork: Option<bool>,
    /// Whether the command may execute another program. Default: true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_exec: Option<bool>,
    /// The only programs that the command may execute, by absolute path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_executables: Option<Vec<PathBuf>>,
    /// Whether the command's processes may trace each other. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub debug: Option<bool>,
}

/// The network that a command may reach.
///
/// All fields but `mode` say what the egress proxy enforces, so they need mode `proxy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkPolicy {
    /// The network mode. `none` and `proxy` take effect. `host` only permits the mode: a session or
    /// run must request it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<NetworkMode>,
    /// Patterns of the hosts that the command may reach: a name; `*.` and a name for all names below
    /// it; `*` for all names; a name with one `*` inside a label, such as `api-*.example.com`; an IP
    /// address; or `set:NAME` for a named set. Without this list and `ask_hosts`: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_hosts: Option<Vec<String>>,
    /// Patterns of the hosts that need a person's decision, unless `allowed_hosts` has them too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ask_hosts: Option<Vec<String>>,
    /// Patterns of the hosts that the command may never reach. They win over the other lists.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocked_hosts: Vec<String>,
    /// The only ports that the command may reach. Default: 80 and 443.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_ports: Option<Vec<u16>>,
    /// Maximum number of concurrent connections. Default: 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_connections: Option<u32>,
    /// Maximum number of new connections in each second. Default: 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_connections_per_second: Option<u32>,
    /// Maximum number of bytes that the command may send. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sent_bytes: Option<u64>,
    /// Maximum number of bytes that the command may receive. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_received_bytes: Option<u64>,
    /// A connection without traffic ends after this time. Default: 5m.
    #[serde(skip_serializing_if = "Option::is_none", with = "duration_text")]
    pub idle_timeout: Option<Duration>,
    /// Names of the installation's credentials that the proxy attaches to requests. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials: Option<Vec<String>>,
    /// The only programs that get the network, by absolute path. No mode can enforce it yet, so it
    /// is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub executables: Option<Vec<PathBuf>>,
}

/// Maximum resources of a command. The limits of a run never exceed them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResourcePolicy {
    /// CPU time of all processes together.
    #[serde(skip_serializing_if = "Option::is_none", with = "duration_text")]
    pub max_cpu_time: Option<Duration>,
    /// CPU rate, in thousandths of a core. CPU time is `max_cpu_time`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cpu_millicores: Option<u64>,
    /// Wall time from start to end.
    #[serde(skip_serializing_if = "Option::is_none", with = "duration_text")]
    pub max_wall_time: Option<Duration>,
    /// Memory of all processes together, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory_bytes: Option<u64>,
    /// Number of open files of each process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_open_files: Option<u64>,
    /// Maximum number of concurrent threads, including processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_threads: Option<u64>,
    /// Output to keep, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_output_bytes: Option<u64>,
    /// Size of each private temporary file system, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tmp_bytes: Option<u64>,
    /// Bytes per second that the command may read from the device of its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_read_bytes_per_second: Option<u64>,
    /// Bytes per second that the command may write to the device of its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_write_bytes_per_second: Option<u64>,
    /// Read operations per second on the device of its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_reads_per_second: Option<u64>,
    /// Write operations per second on the device of its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_writes_per_second: Option<u64>,
    /// The only processors that the command runs on, by the host's numbers from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Vec<u32>>,
    /// Release output and outcome only at multiples of this interval, so that their timing reveals
    /// less.
    #[serde(skip_serializing_if = "Option::is_none", with = "duration_text")]
    pub release_interval: Option<Duration>,
}

/// What the names of a [`SyscallPolicy`] do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyscallMode {
    /// Allow only these system calls of the default list.
    Allow,
    /// Allow the default list except these system calls.
    Deny,
}

/// The system calls that a command may make. A policy can only narrow the default list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SyscallPolicy {
    /// Whether `names` are allowed or denied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<SyscallMode>,
    /// Names of system calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// The number of blocked calls that ends the run, from 1 to 1000. Default: 50.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub violation_limit: Option<u32>,
}

/// Where a command's environment comes from, least restrictive first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvironmentMode {
    /// The worker's environment. Always refused, because the caller must not see it.
    Inherit,
    /// A clean environment and the variables that the run sets.
    Clean,
    /// A clean environment and, of the variables that the run sets, only the named ones.
    Explicit,
}

/// The environment variables that a command gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EnvironmentPolicy {
    /// Where the variables come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<EnvironmentMode>,
    /// The variables that a run may set. Needs mode `explicit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub names: Option<Vec<String>>,
}

/// The commands that are refused before they start.
///
/// This saves the caller a run that would fail. It is not a security boundary: the same command can
/// be written in more ways than patterns can match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CommandPolicy {
    /// Regular expressions. The command must match at least one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_patterns: Option<Vec<String>>,
    /// Regular expressions. The command must match none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocked_patterns: Vec<String>,
    /// Maximum length of the command, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<u64>,
}

/// What a command does that is logged, for people who want to know. Not a security boundary: a command
/// can have the log show another name than the one that it uses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoggingPolicy {
    /// Whether signals that the command sends are logged. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signals: Option<bool>,
    /// Whether operations that change files are logged. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_operations: Option<bool>,
}

impl LoggingPolicy {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
