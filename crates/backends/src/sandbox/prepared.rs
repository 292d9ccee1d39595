//! A sandbox that waits for its command, in any mode.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use codelia_init::{Launch, Report, Request, Setup};
use codelia_policy::Plan;
use codelia_sys::{
    pty::{self, WindowSize},
    resolve_beneath,
};
use codelia_types::{CommandSpec, Reason, Receipt, TerminalSize};
use tokio::time::timeout;

use crate::{
    EgressSockets, Error, Launched, Prepared, Stdio,
    sandbox::{
        Ready, ReadyParts, Sandbox,
        control::Control,
        reads::AskedReads,
        running::{Budget, RunningCommand},
        supervisor::Supervisor,
    },
};

/// How long the command's process may take to call `execve`.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(10);

/// A sandbox with `codelia-init` waiting in it.
#[derive(Debug)]
pub(crate) struct WaitingSandbox {
    sandbox: Sandbox,
    /// Socket to the command's process. `None` if the launch goes through the control socket.
    launch: Option<Control>,
    supervisor: Option<Supervisor>,
    /// The session's directory, if the command sees the host's file system.
    root: Option<OwnedFd>,
    /// The plan's environment. The command's own variables override it.
    env: BTreeMap<String, String>,
    budget: Budget,
    /// For the egress proxy. Without one that serves them, connections are refused.
    egress: Option<EgressSockets>,
}

/// Sets a sandbox up for its plan, or destroys it if that fails.
///
/// Working directories are opened below `root` by us, or, without a `root`, below the workspace of
/// the setup by `codelia-init`. `egress` are the sockets of a network that init did not create.
pub(crate) async fn prepare(
    mut sandbox: Sandbox,
    plan: &Plan,
    setup: Setup,
    root: Option<OwnedFd>,
    egress: Option<EgressSockets>,
) -> Result<Box<dyn Prepared>, Error> {
    let ready = sandbox.set_up(setup).await;
    wait_for_command(sandbox, plan, ready, root, egress).await
}

/// Like [`prepare`] where init has its setup, of which it reports these parts.
pub(crate) async fn prepare_started(
    mut sandbox: Sandbox,
    plan: &Plan,
    parts: ReadyParts,
) -> Result<Box<dyn Prepared>, Error> {
    let ready = sandbox.ready(parts).await;
    wait_for_command(sandbox, plan, ready, None, None).await
}

async fn wait_for_command(
    sandbox: Sandbox,
    plan: &Plan,
    ready: Result<Ready, Error>,
    root: Option<OwnedFd>,
    egress: Option<EgressSockets>,
) -> Result<Box<dyn Prepared>, Error> {
    let supervised = ready.and_then(|mut ready| Ok((supervise(plan, &mut ready)?, ready)));
    match supervised {
        Ok((supervisor, Ready { launch, egress: created, .. })) => Ok(Box::new(WaitingSandbox {
            sandbox,
            launch,
            supervisor,
            root,
            env: plan.env.clone(),
            budget: Budget::from_plan(plan),
            egress: created.or(egress),
        })),
        Err(error) => {
            sandbox.destroy().await;
            Err(error)
        }
    }
}

/// Starts the supervisor of the filter's listener, if there is one.
fn supervise(plan: &Plan, ready: &mut Ready) -> Result<Option<Supervisor>, Error> {
    let limit = plan.security.as_ref().and_then(|security| security.violation_limit);
    match (ready.listener.take(), &ready.launch, plan.security.as_ref(), plan.ids, limit) {
        (Some(listener), Some(launch), Some(security), Some(ids), Some(limit)) => {
            Supervisor::start(listener, launch.try_clone_fd()?, security, ids, limit).map(Some)
        }
        _ => Ok(None),
    }
}

#[async_trait]
impl Prepared for WaitingSandbox {
    async fn launch(
        mut self: Box<Self>,
        command: &CommandSpec,
        stdio: Stdio,
    ) -> Result<Launched, Error> {
        let requested = Instant::now();
        match self.start(command, stdio).await {
            Ok(terminal) => {
                let started = Instant::now();
                let running =
                    RunningCommand::new(self.sandbox, self.supervisor, self.budget, started);
                Ok(Launched {
                    running: Box::new(running),
                    setup_time: started - requested,
                    terminal,
                })
            }
            Err(error) => {
                self.sandbox.destroy().await;
                Err(error)
            }
        }
    }

