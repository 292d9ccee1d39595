//! The policy document: what a command may do, as somebody wrote it.
//!
//! Every field may be left out; then the policy above it holds, and at last the default.

use std::{fmt, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};

use codelia_types::{Mode, NetworkMode, UnknownValue};

/// What a command may do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// The least isolation it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation_level: Option<IsolationLevel>,
    /// What of the host's files it sees.
    pub filesystem: FilesystemPolicy,
    /// What its containers are made of.
    pub container: ContainerPolicy,
    /// Which processes it may start.
    pub process: ProcessPolicy,
    /// What it may reach.
    pub network: NetworkPolicy,
    /// What it may use up.
    pub resources: ResourcePolicy,
    /// Which system calls it may make.
    pub syscalls: SyscallPolicy,
    /// Which environment variables it gets.
    pub environment: EnvironmentPolicy,
    /// Which commands are refused before they start; advice to the caller, not a boundary.
    pub command: CommandPolicy,
}

/// How much isolation a command needs, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum IsolationLevel {
    /// None: mode `logical`.
    #[serde(rename = "LEVEL_0")]
    None,
    /// Its own processes, limits and files.
    #[serde(rename = "LEVEL_1")]
    Process,
    /// Every namespace, its own root, no network, filtered system calls.
    #[serde(rename = "LEVEL_2")]
    Full,
}

impl IsolationLevel {
    /// All of them, least first.
    pub const ALL: [Self; 3] = [Self::None, Self::Process, Self::Full];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "LEVEL_0",
            Self::Process => "LEVEL_1",
            Self::Full => "LEVEL_2",
        }
    }

    /// What a mode gives.
    #[must_use]
    pub fn of(mode: Mode) -> Self {
        match mode {
            Mode::Logical => Self::None,
            Mode::Bwrap | Mode::Nsjail | Mode::Container => Self::Full,
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

/// How much of the host's files a command may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesystemMode {
    /// None: what is open is only read, what looks writable is an overlay, what is not open stays shut, and nobody is asked.
    Static,
}

/// What of the host's files a command sees, beside the read-only runtime and its workspace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FilesystemPolicy {
    /// How much of them it may change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<FilesystemMode>,
    /// Where the session's directory is inside; only `/workspace`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root_path: Option<PathBuf>,
    /// Paths of the host it may read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only_paths: Option<Vec<PathBuf>>,
    /// Paths of the host it may read and write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_write_paths: Option<Vec<PathBuf>>,
    /// Directories of the host that it sees as if they were its own: what it changes is kept for its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlay_paths: Option<Vec<PathBuf>>,
    /// Paths where nothing can be read or reached.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub denied_paths: Vec<PathBuf>,
    /// The largest file it may write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_file_bytes: Option<u64>,
    /// All files of its session together. Not enforced yet, so it is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_total_bytes: Option<u64>,
}

/// What the containers of a command are made of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ContainerPolicy {
    /// The name that the operator gave an image, such as `python`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
}

/// Which processes a command may start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProcessPolicy {
    /// Processes at once; threads count too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_processes: Option<u64>,
    /// Whether it may start processes. Threads it always may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_fork: Option<bool>,
    /// Whether it may execute another program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_exec: Option<bool>,
    /// The only programs it may execute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_executables: Option<Vec<PathBuf>>,
    /// Whether its processes may trace each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub debug: Option<bool>,
}

/// What a command may reach over the network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkPolicy {
    /// How it reaches anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<NetworkMode>,
    /// The only hosts, with mode `proxy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_hosts: Option<Vec<String>>,
    /// The only ports, with mode `proxy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_ports: Option<Vec<u16>>,
    /// Connections at once, with mode `proxy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_connections: Option<u32>,
}

/// The most a command may use up. The limits that hold are never above it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResourcePolicy {
    /// CPU time of all processes together, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cpu_ms: Option<u64>,
    /// CPU rate in thousandths of a core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cpu_millis: Option<u64>,
    /// Wall time, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_wall_ms: Option<u64>,
    /// Memory of all processes together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory_bytes: Option<u64>,
    /// Open files of each process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_open_files: Option<u64>,
    /// Threads at once; processes count too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_threads: Option<u64>,
    /// Kept output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_output_bytes: Option<u64>,
    /// The size of each private temporary file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tmp_bytes: Option<u64>,
    /// What it may read in a second from the device that its session is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_read_bytes_per_second: Option<u64>,
    /// What it may write there in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_write_bytes_per_second: Option<u64>,
    /// How often it may read there in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_reads_per_second: Option<u64>,
    /// How often it may write there in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_writes_per_second: Option<u64>,
    /// The only processors it runs on, by the host's numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Vec<u32>>,
    /// Output and outcome are given out only at multiples of this time, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release_interval_ms: Option<u64>,
}

/// How the names of a [`SyscallPolicy`] are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyscallMode {
    /// Only these of the default list.
    Allow,
    /// All of the default list but these.
    Deny,
}

/// Which system calls a command may make. It can only narrow the default list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SyscallPolicy {
    /// How `names` are meant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<SyscallMode>,
    /// Names of system calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// This many blocked calls end the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub violation_limit: Option<u32>,
}

/// Where a command's environment comes from, loosest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvironmentMode {
    /// The worker's own. Refused: it is not the caller's to see.
    Inherit,
    /// A clean one, and what the run sets.
    Clean,
    /// A clean one, and of what the run sets only the named variables.
    Explicit,
}

/// Which environment variables a command gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EnvironmentPolicy {
    /// Where they come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<EnvironmentMode>,
    /// The variables a run may set, with mode `explicit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub names: Option<Vec<String>>,
}

/// Which commands are refused before they start. A command can be written in more ways than
/// patterns can tell: this spares the caller a run that would fail, it protects nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CommandPolicy {
    /// Regular expressions; the command must match one of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_patterns: Option<Vec<String>>,
    /// Regular expressions; the command must match none of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocked_patterns: Vec<String>,
    /// The longest command, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<u64>,
}
