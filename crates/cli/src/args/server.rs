//! Arguments of `codelia up`, `codelia config` and `codelia egress`.

use clap::{Args, Subcommand};
use codelia_types::Mode;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codelia up                                    run until Ctrl-C
  codelia up --detach --data-dir ./state        run in the background
  CODELIA_DATABASE_URL=postgres://… codelia up  use an existing database")]
pub(crate) struct Up {
    /// Serve the API on this address; port 0 picks a free port [default: 127.0.0.1:7300]
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<String>,
    /// Serve /metrics on this address; empty turns it off [default: 127.0.0.1:7301]
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics_listen: Option<String>,
    /// Execute at most this many runs concurrently [default: 4 per core]
    #[arg(long, value_name = "N")]
    pub(crate) slots: Option<String>,
    /// Sandbox mode of runs that request none [default: the strongest usable mode]
    #[arg(long)]
    pub(crate) mode: Option<Mode>,
    /// Return once the service is ready and leave it running in the background
    #[arg(long)]
    pub(crate) detach: bool,
    /// Set on the background process that `--detach` starts
    #[arg(long, hide = true, conflicts_with = "detach")]
    pub(crate) detached: bool,
}

/// The worker sends everything else over standard input.
#[derive(Debug, Args)]
pub(crate) struct Egress {
    /// Format of log lines: human or json
    #[arg(long, default_value = "human")]
    pub(crate) log_format: String,
    /// Which log lines are written
    #[arg(long, default_value = "info")]
    pub(crate) log_filter: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Show every key with its effective value and the value's source
    Show,
}
