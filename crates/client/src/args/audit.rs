//! Arguments of `codelia audit`.

use clap::{Args, Subcommand};
use time::OffsetDateTime;

use super::values;

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Every admitted and ended run, refusal, decision, key and change of an operator is an event. Listing needs
a key with the scope `audit`.

Examples:
  codelia audit
  codelia audit demo --kind RUN_ADMITTED
  codelia audit --follow --json
  codelia audit --since 24h --json >events.jsonl
  codelia audit verify"
)]
pub struct Audit {
    #[command(subcommand)]
    pub command: Option<AuditCommand>,
    /// List only the events of this session
    #[arg(value_name = "SESSION")]
    pub session: Option<String>,
    /// List only events of this kind, such as RUN_ADMITTED
    #[arg(long, value_name = "KIND", default_value = "", hide_default_value = true)]
    pub kind: String,
    /// List events that concern no tenant, such as flags (operators)
    #[arg(long, conflicts_with = "session")]
    pub installation: bool,
    /// Print new events as they happen, oldest first, until interrupted
    #[arg(short, long)]
    pub follow: bool,
    /// List all events since this time, oldest first, one for each line: 2h for two hours ago, or a
    /// time such as 2030-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = values::past_time, conflicts_with = "limit")]
    pub since: Option<OffsetDateTime>,
    /// List all events before this time, as with --since
    #[arg(long, value_name = "TIME", value_parser = values::past_time, conflicts_with_all = ["limit", "follow"])]
    pub until: Option<OffsetDateTime>,
    /// List at most this many events, newest first
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50)]
    pub limit: usize,
}

#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Check that no event was changed, removed or added later (operators)
    #[command(after_help = "\
Reads the whole audit and checks the signature of each event and checkpoint. Exits with 1 if it finds a
problem.

Example:
  codelia audit verify")]
    Verify,
}
