//! Arguments of `codelia policy`.

use std::path::PathBuf;

use clap::Subcommand;
use codelia_types::Mode;

#[derive(Debug, Subcommand)]
pub(crate) enum Policy {
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
    #[command(after_help = "Example:\n  codelia policy explain --session work --policy strict.yaml")]
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
    },
    /// List the named sets of hosts, which policies include as set:NAME
    Sets,
}
