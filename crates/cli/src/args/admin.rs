//! Arguments of `codelia admin`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum Admin {
    /// Create the first key of an operator, in the database
    #[command(after_help = "\
Needs a migrated database (`database.url`) and no running API. The key has every scope.

Refuses if a live operator key exists. With --key-file it succeeds if the file holds that key, so it
can be repeated. It completes what an earlier call began: a key in the file that the database does
not have is created there.

Example:
  codelia admin bootstrap --key-file /etc/codelia/operator.key")]
    Bootstrap(Bootstrap),
}

#[derive(Debug, Args)]
pub(crate) struct Bootstrap {
    /// Write the key to this file, readable by its owner only, instead of printing it
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// Tenant of the key; created if it does not exist
    #[arg(long, value_name = "TENANT", default_value = "operators")]
    pub(crate) tenant: String,
    /// Create a key even if a live operator key exists
    #[arg(long)]
    pub(crate) force: bool,
}
