//! The `codelia` binary: parses the command line, loads the configuration, dispatches commands.

#![forbid(unsafe_code)]
// `output` makes text safe for a terminal.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod backends;
mod client;
mod commands;
mod complete;
mod config;
mod contexts;
mod delegation;
mod detach_keys;
mod each;
mod environment;
mod error_report;
mod exec_stream;
mod exit_status;
mod options;
mod output;
mod record;
mod resolve;
mod safe_text;
mod signals;
mod spinner;
mod streams;
mod style;
mod table;
mod terminal;
mod units;

use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory;

use self::{
    args::{Cli, Command},
    client::Client,
    commands::{
        admin, approvals, audit, bootstrap, certs, context, diff, doctor, egress, files, info, logs, policy,
        run, runs, serve, session, trace, up,
    },
    config::Flag,
    output::{Output, StdoutClosed},
};

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: codelia_sys::allocation::CountingAllocator = codelia_sys::allocation::CountingAllocator;

/// Exit code that a shell reports for a program killed by SIGPIPE.
const BROKEN_PIPE: u8 = 141;

fn main() -> ExitCode {
    let cli = Cli::from_process();
    let output = if cli.global.json { Output::Json } else { Output::Text };
    let exits_like_command = matches!(cli.command, Command::Run(_) | Command::Exec(_) | Command::Attach(_));
    match execute(cli, output) {
        Ok(code) => code,
        Err(error) if error.is::<StdoutClosed>() => ExitCode::from(BROKEN_PIPE),
        Err(error) => {
            error_report::print(&error, output);
            if exits_like_command { ExitCode::from(exit_status::FAILURE) } else { ExitCode::FAILURE }
        }
    }
}

fn execute(cli: Cli, output: Output) -> Result<ExitCode> {
    // It restricts itself before it has a second thread.
    if let Command::Egress(args) = &cli.command {
        return egress::egress(args).map(|()| ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(dispatch(cli, output));
    // A blocking read of stdin cannot be interrupted: do not wait for it.
    runtime.shutdown_background();
    result
}

async fn dispatch(cli: Cli, output: Output) -> Result<ExitCode> {
    match &cli.command {
        Command::Completions { shell } => {
            return complete::print_script(*shell).map(|()| ExitCode::SUCCESS);
        }
        Command::Man { dir } => {
            return commands::man::man(args::Cli::command(), dir).map(|()| ExitCode::SUCCESS);
        }
        Command::Complete { words } => {
            return complete::print_candidates(words).await.map(|()| ExitCode::SUCCESS);
        }
        _ => {}
    }
    let loaded = config::load(cli.global.config.as_deref(), &flags(&cli))?;
    let config = &loaded.config;
    if !logs_warnings(&cli.command) {
        loaded.print_warnings();
    }
    match cli.command {
        Command::Up(args) => up::up(&loaded, &args, output).await?,
        Command::Down => up::down(&loaded, output).await?,
        Command::Api => serve::api(&loaded, output).await?,
        Command::Worker => serve::worker(&loaded, output).await?,
        Command::Migrate => serve::migrate(config, output).await?,
        Command::Admin(args::Admin::Bootstrap(args)) => bootstrap::bootstrap(config, args, output).await?,
        Command::Certs(command) => certs::certs(config, &command, output)?,
        Command::Doctor => return doctor::doctor(config, output).await,
        Command::Config(args::Config::Show) => config::show(&loaded, output)?,
        Command::Context(command) => context::context(&loaded, command, output)?,
        Command::Policy(args::Policy::Sets) => policy::sets(output)?,
        command => return dispatch_client(&loaded, command, output).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether the command is a service, which writes configuration warnings to its log.
fn logs_warnings(command: &Command) -> bool {
    match command {
        Command::Up(up) => !up.detach,
        Command::Api | Command::Worker => true,
        _ => false,
    }
}

/// Runs a command that calls the API.
async fn dispatch_client(loaded: &config::Loaded, command: Command, output: Output) -> Result<ExitCode> {
    let client = Client::connect(loaded).await?;
    let result = call(&client, &loaded.config, command, output).await;
    client.explained(result).await
}

async fn call(
    client: &Client,
    config: &config::Config,
    command: Command,
    output: Output,
) -> Result<ExitCode> {
    match command {
        Command::Run(args) => return run::run(client, config, &args, output).await,
        Command::Exec(args) => return run::run(client, config, &(*args).into(), output).await,
        Command::Attach(args) => return run::attach(client, config, &args, output).await,
        Command::Logs(args) => logs::logs(client, &args, output).await?,
        Command::Diff(args) => diff::diff(client, &args, output).await?,
        Command::Apply(args) => diff::apply(client, &args, output).await?,
        Command::Discard(args) => diff::discard(client, &args, output).await?,
        Command::Trace(args) => trace::trace(client, &args, output).await?,
        Command::Ps(args) => runs::ps(client, &args, output).await?,
        Command::Kill(args) => return runs::kill(client, &args, output).await,
        Command::Cp(args) => return files::cp(client, &args, output).await,
        Command::Cat(args) => return files::cat(client, &args, output).await,
        Command::Ls(args) => files::ls(client, &args, output).await?,
        Command::Rm(args) => return files::rm(client, &args, output).await,
        Command::Mkdir(args) => return files::mkdir(client, &args, output).await,
        Command::Mv(args) => files::mv(client, &args, output).await?,
        Command::Export(args) => return files::export(client, &args, output).await,
        Command::Import(args) => files::import(client, &args, output).await?,
        Command::Watch(args) => files::watch(client, &args, output).await?,
        Command::Approvals(args) => approvals::approvals(client, args, output).await?,
        Command::Supervisor(args) => commands::supervisor::supervisor(client, &args).await?,
        Command::Audit(args) => audit::audit(client, args, output).await?,
        Command::Session(command) => return session::session(client, command, output).await,
        Command::Policy(command) => policy::policy(client, command, output).await?,
        Command::Tenants(command) => admin::tenants(client, command, output).await?,
        Command::Keys(command) => admin::keys(client, command, output).await?,
        Command::Workers(command) => admin::workers(client, command, output).await?,
        Command::Flags(command) => commands::flags::flags(client, command, output).await?,
        Command::Tools(command) => commands::tools::tools(client, command, output).await?,
        Command::Volume(command) => commands::volume::volume(client, command, output).await?,
        Command::Projects { limit } => commands::policy_scopes::projects(client, limit, output).await?,
        Command::Profiles(command) => commands::profiles::profiles(client, command, output).await?,
        Command::Info => info::info(client, output).await?,
        Command::Whoami => info::whoami(client, output).await?,
        other => anyhow::bail!("{other:?} is not a client command"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the command-line flags that set configuration keys.
fn flags(cli: &Cli) -> Vec<Flag> {
    let mut flags = Vec::new();
    if let Some(dir) = &cli.global.data_dir {
        flags.push(("data_dir", dir.display().to_string()));
    }
    let global = [("client.endpoint", &cli.global.endpoint), ("client.context", &cli.global.context)];
    flags.extend(global.into_iter().filter_map(|(path, value)| Some((path, value.clone()?))));
    if let Command::Up(up) = &cli.command {
        let values = [
            ("api.listen", up.listen.clone()),
            ("metrics.listen", up.metrics_listen.clone()),
            ("worker.slots", up.slots.clone()),
            ("sandbox.mode", up.mode.map(|mode| mode.to_string())),
        ];
        flags.extend(values.into_iter().filter_map(|(path, value)| value.map(|value| (path, value))));
    }
    flags
}
