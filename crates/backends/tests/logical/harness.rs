//! Starts sandboxes and checks what they leave behind.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use codelia_backends::{
    Backend, Capabilities, Error, Logical, LogicalOptions, Prepared, Running, Stdio,
};
use codelia_policy::{Limits, LimitsRequest, Plan, PlanTarget, RunSpec};
use codelia_sys::{Pid, fd};
use codelia_types::{CommandSpec, Mode, Outcome, RunId, SessionId, Usage};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::PidfdFlags,
};
use tempfile::TempDir;

use crate::require::available;

/// A wait that takes this long has failed.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A backend and a session's directory.
pub(crate) struct Fixture {
    pub(crate) backend: Logical,
    pub(crate) host: Capabilities,
    pub(crate) limits: Limits,
    pub(crate) root: TempDir,
}

/// The result of a command.
pub(crate) struct Finished {
    pub(crate) outcome: Outcome,
    pub(crate) usage: Usage,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

/// A running command, with the test's ends of its streams.
pub(crate) struct Started {
    pub(crate) sandbox: RunId,
    pub(crate) running: Box<dyn Running>,
    pub(crate) stdin: File,
    pub(crate) stdout: BufReader<File>,
    pub(crate) stderr: File,
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        let backend =
            Logical::new(LogicalOptions { init: init_path(), cgroup_parent: Default::default() })
                .unwrap();
        let host = backend.probe().await;
        Self { backend, host, limits: Limits::default(), root: tempfile::tempdir().unwrap() }
    }

    /// A fixture whose host cannot enforce limits, so that there are no control groups.
    pub(crate) async fn without_groups() -> Self {
        let mut fixture = Self::new().await;
        fixture.host.enforceable = codelia_policy::Enforceable::default();
        fixture
    }

    pub(crate) fn plan(&self) -> Plan {
        let spec = RunSpec {
            command: command(&["true"]),
            mode: Mode::Logical,
            network: None,
            limits: self.limits.clone(),
            requested_limits: LimitsRequest::default(),
            policy: codelia_policy::Policy::default(),
            ends_with_caller: false,
            tool: None,
            transaction: None,
        };
        let root = self.root.path().to_owned();
        Plan::logical(
            PlanTarget { sandbox: RunId::generate(), session: SessionId::generate(), root },
            &spec,
            self.host.enforceable,
        )
        .unwrap()
    }

    pub(crate) async fn prepare(&self) -> Box<dyn Prepared> {
        self.backend.prepare(&self.plan()).await.unwrap()
    }

    pub(crate) async fn launch(&self, command: &CommandSpec) -> Result<Started, Error> {
        let plan = self.plan();
        let prepared = self.backend.prepare(&plan).await?;
        let ([child_in, stdin], [stdout, child_out], [stderr, child_err]) =
            (pipe(), pipe(), pipe());
        let stdio = Stdio::Files { stdin: child_in, stdout: child_out, stderr: child_err };
        let running = prepared.launch(command, stdio).await?.running;
        Ok(Started {
            sandbox: plan.sandbox,
            running,
            stdin: stdin.into(),
            stdout: BufReader::new(stdout.into()),
            stderr: stderr.into(),
        })
    }

    pub(crate) async fn start(&self, argv: &[&str]) -> Started {
        self.launch(&command(argv)).await.unwrap()
    }

    /// Runs a command with empty stdin.
    pub(crate) async fn run(&self, argv: &[&str]) -> Finished {
        self.run_with(&command(argv), b"").await
    }

    pub(crate) async fn run_with(&self, command: &CommandSpec, input: &[u8]) -> Finished {
        self.launch(command).await.unwrap().finish(input.to_owned()).await
    }

    /// Returns the reason of a launch that must be refused.
    pub(crate) async fn refusal(&self, command: &CommandSpec) -> String {
        match self.launch(command).await {
            Err(Error::Refused(refusal)) => refusal.reason.to_string(),
            Err(error) => panic!("expected a refusal: {error}"),
            Ok(_) => panic!("expected a refusal, but the command started"),
        }
    }
}

impl Started {
    /// Reads one line of stdout.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Writes stdin, reads both streams to the end, waits, destroys the sandbox.
    pub(crate) async fn finish(mut self, input: Vec<u8>) -> Finished {
        let mut stdin = self.stdin;
        // A command may close stdin before it has read everything.
        let feed = tokio::task::spawn_blocking(move || drop(stdin.write_all(&input)));
        let stdout = tokio::task::spawn_blocking(move || read_all(self.stdout));
        let stderr = tokio::task::spawn_blocking(move || read_all(self.stderr));
        let (outcome, usage) = self.running.wait().await;
        feed.await.unwrap();
        let (stdout, stderr) = (stdout.await.unwrap(), stderr.await.unwrap());
        assert!(self.running.destroy().await.is_clean());
        assert_eq!(groups_of(self.sandbox), Vec::<PathBuf>::new());
        Finished { outcome, usage, stdout, stderr }
    }
}

impl Finished {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }
}

pub(crate) fn command(argv: &[&str]) -> CommandSpec {
    CommandSpec { stdin: true, ..CommandSpec::new(argv.iter().copied()) }
}

/// Returns the path of `codelia-init`, which `make build` builds.
pub(crate) fn init_path() -> PathBuf {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .with_file_name("x86_64-unknown-linux-gnu/init/codelia-init");
    let path = std::env::var_os("CODELIA_INIT").map_or(built, PathBuf::from);
    assert!(path.is_file(), "{} is missing: run `make build`", path.display());
    path
}

/// Returns whether the host can enforce limits by control groups.
pub(crate) fn has_groups(fixture: &Fixture) -> bool {
    let can = fixture.host.enforceable;
    let missing = (!(can.memory && can.pids && can.cpu))
        .then(|| format!("control groups cannot be created here: {:?}", fixture.host.gaps));
    available("cgroup", missing.as_deref())
}

/// Finds the existing control group directories of a sandbox.
pub(crate) fn groups_of(sandbox: RunId) -> Vec<PathBuf> {
    let name = format!("-{sandbox}");
    let (mut found, mut open) = (Vec::new(), vec![PathBuf::from("/sys/fs/cgroup")]);
    while let Some(dir) = open.pop() {
        // Groups of other processes may disappear.
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        for entry in
            entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        {
            if entry.file_name().to_string_lossy().ends_with(&name) {
                found.push(entry.path());
            }
            open.push(entry.path());
        }
    }
    found
}

/// Waits for the end of a process that is not a child of the test.
pub(crate) fn wait_for_end(pid: Pid) {
    let Ok(handle) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return };
    let timeout = Timespec { tv_sec: TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
    let ended =
        rustix::event::poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&timeout)).unwrap();
    assert_eq!(ended, 1, "process {pid} is still alive after {TIMEOUT:?}");
}

/// Polls until a condition holds.
pub(crate) async fn eventually(condition: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out after {TIMEOUT:?}: {condition}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(crate) fn pid(text: &str) -> Pid {
    Pid::from_raw(text.trim().parse().unwrap()).unwrap()
}

fn pipe() -> [OwnedFd; 2] {
    fd::pipe().unwrap().into()
}

fn read_all(mut stream: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}
