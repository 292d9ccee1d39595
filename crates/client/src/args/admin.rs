//! Arguments of `codelia tenants`, `keys` and `workers`.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use codelia_policy::IsolationLevel;

use super::values::{cpu_millicores, duration, mebibytes};

#[derive(Debug, Subcommand)]
pub enum Tenants {
    /// List tenants
    List,
    /// Create a tenant
    #[command(after_help = "\
Quotas that are not given are: 1000 sessions, 1000 concurrent runs, 1000 queued runs, 5000 requests
per second, 10 GiB of output, 100 GiB of files.

Example:
  codelia tenants create team-7 --sessions 100")]
    Create {
        /// Tenant id: [a-z0-9-]{1,63}
        tenant: String,
        #[command(flatten)]
        quotas: Quotas,
    },
    /// Show a tenant with its quotas and usage
    Show {
        /// Tenant id [default: your own]
        #[arg(default_value = "-", hide_default_value = true)]
        tenant: String,
    },
    /// Change a tenant's quotas
    #[command(after_help = "\
Quotas that are not given stay as they are.

Example:
  codelia tenants quota team-7 --concurrent-runs 50")]
    Quota {
        /// Tenant id
        tenant: String,
        #[command(flatten)]
        quotas: Quotas,
    },
    /// Set the highest limits that a tenant's sessions and runs may request
    #[command(after_help = "\
Limits that are not given are those of the installation (`limits.max_*` in its configuration).

Example:
  codelia tenants limits team-7 --timeout 48h --memory-mb 8192 --cpus 4")]
    Limits {
        /// Tenant id
        tenant: String,
        #[command(flatten)]
        limits: MaxLimits,
    },
    /// Set how long the rows of a tenant are kept
    #[command(after_help = "\
Times that are not given are those of the installation (`retention.*` in its configuration).

Example:
  codelia tenants retention team-7 --runs 7d --output 12h")]
    Retention {
        /// Tenant id
        tenant: String,
        #[command(flatten)]
        retention: RetentionTimes,
    },
    /// Set the minimum isolation level of a tenant's sessions and runs
    #[command(after_help = "\
LEVEL_0 allows mode logical, which isolates nothing. With --ask, a run below the level waits for an
approval instead of being refused. The reason is stored with the decision.

Examples:
  codelia tenants floor team-7 LEVEL_0 --reason 'trusted build tools'
  codelia tenants floor team-7 LEVEL_2 --ask LEVEL_0 --reason 'debugging, if someone agrees'")]
    Floor {
        /// Tenant id
        tenant: String,
        /// Minimum level: LEVEL_0, LEVEL_1 or LEVEL_2
        level: IsolationLevel,
        /// Lowest level that a run may have with an approval [default: none below LEVEL]
        #[arg(long, value_name = "LEVEL")]
        ask: Option<IsolationLevel>,
        /// Record why the level was chosen
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Suspend a tenant: refuse its calls and cancel its runs
    #[command(after_help = "\
Its sessions and files stay until they expire; `codelia tenants resume` ends the suspension.

Example:
  codelia tenants suspend team-7 --reason 'invoice unpaid'")]
    Suspend {
        /// Tenant id
        tenant: String,
        /// Record why it is suspended
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// End the suspension of a tenant
    Resume {
        /// Tenant id
        tenant: String,
    },
    /// Delete a tenant with its keys, sessions, runs and output
    #[command(after_help = "\
It is refused at once; its rows follow when its files are removed. This cannot be undone.

Example:
  codelia tenants delete team-7 --force")]
    Delete {
        /// Tenant id
        tenant: String,
        /// Delete it even if it has open sessions
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Args)]
pub struct Quotas {
    /// Maximum number of open sessions
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub sessions: Option<i64>,
    /// Maximum number of runs that have not ended
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub concurrent_runs: Option<i64>,
    /// Maximum number of runs that wait for a slot
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub queued_runs: Option<i64>,
    /// Maximum requests per second, for each API process
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub requests_per_second: Option<i64>,
    /// Maximum stored run output, in bytes
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub output_bytes: Option<i64>,
    /// Maximum size of the files of all sessions, in MiB
    #[arg(long = "disk-mb", value_name = "N", value_parser = mebibytes)]
    pub disk_bytes: Option<i64>,
}

#[derive(Debug, Args)]
pub struct RetentionTimes {
    /// Keep records of runs and ended sessions for this long
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub runs: Option<Duration>,
    /// Keep output of runs for this long, at most as long as their records
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub output: Option<Duration>,
    /// Keep events of the audit for this long
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub audit: Option<Duration>,
}

#[derive(Debug, Args)]
pub struct MaxLimits {
    /// Maximum timeout of a run
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Maximum memory of all processes together, in MiB
    #[arg(long = "memory-mb", value_name = "N", value_parser = mebibytes)]
    pub memory_bytes: Option<i64>,
    /// Maximum CPU rate, in cores such as 0.5
    #[arg(long = "cpus", value_name = "N", value_parser = cpu_millicores)]
    pub cpu_millicores: Option<i64>,
    /// Maximum number of processes and threads
    #[arg(long, value_name = "N")]
    pub pids: Option<i64>,
    /// Maximum number of open files of each process
    #[arg(long, value_name = "N")]
    pub open_files: Option<i64>,
    /// Maximum stored output, in MiB
    #[arg(long = "output-mb", value_name = "N", value_parser = mebibytes)]
    pub output_bytes: Option<i64>,
    /// Maximum CPU time of all processes together
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub cpu_time: Option<Duration>,
    /// Maximum size of a file that a command writes, in MiB
    #[arg(long = "file-mb", value_name = "N", value_parser = mebibytes)]
    pub file_bytes: Option<i64>,
    /// Maximum size of each private temporary file system, in MiB
    #[arg(long = "tmp-mb", value_name = "N", value_parser = mebibytes)]
    pub tmp_bytes: Option<i64>,
    /// Maximum size of the files of a session together, in MiB
    #[arg(long = "disk-mb", value_name = "N", value_parser = mebibytes)]
    pub disk_bytes: Option<i64>,
    /// Maximum number of files and directories of a session
    #[arg(long, value_name = "N")]
    pub inodes: Option<i64>,
}

#[derive(Debug, Subcommand)]
pub enum Keys {
    /// List a tenant's keys
    List {
        /// Tenant id [default: your own]
        #[arg(long, default_value = "-", hide_default_value = true)]
        tenant: String,
    },
    /// Create a key and print its secret, which is shown only once
    #[command(after_help = "\
Examples:
  codelia keys create --tenant team-7 --name ci --scope run --scope files
  codelia keys create --name visitor --scope run --expires-in 7d")]
    Create {
        /// Tenant id [default: your own]
        #[arg(long, default_value = "-", hide_default_value = true)]
        tenant: String,
        /// Display name
        #[arg(long, default_value = "", hide_default_value = true)]
        name: String,
        /// Grant this scope (repeatable)
        #[arg(long = "scope", value_enum, required = true)]
        scopes: Vec<Scope>,
        /// Refuse the key after this long [default: never]
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        expires_in: Option<Duration>,
    },
    /// Revoke a key immediately
    Revoke {
        /// Tenant id [default: your own]
        #[arg(long, default_value = "-", hide_default_value = true)]
        tenant: String,
        /// Id, start of the id, or display name of the key
        key: String,
    },
}

/// Permission of a key.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Scope {
    /// Use sessions and runs
    Run,
    /// Read and write files
    Files,
    /// Decide approvals
    Approve,
    /// Read the audit log
    Audit,
    /// Administer the key's own tenant
    Admin,
    /// Administer the installation
    Operator,
}

#[derive(Debug, Subcommand)]
pub enum Workers {
    /// List workers
    List,
    /// Drain a worker: finish its runs, accept no new ones
    #[command(after_help = "\
Example:
  codelia workers drain worker-1 --wait --timeout 1h")]
    Drain {
        /// Worker id
        worker: String,
        /// Return when the worker holds no session and executes no run, or is gone
        #[arg(long)]
        wait: bool,
        /// Fail if the worker is not empty after this long; it continues to drain
        #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10m", requires = "wait")]
        timeout: Duration,
    },
    /// Take back the drain of a worker: it accepts runs again
    #[command(after_help = "\
Example:
  codelia workers undrain worker-1 --wait")]
    Undrain {
        /// Worker id
        worker: String,
        /// Return when the worker takes work again
        #[arg(long)]
        wait: bool,
        /// Fail if the worker does not take work after this long
        #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1m", requires = "wait")]
        timeout: Duration,
    },
}
