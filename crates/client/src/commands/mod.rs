//! The commands, one module each.

mod admin;
mod approvals;
mod audit;
mod context;
mod diff;
mod drain;
mod files;
mod flags;
mod info;
mod logs;
mod policy;
mod policy_scopes;
mod profiles;
mod run;
mod runs;
mod session;
#[cfg(not(unix))]
#[path = "no_supervisor.rs"]
mod supervisor;
#[cfg(unix)]
mod supervisor;
mod tools;
mod trace;
mod volume;

use std::process::ExitCode;

use anyhow::Result;

use crate::{
    args::{self, Command},
    client::Client,
    output::Output,
    settings::Settings,
};

/// Executes a command.
///
/// # Errors
/// The server or the command's own files cannot be used, or the server refuses.
pub async fn execute(settings: &Settings, command: Command, output: Output) -> Result<ExitCode> {
    match command {
        Command::Context(command) => context::context(settings, command, output)?,
        Command::Policy(args::Policy::Sets) => policy::sets(output)?,
        command => {
            let client = Client::connect(settings).await?;
            let result = call(&client, settings, command, output).await;
            return client.explained(result).await;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Executes a command that calls the API.
async fn call(
    client: &Client,
    settings: &Settings,
    command: Command,
    output: Output,
) -> Result<ExitCode> {
    match command {
        Command::Run(args) => return run::run(client, settings, &args, output).await,
        Command::Exec(args) => return run::run(client, settings, &(*args).into(), output).await,
        Command::Attach(args) => return run::attach(client, settings, &args, output).await,
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
        Command::Supervisor(args) => supervisor::supervisor(client, &args).await?,
        Command::Audit(args) => audit::audit(client, args, output).await?,
        Command::Session(command) => return session::session(client, command, output).await,
        Command::Policy(command) => policy::policy(client, command, output).await?,
        Command::Tenants(command) => admin::tenants(client, command, output).await?,
        Command::Keys(command) => admin::keys(client, command, output).await?,
        Command::Workers(command) => admin::workers(client, command, output).await?,
        Command::Flags(command) => flags::flags(client, command, output).await?,
        Command::Tools(command) => tools::tools(client, command, output).await?,
        Command::Volume(command) => volume::volume(client, command, output).await?,
        Command::Projects { limit } => policy_scopes::projects(client, limit, output).await?,
        Command::Profiles(command) => profiles::profiles(client, command, output).await?,
        Command::Info => info::info(client, output).await?,
        Command::Whoami => info::whoami(client, output).await?,
        // Executed without a server.
        Command::Context(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}
