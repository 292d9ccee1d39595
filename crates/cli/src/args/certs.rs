//! Arguments of `codelia certs`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum Certs {
    /// Create an authority and certificates for development and tests
    #[command(after_help = "\
Creates a new authority, which signs:
  api              the public API: localhost, 127.0.0.1, ::1 and every --name
  internal-worker  workers towards apis
  internal-api     apis towards workers

Nobody can sign more with it: its key is not kept. Running processes take changed files after at most
10 seconds. Prints the settings that use the files.

Example:
  codelia certs dev --dir /etc/codelia/tls --name codelia.example.test")]
    Dev(DevCerts),
}

#[derive(Debug, Args)]
pub(crate) struct DevCerts {
    /// Write the files to this directory [default: DATA_DIR/certs]
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Another host name or address of the API; may be repeated
    #[arg(long = "name", value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Days until the certificates end
    #[arg(long, value_name = "N", default_value_t = 825, value_parser = clap::value_parser!(u16).range(1..=3650))]
    pub(crate) days: u16,
    /// Replace files that exist
    #[arg(long)]
    pub(crate) force: bool,
}
