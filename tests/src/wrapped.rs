//! Runs the command of a program that cleans up after it, such as `with-postgres`.

use std::{
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};

/// How long the command may take to exit after a signal. Longer than a test runner gives its tests.
const GRACE: Duration = Duration::from_secs(15);

/// Runs `command` until it exits. SIGINT and SIGTERM do not end this process, so that it can clean
/// up. They end the command: a signal to the process group reaches it too, else it gets SIGTERM.
pub async fn run_wrapped(command: Command) -> Result<ExitStatus> {
    let name = command.get_program().to_owned();
    let (mut interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut child =
        tokio::process::Command::from(command).spawn().with_context(|| format!("run {name:?}"))?;
    tokio::select! {
        status = child.wait() => return Ok(status?),
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    if let Ok(status) = timeout(GRACE, child.wait()).await {
        return Ok(status?);
    }
    if let Some(pid) = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        kill_process(pid, Signal::TERM)?;
    }
    Ok(child.wait().await?)
}
