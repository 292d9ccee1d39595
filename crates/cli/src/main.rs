//! The `codelia` binary: wiring and client commands.

#![forbid(unsafe_code)]

mod admin;
mod args;
mod client;
mod config;
mod doctor;
mod error_report;
mod exec_stream;
mod exit_status;
mod files;
mod modes;
mod options;
mod output;
mod policies;
mod record;
mod run;
mod runs;
mod serve;
mod sessions;
mod signals;
mod spinner;
mod streams;
mod terminal;
mod up;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser};

use self::{
    args::{Cli, Command},
    client::Client,
    config::{Flag, Loaded},
    output::{Output, StdoutClosed},
};

/// What a shell sees of a program that SIGPIPE ended.
const BROKEN_PIPE: u8 = 141;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = if cli.global.json { Output::Json } else { Output::People };
    let is_like_command = matches!(cli.command, Command::Run(_) | Command::Attach(_));
    match execute(cli, output) {
        Ok(code) => code,
        Err(error) if error.is::<StdoutClosed>() => ExitCode::from(BROKEN_PIPE),
        Err(error) => {
            error_report::tell(&error, output);
            if is_like_command { ExitCode::from(exit_status::OUR_FAILURE) } else { ExitCode::FAILURE }
        }
    }
}

fn execute(cli: Cli, output: Output) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(dispatch(cli, output));
    // A read of stdin cannot be interrupted: do not wait for it.
    runtime.shutdown_background();
    ended
}

async fn dispatch(cli: Cli, output: Output) -> Result<ExitCode> {
    if let Command::Completions { shell } = cli.command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "codelia", &mut script);
        output::line(String::from_utf8(script)?.trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    let loaded = config::load(cli.global.config.as_deref(), &flags(&cli))?;
    let config = &loaded.config;
    match cli.command {
        Command::Up(args) => up::up(&loaded, &args, output).await?,
        Command::Down => up::down(&config.data_dir, output).await?,
        Command::Api => serve::api(config, output).await?,
        Command::Worker => serve::worker(config, output).await?,
        Command::Migrate => serve::migrate(config, output).await?,
        Command::Doctor => return doctor::doctor(config, output).await,
        Command::Config(args::Config::Show) => config::show(&loaded, output)?,
        command => return ask(&loaded, command, output).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// The commands of a client.
async fn ask(loaded: &Loaded, command: Command, output: Output) -> Result<ExitCode> {
    let client = Client::connect(&loaded.config).await?;
    match command {
        Command::Run(args) => return run::run(&client, &args, output).await,
        Command::Attach(args) => return run::attach(&client, &args, output).await,
        Command::Ps(args) => runs::ps(&client, &args, output).await?,
        Command::Kill(args) => runs::kill(&client, &args, output).await?,
        Command::Cp(args) => files::cp(&client, &args, output).await?,
        Command::Ls(args) => files::ls(&client, &args, output).await?,
        Command::Session(command) => sessions::session(&client, command, output).await?,
        Command::Policy(command) => policies::policy(&client, command, output).await?,
        Command::Tenants(command) => admin::tenants(&client, command, output).await?,
        Command::Keys(command) => admin::keys(&client, command, output).await?,
        Command::Workers(command) => admin::workers(&client, command, output).await?,
        other => anyhow::bail!("{other:?} is no command of a client"),
    }
    Ok(ExitCode::SUCCESS)
}

/// What was given on the command line, as values of configuration keys.
fn flags(cli: &Cli) -> Vec<Flag> {
    let mut flags = Vec::new();
    if let Some(dir) = &cli.global.data_dir {
        flags.push(("data_dir", dir.display().to_string()));
    }
    if let Command::Up(up) = &cli.command {
        let given = [
            ("api.listen", up.listen.clone()),
            ("metrics.listen", up.metrics_listen.clone()),
            ("worker.slots", up.slots.clone()),
            ("sandbox.mode", up.mode.map(|mode| mode.to_string())),
        ];
        flags.extend(given.into_iter().filter_map(|(path, value)| value.map(|value| (path, value))));
    }
    flags
}
