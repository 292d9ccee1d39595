//! The `codelia` binary: parses the command line, loads the configuration, dispatches commands.

#![forbid(unsafe_code)]
// `output` makes text safe for a terminal.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod backends;
mod commands;
mod config;
mod delegation;
#[cfg(test)]
mod document_tests;
mod host;
mod options;

use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory;
use codelia_client::{
    Flag, complete, error_report, exit_status,
    output::{Output, StdoutClosed},
};

use self::{
    args::{Cli, Command},
    commands::{bootstrap, certs, doctor, egress, man, serve, up},
};

#[cfg(feature = "count-allocations")]
#[global_allocator]
static ALLOCATOR: codelia_sys::allocation::CountingAllocator =
    codelia_sys::allocation::CountingAllocator;

/// Exit code that a shell reports for a program killed by SIGPIPE.
const BROKEN_PIPE: u8 = 141;

fn main() -> ExitCode {
    let cli = Cli::from_process();
    let output = if cli.global.json { Output::Json } else { Output::Text };
    let exits_like_run =
        matches!(&cli.command, Command::Client(command) if command.exits_like_run());
    match execute(cli, output) {
        Ok(code) => code,
        Err(error) if error.is::<StdoutClosed>() => ExitCode::from(BROKEN_PIPE),
        Err(error) => {
            error_report::print(&error, output);
            if exits_like_run { ExitCode::from(exit_status::FAILURE) } else { ExitCode::FAILURE }
        }
    }
}

fn execute(cli: Cli, output: Output) -> Result<ExitCode> {
    // The proxy restricts itself before it has a second thread.
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
            return complete::print_script(*shell, Cli::command()).map(|()| ExitCode::SUCCESS);
        }
        Command::Man { dir } => {
            return man::man(Cli::command(), dir).map(|()| ExitCode::SUCCESS);
        }
        Command::Complete { words } => {
            let settings = |flags: &[Flag]| Ok(config::load(None, flags)?.client_settings());
            let printed = complete::print_candidates(words, Cli::command(), &settings).await;
            return printed.map(|()| ExitCode::SUCCESS);
        }
        _ => {}
    }
    let loaded = config::load(cli.global.config.as_deref(), &flags(&cli))?;
    let config = &loaded.config;
    match cli.command {
        Command::Up(args) => up::up(loaded, &args, output).await?,
        Command::Down => up::down(&loaded, output).await?,
        Command::Api => serve::api(&loaded, output).await?,
        Command::Worker => serve::worker(&loaded, output).await?,
        Command::Migrate => serve::migrate(config, output).await?,
        Command::Admin(args::Admin::Bootstrap(args)) => {
            bootstrap::bootstrap(config, args, output).await?
        }
        Command::Certs(command) => certs::certs(config, &command, output)?,
        Command::Doctor => return doctor::doctor(config, output).await,
        Command::Config(args::Config::Show) => config::show(&loaded, output)?,
        Command::Client(command) => {
            return codelia_client::execute(&loaded.client_settings(), command, output).await;
        }
        Command::Egress(_)
        | Command::Completions { .. }
        | Command::Man { .. }
        | Command::Complete { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the command-line flags that set configuration keys.
fn flags(cli: &Cli) -> Vec<Flag> {
    let global = &cli.global;
    let mut values = vec![
        ("data_dir", global.data_dir.as_ref().map(|dir| dir.display().to_string())),
        ("client.endpoint", global.endpoint.clone()),
        ("client.context", global.context.clone()),
    ];
    if let Command::Up(up) = &cli.command {
        values.extend([
            ("api.listen", up.listen.clone()),
            ("metrics.listen", up.metrics_listen.clone()),
            ("worker.slots", up.slots.clone()),
            ("sandbox.mode", up.mode.map(|mode| mode.to_string())),
        ]);
    }
    values.into_iter().filter_map(|(path, value)| Some((path, value?))).collect()
}
