//! Asks the user's systemd for a delegated cgroup, in which an ordinary user can enforce limits.

use std::{
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::process::geteuid;

use crate::{backends, config::Config};

const PROGRAM: &str = "systemd-run";
/// How long systemd may take to create a scope.
const TIMEOUT: Duration = Duration::from_secs(5);

/// If no cgroup of this process can enforce limits, executes the same command again in a new scope
/// of the user's systemd. Returns if that is not needed or not possible.
pub(crate) async fn enter(config: &Config) -> Result<()> {
    if geteuid().is_root() || is_in_own_scope() || backends::can_enforce_limits(config) {
        return Ok(());
    }
    if !offers_scopes().await {
        return Ok(());
    }
    let error =
        in_scope(&unit()).arg(std::env::current_exe()?).args(std::env::args_os().skip(1)).exec();
    Err(error).with_context(|| format!("cannot execute {PROGRAM}"))
}

/// Whether systemd creates a delegated scope for this user.
async fn offers_scopes() -> bool {
    let mut trial = tokio::process::Command::from(in_scope(&format!("{}-trial", unit())));
    trial
        .arg("true")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let done = tokio::time::timeout(TIMEOUT, trial.status()).await;
    matches!(done, Ok(Ok(status)) if status.success())
}

/// `systemd-run`, without the command to execute. It keeps its process id when it executes the
/// command.
fn in_scope(unit: &str) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args([
        "--user",
        "--scope",
        "--quiet",
        "--collect",
        "--property",
        "Delegate=yes",
        "--unit",
        unit,
        "--",
    ]);
    command
}

/// The scope is named after this process, so that it knows whether it is in it already.
fn unit() -> String {
    format!("codelia-{}", std::process::id())
}

fn is_in_own_scope() -> bool {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    own.contains(&format!("/{}.scope", unit()))
}
