//! Command-line arguments, as clap parses them. One file per noun. The program adds its own
//! commands to [`Command`].

mod admin;
mod approvals;
mod audit;
mod context;
mod files;
mod flags;
pub mod help;
mod policy;
mod profiles;
mod run;
mod sandbox;
mod session;
mod supervisor;
mod tools;
mod values;
mod volume;

use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, error::ContextKind};

pub use self::{
    admin::{Keys, MaxLimits, Quotas, RetentionTimes, Scope, Tenants, Workers},
    approvals::{ApprovalScope, Approvals, ApprovalsCommand, ListApprovals},
    audit::{Audit, AuditCommand},
    context::Context,
    files::{Cat, CopyPath, Cp, Export, Import, Ls, Mkdir, Mv, Rm, SessionPath, Watch},
    flags::{Flags, SetFlag},
    policy::{Policy, ScopeArgs},
    profiles::Profiles,
    run::{Attach, EnvArgs, Exec, Kill, Logs, Ps, Run, RunName, RunOptions, TerminalArgs},
    sandbox::{FilesystemArgs, LoggedCalls, NetworkArgs, SandboxArgs},
    session::{CreateSession, Session, SessionChange, UpdateSession},
    supervisor::Supervisor,
    tools::{ToolName, Tools},
    volume::Volumes,
};
use crate::exit_status::FAILURE;

/// Prints why the arguments were refused, or the help, and exits. `run`, `exec` and `attach` exit
/// with their own code, which cannot be mistaken for the command's.
fn exit(command: &clap::Command, mut error: clap::Error) -> ! {
    // Clap suggests to pass a mistyped option as the command.
    error.remove(ContextKind::Suggested);
    let words = command.clone().ignore_errors(true).try_get_matches();
    let command = words.as_ref().ok().and_then(clap::ArgMatches::subcommand_name);
    let exits_like_command = matches!(command, Some("run" | "exec" | "attach"));
    // Nothing can be done if printing fails.
    let _ = error.print();
    std::process::exit(if error.exit_code() != 0 && exits_like_command {
        FAILURE.into()
    } else {
        error.exit_code()
    })
}

/// Run commands in sandboxes, for many tenants
#[derive(Debug, Parser)]
#[command(
    name = "codelia",
    version,
    about,
    max_term_width = 100,
    after_help = "\
Examples:
  codelia up --detach                  start everything on this machine
  codelia run -- echo hello            run a command in a new sandbox
  codelia session create --alias work  create a session …
  codelia run -s work -- make test     … and run a command in it
  codelia cp work:out.log .            copy a file out of it
  codelia down                         stop what `up` started"
)]
pub struct Program<C: Subcommand> {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: C,
}

impl<C: Subcommand> Program<C> {
    /// Parses the arguments of this process. Prints help and errors, and exits.
    #[must_use]
    pub fn from_process() -> Self {
        let matches = help::with_groups(Self::command()).try_get_matches();
        matches
            .and_then(|mut matches| Self::from_arg_matches_mut(&mut matches))
            .unwrap_or_else(|error| exit(&Self::command(), error))
    }
}

#[derive(Debug, Args)]
pub struct Global {
    /// Print results as JSON, as the API writes it: one object or array on stdout
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
    /// Read the configuration from this TOML file [env: CODELIA_CONFIG]
    #[arg(long, global = true, help_heading = "Global options", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Use this data directory of `codelia up` [env: CODELIA_DATA_DIR]
    #[arg(long, global = true, help_heading = "Global options", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Call the API at this URL, with the key in CODELIA_API_KEY [env: CODELIA_ENDPOINT]
    #[arg(long, global = true, help_heading = "Global options", value_name = "URL")]
    pub endpoint: Option<String>,
    /// Call the API of this context; see `codelia context` [env: CODELIA_CONTEXT]
    #[arg(
        long,
        global = true,
        help_heading = "Global options",
        value_name = "NAME",
        conflicts_with = "endpoint"
    )]
    pub context: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command
    Run(Box<Run>),
    /// Run a command in a session
    Exec(Box<Exec>),
    /// Attach to a run: replay its output, then follow it
    Attach(Attach),
    /// Print the output of a run
    Logs(Logs),
    /// List what a transactional run changed in its workspace
    #[command(after_help = "\
Lists what a run with --transactional, --preview or --hold added, changed and removed, with the
sizes of files.

Examples:
  codelia diff 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f
  codelia diff --json 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f")]
    Diff(RunName),
    /// Apply the changes of a run that was started with --hold
    #[command(after_help = "\
While changes wait, other runs and changes of files in the session are refused. Applying them
again is fine.

Examples:
  codelia run -s work --hold -- make
  codelia diff 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f
  codelia apply 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f")]
    Apply(RunName),
    /// Drop the changes of a run that was started with --hold
    #[command(after_help = "\
Dropping changes again is fine.

Examples:
  codelia discard 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f")]
    Discard(RunName),
    /// Show what a run did that tried to leave its sandbox
    #[command(after_help = "\
Prints the signs of the attempt, the blocked calls, the processes at the first sign, the names
of the variables, the connections and the end of the output. Needs the scopes `run` and `audit`.

