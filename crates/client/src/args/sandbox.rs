//! Arguments that runs and sessions share: mode, network, limits, policy.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use codelia_policy::VolumeMount;
use codelia_types::{Mode, NetworkMode};

use super::{
    values::{bytes, cpu_millicores, duration, key_value},
    volume::volume_mount,
};

/// Network access, in addition to the policy file.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Network")]
pub struct NetworkArgs {
    /// Network access: none, proxy (only to allowed hosts) or host [default: the server's]
    #[arg(long, value_name = "MODE")]
    pub network: Option<NetworkMode>,
    /// Allow the connections that the policy permits: the same as --network proxy
    #[arg(long, conflicts_with = "network")]
    pub allow_network: bool,
    /// Allow connections to this host: a name, *.NAME, an address or set:NAME; implies --network
    /// proxy (repeatable)
    #[arg(long = "allow-host", value_name = "HOST")]
    pub hosts: Vec<String>,
    /// Allow connections to this port of allowed hosts (repeatable) [default: 80 and 443]
    #[arg(long = "allow-port", value_name = "PORT")]
    pub ports: Vec<u16>,
}

impl NetworkArgs {
    /// The network mode that the flags request.
    pub fn requested_mode(&self) -> Option<NetworkMode> {
        self.network
            .or((self.allow_network || !self.hosts.is_empty()).then_some(NetworkMode::Proxy))
    }
}

/// Host files to expose, in addition to the policy file.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Files of the host")]
pub struct FilesystemArgs {
    /// Never modify host files: writable paths become overlays
    #[arg(long = "static")]
    pub is_static: bool,
    /// Let the first read of each file below --ro paths wait for a person's decision
    #[arg(long, conflicts_with_all = ["is_static", "rw", "overlay"])]
    pub dynamic: bool,
    /// Expose this host path read-only (repeatable)
    #[arg(long, value_name = "PATH")]
    pub ro: Vec<PathBuf>,
    /// Expose this host path read-write (repeatable)
    #[arg(long, value_name = "PATH", conflicts_with = "is_static")]
    pub rw: Vec<PathBuf>,
    /// Expose this host directory as an overlay: changes stay in the session (repeatable)
    #[arg(long, value_name = "PATH")]
    pub overlay: Vec<PathBuf>,
    /// Deny access to this path (repeatable)
    #[arg(long, value_name = "PATH", visible_alias = "blacklist")]
    pub deny: Vec<PathBuf>,
    /// Mount this volume (`codelia volume create`), which outlives the session: ro reads it, rw
    /// writes to it as the only session, copy drops the changes with the session (repeatable)
    /// [default: copy]
    #[arg(long = "volume", value_name = "NAME:PATH[:MODE]", value_parser = volume_mount)]
    pub volumes: Vec<VolumeMount>,
    /// Use the image of this profile in mode container, such as python
    #[arg(long, value_name = "NAME")]
    pub image_profile: Option<String>,
}

/// Sandbox of a run or session. The server validates the values.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Sandbox and limits")]
pub struct SandboxArgs {
    /// Sandbox mode: logical, bwrap, nsjail, native or container [default: the server's]
    #[arg(long)]
    pub mode: Option<Mode>,
    /// Kill the command after this long; with -t or -d the default is 4h [default: 2m, max: 1day]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Limit the memory of all processes together, such as 256m or 1g [default: 512m, max: 2048m]
    #[arg(short, long = "memory", value_name = "SIZE", value_parser = bytes, allow_negative_numbers = true)]
    pub memory_bytes: Option<i64>,
    /// Limit the CPU rate, in cores such as 0.5 [default: 1, max: 2]
    #[arg(long = "cpus", value_name = "N", value_parser = cpu_millicores, allow_negative_numbers = true)]
    pub cpu_millicores: Option<i64>,
    /// Limit the number of processes and threads [default: 100, max: 500]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub pids: Option<i64>,
    /// Limit the files of the session together, such as 2g; only for a new session [default: 10g,
    /// max: 100g]
    #[arg(long = "disk", value_name = "SIZE", value_parser = bytes, allow_negative_numbers = true)]
    pub disk_bytes: Option<i64>,
    /// Limit the number of files and directories of the session; only for a new session
    /// [default: 1000000, max: 10000000]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub inodes: Option<i64>,
    /// Store this much output, such as 50m; what exceeds it only reaches a caller that is attached
    /// [default: 10m, max: 100m]
    #[arg(long = "output-limit", value_name = "SIZE", value_parser = bytes, allow_negative_numbers = true)]
    pub output_bytes: Option<i64>,
    /// Apply the policy in this .json, .yaml or .toml file
    #[arg(long = "policy", value_name = "FILE")]
    pub policy_file: Option<PathBuf>,
    /// Deny tracing of processes, even if the policy allows it
    #[arg(long)]
    pub no_debug: bool,
    /// Log what the command does: signals that it sends, operations that change files
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_enum)]
    pub log: Vec<LoggedCalls>,
    /// Attach a label (repeatable)
    #[arg(long = "label", value_name = "K=V", value_parser = key_value)]
    pub labels: Vec<(String, String)>,
    /// Make retries safe: retrying with the same key returns the first result
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    // Sandboxes inside a sandbox are refused by name, with what to use instead.
    #[arg(long, hide = true)]
    pub containers: bool,
    #[arg(long, hide = true)]
    pub vm: bool,
    #[arg(long, hide = true)]
    pub allow_kvm: bool,
    #[command(flatten)]
    pub network: NetworkArgs,
    // Last: its heading also applies to what follows.
    #[command(flatten)]
    pub filesystem: FilesystemArgs,
}

/// Calls of a command that are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoggedCalls {
    /// Signals
    Signals,
    /// Operations that change files
    Files,
}
