//! Arguments of `codelia approvals`.

use clap::{Args, Subcommand, ValueEnum};

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
A run waits for an approval if it requests what its policy leaves to a person, such as a wider network.
Nobody's decision is a denial: an approval expires after the server's `approvals.timeout`. Deciding needs
a key with the scope `approve`, other than the one that started the run.

Examples:
  codelia approvals watch
  codelia approvals allow 019b2d4c --for session --reason 'installs its dependencies'
  codelia approvals list --granted"
)]
pub struct Approvals {
    #[command(subcommand)]
    pub command: Option<ApprovalsCommand>,
    #[command(flatten)]
    pub list: ListApprovals,
}

#[derive(Debug, Subcommand)]
pub enum ApprovalsCommand {
    /// List approvals that wait for a decision
    List(ListApprovals),
    /// Print approvals as they are requested and decided; on a terminal, ask for each decision
    Watch {
        /// Watch only this session
        #[arg(short, long, value_name = "SESSION")]
        session: Option<String>,
    },
    /// Allow what a run requests
    #[command(after_help = "Example:\n  codelia approvals allow 019b2d4c --for session")]
    Allow {
        /// Id, or start of the id
        approval: String,
        /// Allow it for this run, for all runs of its session, for all sessions of its user or
        /// project, or for the whole tenant
        #[arg(long = "for", value_name = "SCOPE", value_enum, default_value_t = ApprovalScope::Once)]
        scope: ApprovalScope,
        /// Allow all files below the directory of the file that is asked for
        #[arg(long)]
        directory: bool,
        /// Record why
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// Deny what a run requests
    Deny {
        /// Id, or start of the id
        approval: String,
        /// Deny all files below the directory of the file that is asked for
        #[arg(long)]
        directory: bool,
        /// Record why; the caller of the run reads it
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// Revoke an approval that holds for later runs
    Revoke {
        /// Id, or start of the id
        approval: String,
        /// Record why
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        reason: String,
    },
}

#[derive(Debug, Args)]
pub struct ListApprovals {
    /// Include those that were decided or have expired
    #[arg(short, long)]
    pub all: bool,
    /// List only those that hold for later runs
    #[arg(long, conflicts_with = "all")]
    pub granted: bool,
    /// List only those of this session
    #[arg(short, long, value_name = "SESSION")]
    pub session: Option<String>,
    /// List at most this many approvals, newest first
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub limit: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ApprovalScope {
    /// The run that requested it
    Once,
    /// All runs of its session
    Session,
    /// All sessions of the user that created its session, if the organisation delegates that
    User,
    /// All sessions of the project of its session, if the organisation delegates that
    Project,
    /// All sessions of the tenant, which is the organisation
    #[value(alias = "organisation")]
    Tenant,
}
