//! `up --detach` and `down`: an `up` that nobody waits in front of.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::Stdio,
};

use anyhow::{Context, Result, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

use super::data_dir;
use crate::output::{self, Output};

const LOG_FILE: &str = "up.log";
/// How long `down` waits: longer than any grace that is usual.
const PATIENCE_SECONDS: i64 = 120;

/// Starts the same `up` in a session of its own and returns when it is ready.
pub(crate) async fn start(data_dir: &Path) -> Result<()> {
    data_dir::make(data_dir)?;
    let path = data_dir.join(LOG_FILE);
    let mut log = OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(&path)?;
    let from = log.seek(SeekFrom::End(0))?;
    let mut child = spawn(&log)?;
    if relay(&mut child).await? {
        return Ok(());
    }
    let status = child.wait().await?;
    log.seek(SeekFrom::Start(from))?;
    let mut said = String::new();
    log.read_to_string(&mut said)?;
    let why = said.lines().rev().find_map(|line| line.strip_prefix("error: ")).unwrap_or("see its log");
    bail!("it did not start ({status}): {why} [{}]", path.display())
}

/// Stops the `up` that has this data directory and waits for its end.
pub(crate) async fn down(data_dir: &Path, output: Output) -> Result<()> {
    let Some(pid) = data_dir::running(data_dir)? else {
        let text = format!("nothing runs in {}", data_dir.display());
        return output.one(&json!({ "stopped": null }), &text);
    };
    let process = pidfd_open(pid, PidfdFlags::empty()).context("cannot find its process")?;
    // The number may have been given to another process meanwhile: then the directory is free.
    if data_dir::running(data_dir)? == Some(pid) {
        pidfd_send_signal(&process, Signal::TERM).context("cannot stop it")?;
    }
    // A process's descriptor becomes readable when the process ends.
    let ended = tokio::task::spawn_blocking(move || {
        let patience = Timespec { tv_sec: PATIENCE_SECONDS, tv_nsec: 0 };
        poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience))
    });
    if ended.await?? == 0 {
        bail!("it was told to stop but still runs ({})", shown(pid));
    }
    output.one(&json!({ "stopped": pid.as_raw_nonzero() }), &format!("stopped ({})", shown(pid)))
}

fn shown(pid: Pid) -> String {
    format!("pid {}", pid.as_raw_nonzero())
}

fn spawn(log: &File) -> Result<Child> {
    let args =
        std::env::args_os().skip(1).map(|arg| if arg == "--detach" { "--detached".into() } else { arg });
    let spawned = Command::new(std::env::current_exe()?)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log.try_clone()?)
        .spawn();
    spawned.context("cannot start it")
}

/// Prints what it prints; whether it became ready.
async fn relay(child: &mut Child) -> Result<bool> {
    let stdout = child.stdout.take().context("its output is lost")?;
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await? {
        output::line(&line)?;
        if line.starts_with("ready") || line.starts_with('{') {
            return Ok(true);
        }
    }
    Ok(false)
}
