//! Arguments of `codelia policy`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use codelia_policy::{Format, PolicyScope};
use codelia_types::Mode;

use super::values::duration;

#[derive(Debug, Subcommand)]
pub enum Policy {
    /// Validate a policy and print it normalized
    #[command(after_help = "Example:\n  codelia policy check strict.yaml --mode bwrap")]
    Check {
        /// Policy file: .json, .yaml or .toml
        file: PathBuf,
        /// Validate for this sandbox mode [default: the server's]
        #[arg(long)]
        mode: Option<Mode>,
    },
    /// Show the effective policy and the source of each value
    #[command(
        after_help = "Example:\n  codelia policy explain --session work --policy strict.yaml"
    )]
    Explain {
        /// Explain a run in this session [default: a new session]
        #[arg(short, long)]
        session: Option<String>,
        /// Policy file of the run, or of the new session
        #[arg(long, value_name = "FILE")]
        policy: Option<PathBuf>,
        /// Sandbox mode of the run [default: the session's]
        #[arg(long)]
        mode: Option<Mode>,
        /// Explain a new session of this project
        #[arg(long, conflicts_with = "session")]
        project: Option<String>,
        /// Explain a new session with this profile, such as cargo
        #[arg(long, value_name = "NAME", conflicts_with = "session")]
        profile: Option<String>,
    },
    /// Set the policy of a scope from a file, as a new version
    #[command(after_help = "\
New sessions obey it. Operators set that of an organisation, admins those of projects, and a key its
own. A lower scope only tightens, except for fields that an upper one lists in `delegate`.

Examples:
  codelia policy import web.yaml --scope project --name web --reason 'no forks'
  codelia policy import me.yaml --scope user --reason 'less memory' --expect-version 3")]
    Import {
        /// Policy file: .json, .yaml or .toml
        file: PathBuf,
        #[command(flatten)]
        of: ScopeArgs,
        /// Record why
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Fail unless this version is in effect; 0 for none
        #[arg(long, value_name = "N")]
        expect_version: Option<i64>,
    },
    /// Print the policy of a scope
    #[command(after_help = "\
Example:
  codelia policy export --scope project --name web --format toml > web.toml")]
    Export {
        #[command(flatten)]
        of: ScopeArgs,
        /// Print this version [default: the one in effect]
        #[arg(long, value_name = "N")]
        version: Option<i64>,
        /// Format: json, yaml or toml
        #[arg(long, default_value = "yaml")]
        format: Format,
    },
    /// Compare the policy of a scope with a file, or with an earlier version
    #[command(after_help = "\
Examples:
  codelia policy diff web.yaml --scope project --name web
  codelia policy diff --version 3 --scope organisation")]
    Diff {
        /// Compare with this policy file
        #[arg(required_unless_present = "version", conflicts_with = "version")]
        file: Option<PathBuf>,
        #[command(flatten)]
        of: ScopeArgs,
        /// Compare with this version
        #[arg(long, value_name = "N")]
        version: Option<i64>,
    },
    /// List the versions of the policy of a scope, newest first
    History {
        #[command(flatten)]
        of: ScopeArgs,
        /// Show at most this many
        #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
        limit: usize,
    },
    /// Restore an earlier version of the policy of a scope, as a new version
    #[command(after_help = "\
Example:
  codelia policy rollback --scope project --name web --version 3 --reason 'builds fail'")]
    Rollback {
        #[command(flatten)]
        of: ScopeArgs,
        /// The version to restore
        #[arg(long, value_name = "N")]
        version: i64,
        /// Record why
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Delete the policy of a scope; its versions can be restored
    Delete {
        #[command(flatten)]
        of: ScopeArgs,
        /// Record why
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Show which recorded runs a policy of a scope would have refused or changed
    #[command(after_help = "\
Nothing is stored. Runs that have ended are tried, newest first. The result shows what the policy
takes away from them, and nothing that it would allow.

Example:
  codelia policy dry-run web.yaml --scope project --name web --since 24h")]
    DryRun {
        /// Policy file: .json, .yaml or .toml
        file: PathBuf,
        #[command(flatten)]
        of: ScopeArgs,
        /// Try runs that were started this long ago at most [max: 31days]
        #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
        since: Duration,
        /// Try at most this many runs
        #[arg(short = 'n', long, value_name = "N", default_value_t = 1000)]
        limit: usize,
    },
    /// List the named sets of hosts, which policies include as set:NAME
    Sets,
}

/// Whose policy.
#[derive(Debug, Args)]
pub struct ScopeArgs {
    /// Scope: organisation, project or user
    #[arg(long)]
    pub scope: PolicyScope,
    /// Of a project its name, of an organisation the tenant, of a user the key [default: your own]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub name: String,
}
