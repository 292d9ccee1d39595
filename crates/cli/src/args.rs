//! The command line, as clap reads it.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use codelia_policy::IsolationLevel;
use codelia_types::{Mode, NetworkMode};

use crate::files::End;

/// Runs commands in sandboxes, for many tenants.
#[derive(Debug, Parser)]
#[command(
    name = "codelia",
    version,
    about,
    max_term_width = 100,
    after_help = "\
Examples:
  codelia up --detach                  start everything on this machine
  codelia run -- echo hello            run a command in a sandbox of its own
  codelia session create --alias work  make a session …
  codelia run -s work -- make test     … and run in it
  codelia cp work:out.log .            copy a file out of it
  codelia down                         stop what `up` started"
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Print JSON: one object or array on stdout
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Configuration file (TOML) [env: CODELIA_CONFIG]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Directory of the local `up` [env: CODELIA_DATA_DIR]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start everything on this machine: database, api and worker
    Up(Up),
    /// Stop what `up` started
    Down,
    /// Serve the public API
    Api,
    /// Execute runs
    Worker,
    /// Apply the database migrations that are missing
    Migrate,
    /// Find out what this machine can enforce
    Doctor,
    /// Run a command
    Run(Box<Run>),
    /// Watch a run from its beginning, and speak with it
    Attach(Attach),
    /// List runs
    Ps(Ps),
    /// Cancel runs
    Kill(Kill),
    /// Sessions: directories that runs share
    #[command(subcommand)]
    Session(Session),
    /// Copy a file into a session or out of it
    Cp(Cp),
    /// List the files of a session
    Ls(Ls),
    /// Policies: what commands may do
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Tenants and what they may use
    #[command(subcommand)]
    Tenants(Tenants),
    /// API keys
    #[command(subcommand)]
    Keys(Keys),
    /// Workers
    #[command(subcommand)]
    Workers(Workers),
    /// The configuration
    #[command(subcommand)]
    Config(Config),
    /// Print completions for a shell
    #[command(after_help = "Example:\n  codelia completions bash > /etc/bash_completion.d/codelia")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codelia up                                    until Ctrl-C
  codelia up --detach --data-dir ./state        in the background
  CODELIA_DATABASE_URL=postgres://… codelia up  with a database that is there")]
pub(crate) struct Up {
    /// Where the API listens; port 0 takes a free one
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<String>,
    /// Where /metrics listens; empty for nowhere
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics_listen: Option<String>,
    /// Runs executed at once
    #[arg(long, value_name = "N")]
    pub(crate) slots: Option<String>,
    /// Mode of runs that ask for none
    #[arg(long)]
    pub(crate) mode: Option<Mode>,
    /// Return when it is ready and leave it running
    #[arg(long)]
    pub(crate) detach: bool,
    /// This is the process that `--detach` started
    #[arg(long, hide = true, conflicts_with = "detach")]
    pub(crate) detached: bool,
}

/// What of the host's files a command sees, beside what its policy says.
#[derive(Debug, Default, Args)]
pub(crate) struct Files {
    /// Write nothing of the host's; what looks writable is an overlay
    #[arg(long = "static")]
    pub(crate) is_static: bool,
    /// Path of the host to read, repeatable
    #[arg(long, value_name = "PATH")]
    pub(crate) ro: Vec<PathBuf>,
    /// Path of the host to read and write, repeatable
    #[arg(long, value_name = "PATH", conflicts_with = "is_static")]
    pub(crate) rw: Vec<PathBuf>,
    /// Directory of the host to change for the session alone, repeatable
    #[arg(long, value_name = "PATH")]
    pub(crate) overlay: Vec<PathBuf>,
    /// Path that must not be reached, repeatable
    #[arg(long, value_name = "PATH")]
    pub(crate) deny: Vec<PathBuf>,
    /// Name of the image in mode container, such as python
    #[arg(long, value_name = "NAME")]
    pub(crate) image_profile: Option<String>,
}

/// Limits and surroundings, for runs and sessions.
#[derive(Debug, Args)]
pub(crate) struct Policy {
    /// logical, bwrap, nsjail or container
    #[arg(long)]
    pub(crate) mode: Option<Mode>,
    /// none, proxy or host
    #[arg(long)]
    pub(crate) network: Option<NetworkMode>,
    /// Wall time, such as 500ms, 2s, 10m
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
    /// Memory of all processes together
    #[arg(long, value_name = "N", value_parser = mebibytes, allow_negative_numbers = true)]
    pub(crate) memory_mb: Option<i64>,
    /// Cores, such as 0.5
    #[arg(long, value_name = "N", value_parser = cpu_millis, allow_negative_numbers = true)]
    pub(crate) cpus: Option<i64>,
    /// Processes and threads together
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) pids: Option<i64>,
    /// What the command may do, as a file: .json, .yaml or .toml
    #[arg(long = "policy", value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) files: Files,
    /// Label, repeatable
    #[arg(long = "label", value_name = "K=V", value_parser = pair)]
    pub(crate) labels: Vec<(String, String)>,
    /// The same key never makes a second one
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Exits with the command's own code, 128+n if signal n ended it; 124 timed out, 125 refused or our
failure, 130 canceled, 137 killed or out of memory.