Examples:
  codelia trace 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f
  codelia trace --json 0198f0c2-7f1e-7cc3-98c4-dc0c0c07398f")]
    Trace(RunName),
    /// List runs
    Ps(Ps),
    /// Cancel runs
    Kill(Kill),
    /// List, watch and decide what runs need a person's approval for
    Approvals(Approvals),
    /// Let local programs decide about approvals, through a Unix socket
    Supervisor(Supervisor),
    /// Show who did what and what was decided, and check that nothing of it was changed
    Audit(Audit),
    /// Manage sessions: workspaces that runs share
    #[command(subcommand)]
    Session(Session),
    /// Copy files to or from a session
    Cp(Cp),
    /// Print files of a session
    Cat(Cat),
    /// List the files of a session
    Ls(Ls),
    /// Remove files of a session
    Rm(Rm),
    /// Create directories in a session
    Mkdir(Mkdir),
    /// Move or rename a file of a session
    Mv(Mv),
    /// Pack a directory of a session as a tar archive
    Export(Export),
    /// Unpack a tar archive in a session
    Import(Import),
    /// Print changes of a directory of a session as they happen
    Watch(Watch),
    /// Validate, explain, store and try policies
    #[command(subcommand)]
    Policy(Policy),
    /// Manage tenants: quotas, isolation floors, suspension
    #[command(subcommand)]
    Tenants(Tenants),
    /// Manage API keys
    #[command(subcommand)]
    Keys(Keys),
    /// List, drain and undrain workers
    #[command(subcommand)]
    Workers(Workers),
    /// Choose the mode of new sessions at run time, and roll back
    #[command(subcommand)]
    Flags(Flags),
    /// Manage tools: which commands belong to one, its policy, approval and quarantine
    #[command(subcommand)]
    Tools(Tools),
    /// Manage volumes: caches that sessions share
    #[command(subcommand, visible_alias = "volumes")]
    Volume(Volumes),
    /// List projects: names with a policy that sessions can be created under
    #[command(after_help = "\
A project comes into being with its policy (`codelia policy import --scope project --name NAME`).

Examples:
  codelia projects
  codelia run --project web -- make test")]
    Projects {
        /// List at most this many projects
        #[arg(short = 'n', long, value_name = "N", default_value_t = 1000)]
        limit: usize,
    },
    /// List and show profiles: layouts, limits and variables for a kind of work, such as cargo
    #[command(subcommand)]
    Profiles(Profiles),
    /// Show the server's version, modes, limits and features
    Info,
    /// Show your key and tenant with its quotas and usage
    Whoami,
    /// Choose the server that commands call
    #[command(subcommand)]
    Context(Context),
}

impl Command {
    /// Whether the command exits with the code of the run's command.
    #[must_use]
    pub fn exits_like_run(&self) -> bool {
        matches!(self, Self::Run(_) | Self::Exec(_) | Self::Attach(_))
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{Ceilings, Limits};

    use super::*;

    type Cli = Program<Command>;

    fn run(line: &str) -> Run {
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        match cli.command {
            Command::Run(run) => *run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn clap_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_after_the_command_belong_to_it() {
        let run =
            run("codelia run -s work --cpus 0.5 --memory 2m -w src --env A=b=c -- sh -c --json -t");
        assert_eq!(run.command, ["sh", "-c", "--json", "-t"]);
        let session = run.session.as_deref();
        let options = run.options;
        assert_eq!((session, options.tty, options.workdir.as_str()), (Some("work"), false, "src"));
        let sandbox = options.sandbox;
        assert_eq!(
            (sandbox.cpu_millicores, sandbox.memory_bytes),
            (Some(500), Some(2 * 1024 * 1024))
        );
        assert_eq!(options.env.env, ["A=b=c"]);
    }

    #[test]
    fn exec_takes_the_session_first() {
        let exec = |line: &str| match Cli::try_parse_from(line.split_whitespace()).unwrap().command
        {
            Command::Exec(exec) => Run::from(*exec),
            other => panic!("{other:?}"),
        };
        for line in ["codelia exec -it work ls -l", "codelia exec -i work -t -- ls -l"] {
            let run = exec(line);
            assert_eq!((run.session.as_deref(), run.options.tty), (Some("work"), true), "{line}");
            assert_eq!(run.command, ["ls", "-l"], "{line}");
        }
        assert!(Cli::try_parse_from(["codelia", "exec", "work"]).is_err());
    }

    #[test]
    fn unknown_flag_is_not_taken_as_command() {
        let parse = |line: &str| Cli::try_parse_from(line.split_whitespace());
        assert!(parse("codelia run --timout 5s -- true").is_err());
        assert_eq!(run("codelia run echo -n --json").command, ["echo", "-n", "--json"]);
        assert_eq!(run("codelia run -- --odd-name").command, ["--odd-name"]);
    }

    #[test]
    fn help_states_default_and_maximum_limits() {
        let run = Cli::command().find_subcommand("run").unwrap().clone();
        let help = |flag: &str| {
            let argument =
                run.get_arguments().find(|argument| argument.get_long() == Some(flag)).unwrap();
            argument.get_help().unwrap().to_string()
        };
        let defaults = Limits::default();
        let maxima = Ceilings::default().0;
        let duration = |duration| humantime::format_duration(duration).to_string();
        let mebibytes = |bytes: u64| format!("{}m", bytes / 1024 / 1024);
        let gibibytes = |bytes: u64| format!("{}g", bytes / 1024 / 1024 / 1024);
        let cores = |millis: u64| (millis / 1000).to_string();
        for (flag, default, max) in [
            ("timeout", duration(defaults.timeout), duration(maxima.timeout)),
            ("memory", mebibytes(defaults.memory_bytes), mebibytes(maxima.memory_bytes)),
            ("cpus", cores(defaults.cpu_millicores), cores(maxima.cpu_millicores)),
            ("pids", defaults.pids.to_string(), maxima.pids.to_string()),
            ("disk", gibibytes(defaults.disk_bytes), gibibytes(maxima.disk_bytes)),
            ("inodes", defaults.inodes.to_string(), maxima.inodes.to_string()),
        ] {
            let stated = format!("[default: {default}, max: {max}]");
            assert!(help(flag).ends_with(&stated), "--{flag}: {} lacks {stated}", help(flag));
        }
    }
}