    fn is_alive(&self) -> bool {
        self.launch.as_ref().is_none_or(Control::is_open) && self.sandbox.control().is_open()
    }

    fn take_egress(&mut self) -> Option<EgressSockets> {
        self.egress.take()
    }

    fn take_reads(&mut self) -> Option<AskedReads> {
        self.supervisor.as_mut()?.reads.take()
    }

    async fn discard(self: Box<Self>) -> Receipt {
        self.sandbox.destroy().await
    }
}

impl WaitingSandbox {
    /// Hands the command over. Returns the other side of its terminal, if it has one.
    async fn start(
        &mut self,
        command: &CommandSpec,
        stdio: Stdio,
    ) -> Result<Option<OwnedFd>, Error> {
        let is_relayed = self.launch.is_none();
        if is_relayed && matches!(stdio, Stdio::Terminal(_)) {
            let message = "this sandbox cannot give a command a terminal; run it without one";
            return Err(Error::refused(Reason::LaunchFailed, message));
        }
        let directory = self.open_directory(command)?;
        let request = Request::Launch(self.launch_request(command, &stdio));
        let mut fds = match &stdio {
            Stdio::Files { stdin, stdout, stderr } => {
                vec![stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
            }
            Stdio::Terminal(_) => Vec::new(),
        };
        fds.extend(directory.iter().map(AsFd::as_fd));
        let (control, _) = self.sandbox.parts();
        let launch = self.launch.as_mut().unwrap_or(control);
        launch.send(&request, &fds).await?;
        // Only the command may hold its streams, so that they end with it.
        drop((stdio, directory));
        let launched = timeout(LAUNCH_TIMEOUT, receive_launched(launch, is_relayed, command));
        launched.await.map_err(|_| Error::InitTimeout)?
    }

    fn open_directory(&self, command: &CommandSpec) -> Result<Option<OwnedFd>, Error> {
        let open = |root| resolve_beneath::open_directory_beneath(root, &command.working_directory);
        self.root.as_ref().map(open).transpose().map_err(Error::working_directory)
    }

    fn launch_request(&mut self, command: &CommandSpec, stdio: &Stdio) -> Launch {
        let mut env = std::mem::take(&mut self.env);
        env.retain(|name, _| !(is_proxy_variable(name) && sets(command, name)));
        env.extend(command.env.clone());
        Launch {
            argv: command.argv.clone(),
            env,
            directory: self.root.is_none().then(|| command.working_directory.clone()),
            terminal: match *stdio {
                Stdio::Files { .. } => None,
                Stdio::Terminal(TerminalSize { columns, rows }) => {
                    Some(WindowSize { columns, rows })
                }
            },
        }
    }
}

fn is_proxy_variable(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with("_proxy")
}

/// Whether the command sets a variable itself, in any case: programs differ in which case they
/// prefer.
fn sets(command: &CommandSpec, name: &str) -> bool {
    command.env.keys().any(|own| own.eq_ignore_ascii_case(name))
}

/// Waits until the command was executed. Returns the other side of its terminal, if it has one.
async fn receive_launched(
    launch: &mut Control,
    is_relayed: bool,
    command: &CommandSpec,
) -> Result<Option<OwnedFd>, Error> {
    let mut terminal = None;
    loop {
        match launch.receive().await? {
            None if is_relayed => return Err(Error::InitExited),
            // The launch socket is close-on-exec: its end means that `execve` succeeded.
            None => return Ok(terminal),
            Some(Report::Launched) if is_relayed => return Ok(terminal),
            Some(Report::Terminal) if terminal.is_none() => {
                let controller = launch.take_descriptor()?;
                if !pty::is_controller(&controller) {
                    return Err(Error::UnexpectedMessage);
                }
                terminal = Some(controller);
            }
            Some(Report::Failed(failure)) => {
                let program = command.argv.first().map_or("", String::as_str);
                return Err(Error::launch(failure, program));
            }
            Some(_) => return Err(Error::UnexpectedMessage),
        }
    }
}
