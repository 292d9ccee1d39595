//! A backend that starts a process in the session's directory, without isolation.

use std::{
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    path::PathBuf,
    process::Stdio as Std,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use codelia_backends::{
    Backend, Capabilities, Error, Launched, Prepared, Running, SandboxRemote, Stdio,
};
use codelia_policy::{Enforceable, Plan};
use codelia_sys::pty::{Pty, WindowSize};
use codelia_types::{CommandSpec, Mode, Outcome, Reason, Receipt, Refusal, TerminalSize, Usage};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

#[derive(Debug, Default)]
pub(crate) struct ProcessBackend {
    /// The receipt that its sandboxes return.
    pub(crate) receipt: Receipt,
}

#[async_trait]
impl Backend for ProcessBackend {
    fn mode(&self) -> Mode {
        Mode::Logical
    }

    async fn probe(&self) -> Capabilities {
        let enforceable = Enforceable::default();
        Capabilities { mode: Mode::Logical, usable: true, enforceable, gaps: Vec::new() }
    }

    async fn upkeep(&self) -> Result<usize, Error> {
        Ok(0)
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        Ok(Box::new(PreparedProcess { root: plan.root.clone(), receipt: self.receipt }))
    }
}

#[derive(Debug)]
struct PreparedProcess {
    root: PathBuf,
    receipt: Receipt,
}

#[async_trait]
impl Prepared for PreparedProcess {
    async fn launch(
        self: Box<Self>,
        command: &CommandSpec,
        stdio: Stdio,
    ) -> Result<Launched, Error> {
        let (files, terminal) = open(stdio);
        let [stdin, stdout, stderr] = files;
        let child = Command::new(&command.argv[0])
            .args(&command.argv[1..])
            .current_dir(&self.root)
            .stdin(Std::from(stdin))
            .stdout(Std::from(stdout))
            .stderr(Std::from(stderr))
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| {
                Error::Refused(Refusal {
                    reason: Reason::ExecutableNotFound,
                    message: error.to_string(),
                })
            })?;
        let group = ProcessGroup(Arc::new(AtomicI32::new(child.id().unwrap().cast_signed())));
        let receipt = self.receipt;
        Ok(Launched {
            running: Box::new(Process { child, group, receipt }),
            setup_time: Duration::from_micros(1),
            terminal,
        })
    }

    async fn discard(self: Box<Self>) -> Receipt {
        Receipt::default()
    }
}

/// The command's descriptors, and the other side of its terminal.
fn open(stdio: Stdio) -> ([OwnedFd; 3], Option<OwnedFd>) {
    match stdio {
        Stdio::Files { stdin, stdout, stderr } => ([stdin, stdout, stderr], None),
        Stdio::Terminal(TerminalSize { columns, rows }) => {
            let Pty { controller, terminal } = Pty::open(WindowSize { columns, rows }).unwrap();
            let stream = || terminal.try_clone().unwrap();
            ([stream(), stream(), stream()], Some(controller))
        }
    }
}

#[derive(Debug)]
struct Process {
    child: Child,
    group: ProcessGroup,
    receipt: Receipt,
}

/// A process group. Zero after it has ended, because the id may be reused.
#[derive(Debug, Clone)]
struct ProcessGroup(Arc<AtomicI32>);

impl ProcessGroup {
    fn send(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.0.load(Ordering::SeqCst)) {
            kill_process_group(group, signal).ok();
        }
    }
}

impl SandboxRemote for ProcessGroup {
    fn keep_alive(&self, _: Duration) {}

    fn kill(&self) {
        self.send(Signal::KILL);
    }
}

#[async_trait]
impl Running for Process {
    async fn wait(&mut self) -> (Outcome, Usage) {
        let status = self.child.wait().await.unwrap();
        // Background processes must not keep the pipes open.
        self.group.send(Signal::KILL);
        self.group.0.store(0, Ordering::SeqCst);
        let outcome = match (status.code(), status.signal()) {
            (Some(code), _) => Outcome::Exited(code),
            (None, signal) => Outcome::Signaled(signal.unwrap_or(0)),
        };
        (outcome, Usage::default())
    }

    async fn signal(&self, signal: i32) {
        self.group.send(Signal::from_named_raw(signal).unwrap());
    }

    fn remote(&self) -> Arc<dyn SandboxRemote> {
        Arc::new(self.group.clone())
    }

    fn lower_priority(&self) {}

    async fn kill_tree(&self) {
        self.group.send(Signal::KILL);
    }

    async fn destroy(self: Box<Self>) -> Receipt {
        self.receipt
    }
}
