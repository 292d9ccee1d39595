//! Arguments of `codelia session`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::{
    sandbox::SandboxArgs,
    values::{duration, key_value},
};

#[derive(Debug, Subcommand)]
pub enum Session {
    /// Create a session
    #[command(
        after_help = "Example:\n  codelia session create --alias work --ttl 2h --idle-ttl 10m"
    )]
    Create(Box<CreateSession>),
    /// List sessions
    List {
        /// Include sessions that have ended
        #[arg(short, long)]
        all: bool,
        /// List only sessions with this label (repeatable: with all of them)
        #[arg(short, long = "label", value_name = "K=V", value_parser = key_value)]
        labels: Vec<(String, String)>,
        /// List at most this many sessions, newest first
        #[arg(long, value_name = "N", default_value_t = 50)]
        limit: usize,
    },
    /// Show a session
    Show {
        /// Id, start of the id, or alias
        session: String,
    },
    /// Extend a session's lifetime
    #[command(after_help = "Example:\n  codelia session extend work --ttl 2h")]
    Extend {
        /// Id, start of the id, or alias
        session: String,
        /// End the session this long from now [max: 24h]
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        ttl: Duration,
    },
    /// Change a session's alias, labels, lifetimes and hosts
    #[command(after_help = "\
What is not given stays as it is.

Examples:
  codelia session update work --ttl 2h --no-idle-ttl
  codelia session update work --alias done --label state=done --label owner=me
  codelia session update work --allow-host pypi.org --allow-host '*.pythonhosted.org'")]
    Update(UpdateSession),
    /// End the quarantine of a session (needs the scope `admin` or `operator`)
    #[command(after_help = "Example:\n  codelia session release work --reason 'looked at'")]
    Release {
        /// Id, start of the id, or alias
        session: String,
        /// Why; recorded in the audit
        #[arg(long)]
        reason: String,
    },
    /// Close sessions: cancel their runs and remove their files
    Close {
        /// Ids, starts of ids, or aliases; every session is tried
        #[arg(required = true)]
        sessions: Vec<String>,
    },
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true, id = "change")]
pub struct SessionChange {
    /// Set the alias: [a-z0-9-]{1,63}
    #[arg(long)]
    pub alias: Option<String>,
    /// Remove the alias
    #[arg(long, conflicts_with = "alias")]
    pub no_alias: bool,
    /// Replace all labels with these (repeatable)
    #[arg(short, long = "label", value_name = "K=V", value_parser = key_value)]
    pub labels: Vec<(String, String)>,
    /// Remove all labels
    #[arg(long, conflicts_with = "labels")]
    pub no_labels: bool,
    /// End the session this long from now [max: 24h]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub ttl: Option<Duration>,
    /// End the session after this long without a run or file call
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub idle_ttl: Option<Duration>,
    /// Remove the idle limit
    #[arg(long, conflicts_with = "idle_ttl")]
    pub no_idle_ttl: bool,
    /// Let its runs reach these hosts only, running ones too, in network mode `proxy` (repeatable)
    #[arg(long = "allow-host", value_name = "HOST")]
    pub allow_hosts: Vec<String>,
    /// Let its runs reach no host
    #[arg(long, conflicts_with = "allow_hosts")]
    pub no_hosts: bool,
}

#[derive(Debug, Args)]
pub struct UpdateSession {
    /// Id or alias
    pub session: String,
    #[command(flatten)]
    pub change: SessionChange,
}

#[derive(Debug, Args)]
pub struct CreateSession {
    /// Name the session: [a-z0-9-]{1,63}
    #[arg(long)]
    pub alias: Option<String>,
    /// End the session after this long [default: 1h, max: 24h]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub ttl: Option<Duration>,
    /// End the session after this long without a run or file call [default: no idle limit]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub idle_ttl: Option<Duration>,
    /// Continue with an empty workspace if the files are lost or their worker is unavailable,
    /// instead of refusing runs
    #[arg(long)]
    pub allow_data_loss: bool,
    /// Create it under the policy of this project
    #[arg(long)]
    pub project: Option<String>,
    /// Create it with this profile, such as cargo, see `codelia profiles`
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    #[command(flatten)]
    pub sandbox: SandboxArgs,
}
