//! Arguments of `codelia flags`.

use std::time::Duration;

use clap::{Args, Subcommand};
use codelia_policy::IsolationLevel;
use codelia_types::Mode;

use super::values::{duration, key_value};

#[derive(Debug, Subcommand)]
pub enum Flags {
    /// Set the rule of a flag: which new sessions get which mode or floor
    #[command(after_help = "\
A rule is for all sessions, or for those of a tenant, with all given labels, or a share of them. A
session that exists keeps its mode, and a mode that a caller requests is not changed. With a limit
(--max-…) the flag rolls itself back when the limit is exceeded.

Examples:
  codelia flags set canary --mode nsjail --percent 10 --tenant team-7 --reason 'try nsjail'
  codelia flags set canary --mode nsjail --percent 50 --max-failed 2 --reason 'works so far'
  codelia flags set builds --floor LEVEL_2 --label kind=build --reason 'untrusted code'")]
    Set(Box<SetFlag>),
    /// List flags
    List,
    /// Show a flag with what happened under it
    Show {
        /// Flag id
        flag: String,
    },
    /// List the revisions of a flag, newest first
    History {
        /// Flag id
        flag: String,
        /// Show at most this many
        #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
        limit: usize,
    },
    /// Restore the rule before the present one, or turn the flag off if there was none
    #[command(after_help = "\
New sessions follow within two seconds. Sessions that exist keep their mode.

Examples:
  codelia flags rollback canary --reason 'slow setup'
  codelia flags rollback canary --to 3 --reason 'revision 3 worked'")]
    Rollback {
        /// Flag id
        flag: String,
        /// Restore the rule of this revision; 0 turns the flag off
        #[arg(long, value_name = "REVISION", allow_negative_numbers = true)]
        to: Option<i64>,
        /// Record why
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
}

#[derive(Debug, Args)]
pub struct SetFlag {
    /// Flag id: [a-z0-9-]{1,63}
    pub flag: String,
    /// Mode of sessions whose caller requests none: logical, bwrap, nsjail, native or container
    #[arg(long, required_unless_present = "floor")]
    pub mode: Option<Mode>,
    /// Minimum isolation level of the sessions: LEVEL_0, LEVEL_1 or LEVEL_2
    #[arg(long, value_name = "LEVEL")]
    pub floor: Option<IsolationLevel>,
    /// Only sessions of this tenant
    #[arg(long, default_value = "", hide_default_value = true)]
    pub tenant: String,
    /// Only sessions with this label (repeatable: with all of them)
    #[arg(short, long = "label", value_name = "K=V", value_parser = key_value)]
    pub labels: Vec<(String, String)>,
    /// Only this share of the sessions, from 1 to 100
    #[arg(long, value_name = "N", default_value_t = 100, allow_negative_numbers = true)]
    pub percent: i32,
    /// Roll back if more than this percentage of sessions and runs is refused because of the mode
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub max_refused: Option<i32>,
    /// Roll back if the sandbox of more than this percentage of runs cannot be created
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub max_failed: Option<i32>,
    /// Roll back if the 95th percentile of the setup time of sandboxes is longer
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub max_setup_p95: Option<Duration>,
    /// Judge a limit from this many sessions, runs or setups on
    #[arg(long, value_name = "N", default_value_t = 20, allow_negative_numbers = true)]
    pub min_count: i32,
    /// Accept a mode that no live worker can serve
    #[arg(long)]
    pub force: bool,
    /// Record why
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}
