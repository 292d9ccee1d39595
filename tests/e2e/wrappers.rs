//! Programs that start servers for a test run stop them again.

use std::{fs, os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};
use codelia_tests::{LeakGuard, Process, Scratch};
use rustix::process::{Pid, Signal, kill_process_group};

#[tokio::test]
async fn with_postgres_stops_server_on_sigterm() -> Result<()> {
    let scratch = Scratch::new()?;
    let (temporary, guard) = (scratch.join("tmp"), LeakGuard::of(scratch.path()));
    fs::create_dir(&temporary)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_with-postgres"));
    command
        .args(["sh", "-c", "echo ready; exec sleep 1000"])
        .env("TMPDIR", &temporary)
        .process_group(0);
    let mut wrapper = Process::start("with-postgres", command, scratch.path())?;
    wrapper.ready().await?;
    assert!(guard.processes().len() > 2, "the control: the server runs");
    let group = Pid::from_raw(wrapper.pid().cast_signed()).context("no process id")?;
    kill_process_group(group, Signal::TERM)?;
    wrapper.exited().await?;
    guard.expect_no_processes().await;
    assert_eq!(fs::read_dir(&temporary)?.count(), 0, "its directory is removed");
    Ok(())
}
