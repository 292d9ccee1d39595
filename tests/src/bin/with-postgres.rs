//! Runs a command with a private Postgres: `with-postgres COMMAND ARGS…`. The tests find the server
//! by `CODELIA_TEST_POSTGRES`. Fails if the command leaves control groups behind, other than those
//! of killed workers, which the next worker would remove and this program removes.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use codelia_store::LocalPostgres;
use codelia_sys::{cgroup::Hierarchy, process_id::ProcessId};
use codelia_tests::{POSTGRES_URL, Scratch, abandoned_cgroups, run_wrapped};
use sqlx::ConnectOptions;

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let program = arguments.next().context("usage: with-postgres COMMAND ARGS…")?;
    let scratch = Scratch::in_memory()?;
    let server = LocalPostgres::start_throwaway(&scratch.join("postgres")).await?;
    let url = server.database("postgres").await?.to_url_lossy();

    let mut command = Command::new(program);
    command.args(arguments).env(POSTGRES_URL, url.as_str());
    let status = run_wrapped(command).await;
    server.stop().await?;
    let status = status?;
    Hierarchy::detect(&Default::default())?.remove_orphans()?;
    let left = abandoned_cgroups(ProcessId::current()?);
    if !left.is_empty() {
        bail!("control groups left behind: {left:#?}");
    }
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}
