//! Arguments of `codelia tools`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use codelia_policy::IsolationLevel;

#[derive(Debug, Subcommand)]
pub enum Tools {
    /// Create a tool, or replace its declaration
    #[command(after_help = "\
The file names the tool, its owner, the commands that belong to it and its policy:

  name: formatter
  owner: platform team
  executables: [black, /usr/bin/black]
  command_pattern: 'python3 -m black **'
  policy:
    isolation_level: LEVEL_2
    network: {mode: none}

A changed declaration is a new version. If it declares less than LEVEL_2, an operator must approve
each version before runs can use it.

Examples:
  codelia tools register formatter.yaml
  codelia tools register formatter.yaml --expect 3   refuse if someone changed version 3")]
    Register {
        /// Tool file: .json, .yaml or .toml
        file: PathBuf,
        /// Refuse unless the tool has this version; 0 if it must not exist
        #[arg(long, value_name = "VERSION", allow_negative_numbers = true)]
        expect: Option<i64>,
    },
    /// List tools
    List {
        /// Tools of this tenant, as an operator
        #[arg(long)]
        tenant: Option<String>,
    },
    /// Show a tool with its approval and quarantine
    Show(ToolName),
    /// Delete a tool
    Rm(ToolName),
    /// Approve the isolation level that a version of a tool declares, as an operator
    #[command(after_help = "\
Look at the declaration first (`codelia tools show`). LEVEL_2 withdraws an approval.

Example:
  codelia tools approve deploy --tenant team-7 --level LEVEL_0 --version 2 --reason 'needs the host'")]
    Approve {
        #[command(flatten)]
        name: ToolName,
        /// The declared level, or LEVEL_2 to withdraw the approval
        #[arg(long, value_name = "LEVEL")]
        level: IsolationLevel,
        /// The version that you looked at
        #[arg(long, value_name = "VERSION", allow_negative_numbers = true)]
        version: i64,
        /// Record why
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Refuse runs that name a tool, also those that wait
    #[command(
        after_help = "Example:\n  codelia tools quarantine formatter --reason 'reads other files'"
    )]
    Quarantine {
        #[command(flatten)]
        name: ToolName,
        /// Record why
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// End the quarantine of a tool
    #[command(
        after_help = "Example:\n  codelia tools release formatter --reason 'version 4 is fixed'"
    )]
    Release {
        #[command(flatten)]
        name: ToolName,
        /// Record why
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

#[derive(Debug, Args)]
pub struct ToolName {
    /// Tool id
    pub tool: String,
    /// Tenant of the tool, as an operator
    #[arg(long)]
    pub tenant: Option<String>,
}