Examples:
  codelia run -- sh -c 'echo out; echo err >&2; exit 7'
  codelia run -t -- bash
  tar c . | codelia run -s work -- tar x
  codelia run --timeout 10m --memory-mb 256 --env CI=1 -- make test
  codelia run -d -s work -- ./server         prints the run's id; see `codelia attach`
  codelia run --static --overlay /usr/local -- pip install .
  codelia run --json -- true | tail -n 1     the run's record")]
pub(crate) struct Run {
    /// Session to run in; without it one is made for this run
    #[arg(short, long)]
    pub(crate) session: Option<String>,
    #[command(flatten)]
    pub(crate) policy: Policy,
    /// Environment variable, repeatable
    #[arg(long = "env", value_name = "K=V", value_parser = pair)]
    pub(crate) env: Vec<(String, String)>,
    /// Working directory, relative to the session's root
    #[arg(long, value_name = "DIR", default_value = "")]
    pub(crate) workdir: String,
    /// Pass stdin on even if it is a terminal
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Start it, print its id and return
    #[arg(short, long, conflicts_with = "tty")]
    pub(crate) detach: bool,
    /// How often it may be started again when its worker dies
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) retries: i32,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Exits like `codelia run`. Ctrl-C ends the watching, not the run.

Example:
  codelia attach $(codelia run -d -- make test)")]
pub(crate) struct Attach {
    /// The run's id or name
    pub(crate) run: String,
    /// Pass stdin on
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// The run has a terminal: use this one for it
    #[arg(short, long)]
    pub(crate) tty: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  codelia ps\n  codelia ps --all --session work --limit 10")]
pub(crate) struct Ps {
    /// Ended runs too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Only this session's
    #[arg(short, long)]
    pub(crate) session: Option<String>,
    /// At most this many, newest first
    #[arg(long, default_value_t = 50)]
    pub(crate) limit: usize,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  codelia kill 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f")]
pub(crate) struct Kill {
    /// Ids or names of runs
    #[arg(required = true)]
    pub(crate) runs: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Session {
    /// Create a session
    #[command(after_help = "Example:\n  codelia session create --alias work --ttl 2h --idle-ttl 10m")]
    Create(Box<CreateSession>),
    /// List sessions
    List {
        /// Ended sessions too
        #[arg(short, long)]
        all: bool,
        /// At most this many, newest first
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
    /// Show one session
    Show {
        /// Id or alias
        session: String,
    },
    /// Move a session's end
    #[command(after_help = "Example:\n  codelia session extend work --ttl 2h")]
    Extend {
        /// Id or alias
        session: String,
        /// Time to live from now
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        ttl: Duration,
    },
    /// Cancel a session's runs and remove its directory
    Close {
        /// Ids or aliases
        #[arg(required = true)]
        sessions: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct CreateSession {
    /// Name for it: [a-z0-9-]{1,63}
    #[arg(long)]
    pub(crate) alias: Option<String>,
    /// Time to live
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) ttl: Option<Duration>,
    /// It also ends when no run or file call was active for this long
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) idle_ttl: Option<Duration>,
    /// Start again empty when its files are gone or with a worker that is, instead of refusing runs
    #[arg(long)]
    pub(crate) allow_data_loss: bool,
    #[command(flatten)]
    pub(crate) policy: Policy,
}

#[derive(Debug, Args)]
#[command(after_help = "\
A file appears under its name when all of it has come. A name here that has a colon is written ./a:b.

Examples:
  codelia cp notes.txt work:             into the workspace of the session `work`
  codelia cp notes.txt work:docs/new.txt under another name
  codelia cp work:out/report.pdf .       out of it
  tar c src | codelia cp - work:src.tar  from stdin
  codelia cp work:out.log - | less       to stdout")]
pub(crate) struct Cp {
    /// SESSION:PATH, a file here, or - for stdin
    pub(crate) source: End,
    /// SESSION:PATH, a file or directory here, or - for stdout
    pub(crate) destination: End,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  codelia ls work\n  codelia ls work:src/bin\n  codelia ls --json work | jq '.[].path'"
)]
pub(crate) struct Ls {
    /// SESSION or SESSION:PATH
    #[arg(value_name = "SESSION[:PATH]")]
    pub(crate) place: String,
    /// At most this many, in the order of names
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    pub(crate) limit: usize,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Check a policy and print it in order
    #[command(after_help = "Example:\n  codelia policy check strict.yaml --mode bwrap")]
    Check {
        /// The policy: .json, .yaml or .toml
        file: PathBuf,
        /// The mode it should hold in
        #[arg(long)]
        mode: Option<Mode>,
    },
    /// Tell what holds for a run, and who decided it
    #[command(after_help = "Example:\n  codelia policy explain --session work --policy strict.yaml")]
    Explain {
        /// Session of the run; without it, a new one
        #[arg(short, long)]
        session: Option<String>,
        /// Policy of the run, or of the new session
        #[arg(long, value_name = "FILE")]
        policy: Option<PathBuf>,
        /// Mode of the run
        #[arg(long)]
        mode: Option<Mode>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Tenants {
    /// List tenants
    List,
    /// Create a tenant
    #[command(after_help = "Example:\n  codelia tenants create team-7 --sessions 100")]
    Create {
        /// Its id: [a-z0-9-]{1,63}
        tenant: String,
        #[command(flatten)]
        quotas: Quotas,
    },
    /// Show a tenant with its quotas and what it uses
    Show {
        /// Its id; your own without it
        #[arg(default_value = "-")]
        tenant: String,
    },
    /// Change a tenant's quotas
    #[command(after_help = "Example:\n  codelia tenants quota team-7 --concurrent-runs 50")]
    Quota {
        /// Its id
        tenant: String,
        #[command(flatten)]
        quotas: Quotas,
    },
    /// Decide how little isolation a tenant's sessions and runs may have
    #[command(
        after_help = "LEVEL_0 allows mode logical, which isolates nothing. The reason is kept with the \
                            decision.\n\nExample:\n  codelia tenants floor team-7 LEVEL_0 --reason 'trusted build tools'"
    )]
    Floor {
        /// Its id
        tenant: String,
        /// LEVEL_0, LEVEL_1 or LEVEL_2
        level: IsolationLevel,
        /// Why
        #[arg(long)]
        reason: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Quotas {
    /// Open sessions
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) sessions: Option<i64>,
    /// Runs that have not ended
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) concurrent_runs: Option<i64>,
    /// Runs that wait for a slot
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) queued_runs: Option<i64>,
    /// Requests each second, for each api process
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) requests_per_second: Option<i64>,
    /// Bytes of run output kept
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) output_bytes: Option<i64>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Keys {
    /// List a tenant's keys
    List {
        /// The tenant; your own without it
        #[arg(long, default_value = "-")]
        tenant: String,
    },
    /// Create a key; its secret is shown this once
    #[command(
        after_help = "Example:\n  codelia keys create --tenant team-7 --name ci --scope run --scope files"
    )]
    Create {
        /// The tenant; your own without it
        #[arg(long, default_value = "-")]
        tenant: String,
        /// Name for people
        #[arg(long, default_value = "")]
        name: String,
        /// What it may do, repeatable
        #[arg(long = "scope", value_enum, required = true)]
        scopes: Vec<Scope>,
    },
    /// Revoke a key at once
    Revoke {
        /// The tenant; your own without it
        #[arg(long, default_value = "-")]
        tenant: String,
        /// The key's id or name
        key: String,
    },
}

