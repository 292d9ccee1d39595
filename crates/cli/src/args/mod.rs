//! Command-line arguments of the server's commands. One file per noun. The client's are in
//! `codelia_client::args`.

mod admin;
mod certs;
mod server;

use std::path::PathBuf;

use clap::Subcommand;
use codelia_client::args::{self as client, Program};

pub(crate) use self::{
    admin::{Admin, Bootstrap},
    certs::{Certs, DevCerts},
    server::{Config, Egress, Up},
};

/// The command line of this program.
pub(crate) type Cli = Program<Command>;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start database, API and worker on this machine
    Up(Up),
    /// Stop what `up` started
    #[command(after_help = "\
Stops the instance in --data-dir. Without it, stops the only instance that runs, and refuses if there
are several.")]
    Down,
    /// Serve the public API
    Api,
    /// Execute runs as a worker
    Worker,
    /// Apply pending database migrations
    Migrate,
    /// Check which sandbox modes and limits this machine supports
    Doctor,
    #[command(flatten)]
    Client(client::Command),
    /// Set up an installation in its database
    #[command(subcommand)]
    Admin(Admin),
    /// Create certificates
    #[command(subcommand)]
    Certs(Certs),
    /// Show the configuration
    #[command(subcommand)]
    Config(Config),
    /// Print a shell completion script
    #[command(after_help = "\
Scripts for bash, zsh and fish complete names of sessions, runs, files and others too, by asking the
server.

Example:
  codelia completions bash > /etc/bash_completion.d/codelia")]
    Completions {
        /// Shell to generate the script for
        shell: clap_complete::Shell,
    },
    /// Serve the egress proxy of a worker on standard input
    #[command(hide = true)]
    Egress(Egress),
    /// Write the manual pages to a directory, for packages
    #[command(name = "__man", hide = true)]
    Man {
        /// Directory of the pages
        dir: PathBuf,
    },
    /// Print the candidates for the last word, for completion scripts
    #[command(name = "__complete", hide = true)]
    Complete {
        /// Words of the command line after the program
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use codelia_client::args::help;

    use super::*;

    #[test]
    fn clap_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_lists_every_command_under_a_heading() {
        let help = help::with_groups(Cli::command()).render_help().to_string();
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let line = format!("\n  {} ", command.get_name());
            assert_eq!(help.matches(&line).count(), 1, "{line}: {help}");
        }
        assert!(!help.contains("Other commands") && !help.contains("__complete"), "{help}");
        assert!(help.contains("Global options:") && help.contains("Examples:"), "{help}");
    }
}
