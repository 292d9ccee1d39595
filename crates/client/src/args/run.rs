//! Arguments of `codelia run`, `exec`, `attach`, `logs`, `ps` and `kill`.

use std::{path::PathBuf, time::Duration};

use clap::Args;

use super::{
    sandbox::SandboxArgs,
    values::{duration, key_value, signal},
};
use crate::detach_keys::DetachKeys;

#[derive(Debug, Args)]
#[command(after_help = "\
Exits with the command's exit code, or 128+n if signal n killed it; 123 the command succeeded, but
output that you redirected is incomplete; 124 timed out, 125 refused or codelia failed, 126 not
executable, 127 not found, 130 canceled, 137 killed or out of memory.

The command starts at the first word that is not an option, or after `--`. With --json, stdout has
only the record of the run; the command's stdout and stderr go to stderr.

Defaults and maxima in this help are the built-in ones; the operator may have changed them
(`limits.*` in the server's configuration).

Examples:
  codelia run -- sh -c 'echo out; echo err >&2; exit 7'
  codelia run -t -- bash
  codelia run -dt -s work -- bash            see `codelia attach -t`; ctrl-p ctrl-q detaches again
  tar c . | codelia run -s work -- tar x
  codelia run --timeout 10m --memory 256m --cpus 0.5 -e CI=1 -- make test
  codelia run --secret-env TOKEN -- ./deploy   pass on $TOKEN; the server erases it after the run
  codelia run -d -s work -- ./server         print the run's id; see `codelia attach`
  codelia run --static --overlay /usr/local -- pip install .
  codelia run -s work --transactional -- make  keep none of the changes if make fails
  codelia run -s work --hold -- make           decide later: codelia diff, apply, discard
  codelia run --json -- make 2>make.log      print the run's record, keep the output")]
pub struct Run {
    /// Run in this session, by id or alias [default: a new session for this run]
    #[arg(short, long)]
    pub session: Option<String>,
    /// Run in a new session under the policy of this project, see `codelia projects`
    #[arg(long, value_name = "NAME", conflicts_with = "session")]
    pub project: Option<String>,
    /// Run in a new session with this profile, such as cargo, see `codelia profiles`
    #[arg(long, value_name = "NAME", conflicts_with = "session")]
    pub profile: Option<String>,
    /// Command to run, with its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
    // Last: its headings also apply to what follows.
    #[command(flatten)]
    pub options: RunOptions,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The same as `codelia run -s SESSION`, with its options and exit codes.

Examples:
  codelia exec work -- make test
  codelia exec -it work bash")]
pub struct Exec {
    /// Id or alias of the session
    pub session: String,
    /// Command to run, with its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
    #[command(flatten)]
    pub options: RunOptions,
}

impl From<Exec> for Run {
    fn from(Exec { options, session, command }: Exec) -> Self {
        Self { session: Some(session), project: None, profile: None, options, command }
    }
}

/// Options of a run, whatever its session.
#[derive(Debug, Default, Args)]
pub struct RunOptions {
    /// Start the command in this directory: below the workspace, or /workspace/…
    #[arg(short, long, value_name = "DIR", default_value = "", hide_default_value = true)]
    pub workdir: String,
    /// Forward stdin even if it is a terminal
    #[arg(short, long)]
    pub interactive: bool,
    /// Allocate a terminal for the command
    #[arg(short, long)]
    pub tty: bool,
    /// Start the command, print the run's id and return; -i and -t keep stdin open for `attach`
    #[arg(short, long)]
    pub detach: bool,
    #[command(flatten)]
    pub terminal: TerminalArgs,
    /// Tool that the command belongs to: its policy applies, see `codelia tools`
    #[arg(long, value_name = "TOOL")]
    pub tool: Option<String>,
    /// Give up if no worker takes the run in this time [default: 10m, max: 1day]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub queue_timeout: Option<Duration>,
    /// Apply the changes to the workspace together if the command succeeds, else drop them; see
    /// `codelia diff`
    #[arg(long)]
    pub transactional: bool,
    /// Like --transactional, but always drop the changes
    #[arg(long, conflicts_with = "transactional")]
    pub preview: bool,
    /// Like --transactional, but keep the changes for `codelia apply` or `codelia discard`
    #[arg(long, conflicts_with = "preview")]
    pub hold: bool,
    /// Drop the changes if nobody decides in this time [default: 1h, max: 1day]
    #[arg(long, value_name = "DURATION", value_parser = duration, requires = "hold")]
    pub hold_timeout: Option<Duration>,
    /// Restart the command at most this many times if its worker dies
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub retries: i32,
    // Last: their headings also apply to what follows.
    #[command(flatten)]
    pub env: EnvArgs,
    #[command(flatten)]
    pub sandbox: SandboxArgs,
}

/// How to leave a run's terminal.
#[derive(Debug, Default, Args)]
pub struct TerminalArgs {
    /// Detach from the terminal with these keys, such as ctrl-a,d; empty for none [default:
    /// client.detach_keys]
    #[arg(long, value_name = "KEYS")]
    pub detach_keys: Option<DetachKeys>,
}

/// Environment of a command. Only `-e K=V` puts a value into this process's arguments, where other
/// users of the machine can read it.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Environment")]
pub struct EnvArgs {
    /// Set a variable; without =V, take the value from this process's environment (repeatable)
    #[arg(short = 'e', long, value_name = "K[=V]")]
    pub env: Vec<String>,
    /// Set the variables in this file: lines K=V, empty lines, # comments (repeatable)
    #[arg(long, value_name = "FILE")]
    pub env_file: Vec<PathBuf>,
    /// Set a secret variable from this process's environment; stored encrypted (repeatable)
    #[arg(long, value_name = "NAME")]
    pub secret_env: Vec<String>,
    /// Set the secret variables in this file, in the format of --env-file (repeatable)
    #[arg(long, value_name = "FILE")]
    pub secret_env_file: Vec<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Exits like `codelia run`. Ctrl-C detaches, with -t ctrl-p ctrl-q; the run continues. A session gets
a shell, as a run of its own: `codelia exec SESSION -- …` chooses another command and its options.

Examples:
  codelia attach work                        open a shell in the session
  codelia attach $(codelia run -d -- make test)
  codelia attach -t $(codelia run -dt -- bash)
  codelia attach -i $(codelia run -di -- tar x) <files.tar")]
pub struct Attach {
    /// Id of the run, or its start; or id or alias of a session, to open a shell in it
    #[arg(value_name = "RUN|SESSION")]
    pub target: String,
    /// Forward stdin to the run
    #[arg(short, long)]
    pub interactive: bool,
    /// Connect this terminal to the run's terminal
    #[arg(short, long)]
    pub tty: bool,
    #[command(flatten)]
    pub terminal: TerminalArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Prints stdout to stdout and stderr to stderr. `codelia attach` also returns the exit code.

Examples:
  codelia logs 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f
  codelia logs -f $(codelia run -d -- make test)")]
pub struct Logs {
    /// Id or resource name of the run
    pub run: String,
    /// Wait for more output until the run has ended
    #[arg(short, long)]
    pub follow: bool,
}

#[derive(Debug, Args)]
pub struct RunName {
    /// Id of the run, or its start
    pub run: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  codelia ps\n  codelia ps work                            list the processes of the session\n  codelia ps --usage\n  codelia ps --all --session work --limit 10\n  codelia ps -l app=web"
)]
pub struct Ps {
    /// List the processes of this run, or of all running runs of this session, instead of runs
    #[arg(value_name = "RUN|SESSION", conflicts_with_all = ["all", "session", "all_tenants", "tenant", "labels", "usage"])]
    pub target: Option<String>,
    /// Include runs that have ended
    #[arg(short, long)]
    pub all: bool,
    /// List only the runs of this session
    #[arg(short, long)]
    pub session: Option<String>,
    /// List the runs of all tenants that have not ended; needs a key with the scope operator
    #[arg(long, conflicts_with_all = ["all", "session", "labels"])]
    pub all_tenants: bool,
    /// List the runs of this tenant that have not ended; needs a key with the scope operator
    #[arg(long, value_name = "TENANT", conflicts_with_all = ["all", "session", "labels", "all_tenants"])]
    pub tenant: Option<String>,
    /// List only runs with this label (repeatable: with all of them)
    #[arg(short, long = "label", value_name = "K=V", value_parser = key_value)]
    pub labels: Vec<(String, String)>,
    /// Show what running runs use now: CPU time, memory without cached files, processes, output
    #[arg(long, conflicts_with_all = ["all_tenants", "tenant"])]
    pub usage: bool,
    /// List at most this many runs, newest first
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub limit: usize,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codelia kill 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f
  codelia kill 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f --grace 30s --reason 'wrong branch'
  codelia kill --signal HUP 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f
  codelia kill work                          end the session, with its runs and files")]
pub struct Kill {
    /// Send this signal to the command instead of canceling the run, by name or number
    #[arg(long, value_name = "SIGNAL", value_parser = signal, conflicts_with_all = ["reason", "grace", "tenant"])]
    pub signal: Option<i32>,
    /// Ids of the runs, or the start of each; or ids or aliases of sessions, to end them; each is
    /// tried
    #[arg(required = true, value_name = "RUN|SESSION")]
    pub targets: Vec<String>,
    /// Cancel runs of this tenant, given by their ids; needs a key with the scope operator and
    /// --reason
    #[arg(long, value_name = "TENANT", requires = "reason")]
    pub tenant: Option<String>,
    /// Record why; shown in the run's outcome
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub reason: String,
    /// Kill the processes this long after SIGTERM; 0s kills at once [default: 2s, max: 1m]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub grace: Option<Duration>,
}