/// What a key may do.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Scope {
    /// Sessions and runs
    Run,
    /// Files
    Files,
    /// Decide approvals
    Approve,
    /// Read the audit
    Audit,
    /// Administer the key's own tenant
    Admin,
    /// Administer the installation
    Operator,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Workers {
    /// List workers
    List,
    /// Let a worker finish what it has and take nothing new
    Drain {
        /// Its id
        worker: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Show every key, its effective value and where it came from
    Show,
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error} (such as 500ms, 2s, 10m)"))
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected K=V")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn mebibytes(text: &str) -> Result<i64, String> {
    let count: i64 = text.parse().map_err(|_| "not a whole number")?;
    count.checked_mul(1024 * 1024).ok_or_else(|| "too large".to_owned())
}

fn cpu_millis(text: &str) -> Result<i64, String> {
    let cores: f64 = text.parse().map_err(|_| "not a number")?;
    if cores.abs() > 1e6 || cores.is_nan() {
        return Err("not a number of cores".to_owned());
    }
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    Ok((cores * 1000.0).round() as i64)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn run(line: &str) -> Run {
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        match cli.command {
            Command::Run(run) => *run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn durations_read_like_people_write_them() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("10m"), Ok(Duration::from_secs(600)));
        assert!(duration("soon").is_err());
        assert!(duration("-2s").is_err());
    }

    #[test]
    fn everything_after_the_command_is_the_commands() {
        let run = run("codelia run -s work --cpus 0.5 --memory-mb 2 --env A=b=c -- sh -c --json -t");
        assert_eq!(run.command, ["sh", "-c", "--json", "-t"]);
        assert_eq!((run.session.as_deref(), run.tty), (Some("work"), false));
        assert_eq!((run.policy.cpus, run.policy.memory_mb), (Some(500), Some(2 * 1024 * 1024)));
        assert_eq!(run.env, [("A".to_owned(), "b=c".to_owned())]);
    }
}
