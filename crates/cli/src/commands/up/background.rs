//! `up --detach` and `down`: a background `up`.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::Stdio,
};

use anyhow::{Context, Result, bail};
use codelia_client::output::{self, Output};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

use super::{data_dir, instances};
use crate::config::Loaded;

const LOG_FILE: &str = "up.log";
/// How long `down` waits: longer than the usual shutdown grace.
const STOP_TIMEOUT_SECONDS: i64 = 120;

/// Starts the same `up` in the background and returns when it is ready.
pub(crate) async fn start(data_dir: &Path) -> Result<()> {
    data_dir::create(data_dir)?;
    let path = data_dir.join(LOG_FILE);
    let mut log =
        OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(&path)?;
    let start = log.seek(SeekFrom::End(0))?;
    let mut child = spawn(&log)?;
    if relay_until_ready(&mut child).await? {
        return Ok(());
    }
    let status = child.wait().await?;
    log.seek(SeekFrom::Start(start))?;
    let mut text = String::new();
    log.read_to_string(&mut text)?;
    let reason =
        text.lines().rev().find_map(|line| line.strip_prefix("error: ")).unwrap_or("see the log");
    bail!("`codelia up` did not start ({status}): {reason} (log: {})", path.display())
}

/// Stops the `up` in the configured data directory or, if none is configured, the only one that
/// runs.
pub(crate) async fn down(loaded: &Loaded, output: Output) -> Result<()> {
    let config = &loaded.config;
    if loaded.is_set("data_dir") {
        return match data_dir::owner_pid(&config.data_dir)? {
            Some(pid) => stop(&config.data_dir, pid, output).await,
            None => nothing_runs(&format!("in {}", config.data_dir.display()), output),
        };
    }
    let running = instances::running(config)?;
    let mut each = running.iter();
    match (each.next(), each.next()) {
        (None, _) => nothing_runs("here (one of another user needs its --data-dir)", output),
        (Some((data_dir, pid)), None) => stop(data_dir, *pid, output).await,
        _ => {
            let list = running
                .iter()
                .map(|(dir, pid)| format!("\n  --data-dir {} ({})", dir.display(), show(*pid)));
            let list: String = list.collect();
            bail!(
                "{} instances of `codelia up` are running; name the one to stop:{list}",
                running.len()
            )
        }
    }
}

fn nothing_runs(place: &str, output: Output) -> Result<()> {
    output.print(&json!({ "stopped": null }), &format!("no `codelia up` runs {place}"))
}

/// Stops the `up` that owns the data directory, and waits until it has exited.
async fn stop(data_dir: &Path, pid: Pid, output: Output) -> Result<()> {
    let name = format!("`codelia up` in {} ({})", data_dir.display(), show(pid));
    output::write_message(&format!("stopping {name}"));
    let process =
        pidfd_open(pid, PidfdFlags::empty()).with_context(|| format!("cannot open {name}"))?;
    // If the pid was reused in the meantime, the directory has no owner.
    if data_dir::owner_pid(data_dir)? == Some(pid) {
        pidfd_send_signal(&process, Signal::TERM)
            .with_context(|| format!("cannot signal {name}"))?;
    }
    // A pidfd becomes readable when its process exits.
    let exited = tokio::task::spawn_blocking(move || {
        let timeout = Timespec { tv_sec: STOP_TIMEOUT_SECONDS, tv_nsec: 0 };
        poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout))
    });
    if exited.await?? == 0 {
        bail!("{name} is still running {STOP_TIMEOUT_SECONDS}s after SIGTERM");
    }
    let json = json!({ "stopped": pid.as_raw_nonzero(), "dataDir": data_dir });
    output.print(&json, &format!("stopped {name}"))
}

fn show(pid: Pid) -> String {
    format!("pid {}", pid.as_raw_nonzero())
}

fn spawn(log: &File) -> Result<Child> {
    let args = std::env::args_os()
        .skip(1)
        .map(|arg| if arg == "--detach" { "--detached".into() } else { arg });
    let spawned = Command::new(std::env::current_exe()?)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log.try_clone()?)
        .spawn();
    spawned.context("cannot start `codelia up` in the background")
}

/// Prints the output of the background `up` until it is ready. Returns false if it exits before.
async fn relay_until_ready(child: &mut Child) -> Result<bool> {
    let stdout = child.stdout.take().context("the background process has no stdout")?;
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await? {
        output::write_line(&line)?;
        if line.starts_with("ready") || line.starts_with('{') {
            return Ok(true);
        }
    }
    Ok(false)
}
