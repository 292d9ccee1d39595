//! Arguments of `codelia context`.

use std::path::PathBuf;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub enum Context {
    /// List contexts
    List,
    /// Show a context, or the server that commands call and why
    Show {
        /// Name of the context [default: what applies now]
        name: Option<String>,
    },
    /// Use a context for all commands
    #[command(after_help = "\
--context, --endpoint, --data-dir and their variables override the context in use.

Example:
  codelia context use prod")]
    Use {
        /// Name of the context
        name: String,
    },
    /// Add or replace a context
    #[command(after_help = "\
The key is read from a file or stdin: other users can read arguments. The contexts are kept in
~/.config/codelia/contexts.toml, readable only by you.

Examples:
  codelia context add prod https://codelia.example.com:7300 --key-file key.txt
  pass codelia | codelia context add prod https://codelia.example.com:7300 --key-file -")]
    Add {
        /// Name of the context
        name: String,
        /// URL of the API, with scheme and port
        url: String,
        /// Read the API key from this file, or from stdin with -
        #[arg(long, value_name = "FILE")]
        key_file: PathBuf,
        /// Trust the CA certificates in this PEM file [default: the system's]
        #[arg(long, value_name = "FILE")]
        tls_ca: Option<PathBuf>,
    },
    /// Remove a context
    Remove {
        /// Name of the context
        name: String,
    },
}
