//! Processes of the program under test.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::watch;

use crate::{TIMEOUT, eventually, within};

/// How long a dropped process may take to exit after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// A running process. Dropping it sends SIGTERM, then SIGKILL, and prints its log if the test
/// failed.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    lines: watch::Receiver<Lines>,
    log: PathBuf,
}

#[derive(Debug, Default)]
struct Lines {
    seen: Vec<String>,
    closed: bool,
}

/// The result of a process that has exited.
#[derive(Debug)]
pub struct ProcessOutput {
    /// The exit code; `None` if a signal killed it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Process {
    /// Starts `command`. Its standard error goes to a file in `logs`.
    pub fn start(name: &str, mut command: Command, logs: &Path) -> Result<Self> {
        let log = logs.join(format!("{name}.log"));
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::options().create(true).append(true).open(&log)?)
            .spawn()
            .with_context(|| format!("start {name}: {command:?}"))?;
        let stdout = child.stdout.take().context("stdio is not piped")?;
        Ok(Self { name: name.to_owned(), child, lines: read_lines(stdout), log })
    }

    /// Changes a command so that its process may open at most `max` files.
    #[must_use]
    pub fn limit_open_files(command: &Command, max: u64) -> Command {
        let mut limited = Command::new("prlimit");
        limited.arg(format!("--nofile={max}:{max}")).arg("--").arg(command.get_program());
        limited.args(command.get_args()).env_clear().current_dir("/");
        limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        limited
    }

    /// Runs `command` with `input` on its standard input and waits until it exits.
    pub async fn finish(mut command: Command, input: &[u8]) -> Result<ProcessOutput> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        let mut stdin = child.stdin.take().context("stdio is not piped")?;
        let input = input.to_vec();
        // A program that reads no input may close it early. That is not an error.
        let writer = thread::spawn(move || drop(stdin.write_all(&input)));
        let id = pid(&child)?;
        let (sender, receiver) = tokio::sync::oneshot::channel();
        thread::spawn(move || sender.send(child.wait_with_output()));
        let finished = tokio::time::timeout(TIMEOUT * 2, receiver).await;
        if finished.is_err() {
            kill_process(id, Signal::KILL)?;
            bail!("timed out: {command:?}");
        }
        let output = finished???;
        writer.join().map_err(|_| anyhow::anyhow!("the stdin writer panicked"))?;
        Ok(output.into())
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line on standard output that starts with `ready`.
    pub async fn ready(&mut self) -> Result<String> {
        self.line_starting("ready").await
    }

    /// Waits for a line on standard output that starts with `start`.
    pub async fn line_starting(&mut self, start: &str) -> Result<String> {
        let mut lines = self.lines.clone();
        let found = |lines: &Lines| lines.seen.iter().find(|line| line.starts_with(start)).cloned();
        let what = format!("{}: a line that starts with `{start}`", self.name);
        let seen =
            within(&what, lines.wait_for(|lines| lines.closed || found(lines).is_some())).await?;
        match found(&seen) {
            Some(line) => Ok(line),
            None => bail!("{what}: not printed; output: {:?}\n{}", seen.seen, self.read_log()),
        }
    }

    /// Its standard output so far.
    #[must_use]
    pub fn printed(&self) -> String {
        self.lines.borrow().seen.join("\n")
    }

    /// Its log so far.
    #[must_use]
    pub fn read_log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(pid(&self.child)?, signal).with_context(|| format!("signal {}", self.name))
    }

    /// Whether it has exited.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits until it exits.
    pub async fn exited(&mut self) -> Result<ExitStatus> {
        let what = format!("{} exits", self.name);
        let child = &mut self.child;
        let ended = eventually(what, || std::future::ready(child.try_wait().transpose())).await?;
        Ok(ended)
    }

    /// Sends SIGTERM and waits until it exits.
    pub async fn terminate(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.exited().await
    }

    fn terminate_now(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        self.signal(Signal::TERM)?;
        let deadline = Instant::now() + TERM_GRACE;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                self.child.kill()?;
            }
            thread::park_timeout(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A test that succeeds stops its processes itself.
        let failed = thread::panicking() || matches!(self.child.try_wait(), Ok(None));
        if let Err(error) = self.terminate_now() {
            eprintln!("cannot stop {}: {error:#}", self.name);
        }
        if failed {
            eprintln!("---- {} ----\n{}\n{}", self.name, self.printed(), self.read_log());
        }
    }
}

impl From<Output> for ProcessOutput {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

fn pid(child: &Child) -> Result<Pid> {
    Pid::from_raw(child.id().cast_signed()).context("invalid process id")
}

fn read_lines(stdout: ChildStdout) -> watch::Receiver<Lines> {
    let (sender, receiver) = watch::channel(Lines::default());
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            sender.send_modify(|lines| lines.seen.push(line));
        }
        sender.send_modify(|lines| lines.closed = true);
    });
    receiver
}

/// Whether this process runs as root.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
