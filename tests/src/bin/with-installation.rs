//! Runs a command next to an installation that tests share: `with-installation COMMAND ARGS…`. The
//! tests find it by `CODELIA_TEST_INSTALLATION` and create tenants of their own.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use codelia_tests::{Cluster, ClusterOptions, SHARED_INSTALLATION, run_wrapped};

/// More than the tests that run concurrently use.
const SLOTS: usize = 16;

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let program = arguments.next().context("usage: with-installation COMMAND ARGS…")?;
    let cluster =
        Cluster::start_with(ClusterOptions { slots: SLOTS, ..ClusterOptions::default() }).await?;
    let mut command = Command::new(program);
    command.args(arguments).env(SHARED_INSTALLATION, cluster.share());
    let status = run_wrapped(command).await?;
    cluster.end().await?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}
