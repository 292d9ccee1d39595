//! The command's process before exec. It is started and restricted when the sandbox is prepared, so
//! that a launch is little more than an exec.

use std::{
    convert::Infallible,
    os::fd::{AsFd, OwnedFd},
};

use codelia_init::{Failure, Report, Setup, Step};
use codelia_sys::{Errno, Pid, fd, landlock, process, resolve_beneath, rlimit, seccomp, signal};

use crate::{check, control::Control, failure::at, launch, restrict, setup::InitState};

/// The exit code of a process that did not execute its command.
const NOT_EXECUTED: i32 = 127;

/// The command's process, restricted and waiting for its command.
#[derive(Debug)]
pub(crate) struct CommandProcess {
    pub(crate) pid: Pid,
    /// The socket for the launch.
    pub(crate) launch: OwnedFd,
    /// The listener of its filter, if that notifies.
    pub(crate) listener: Option<OwnedFd>,
}

/// Starts the process and returns when all its restrictions are in place.
pub(crate) fn start(state: &InitState<'_>) -> Result<CommandProcess, Failure> {
    let (ours, theirs) = fd::socket_pair().map_err(at(Step::CreateLaunchSocket))?;
    let child = || run(&state.setup, &theirs);
    let pid = state.process.fork(child).map_err(at(Step::Fork))?;
    // Our copy would keep us from seeing end of file.
    drop(theirs);
    let mut socket = Control::new(&ours);
    match socket.receive_message()? {
        Some(Report::Ready) => {}
        Some(Report::Failed(failure)) => return Err(failure),
        _ => return Err(Failure::new(Step::Fork, Errno::CHILD)),
    }
    if let Some(security) = &state.setup.security {
        check::command(&security.expected, pid)?;
    }
    let notify = state.setup.security.as_ref().is_some_and(|security| security.notify);
    let listener = notify.then(|| socket.take_descriptor()).transpose()?;
    Ok(CommandProcess { pid, launch: ours, listener })
}

/// Runs in the child until exec. Returns an exit code only on failure.
fn run(setup: &Setup, socket: &OwnedFd) -> i32 {
    let mut socket = Control::new(socket);
    let Err(failure) = restrict_and_execute(setup, &mut socket);
    // If init does not get this, it sees the exit.
    let _ = socket.send(&Report::Failed(failure), &[]);
    NOT_EXECUTED
}

fn restrict_and_execute(
    setup: &Setup,
    socket: &mut Control<&OwnedFd>,
) -> Result<Infallible, Failure> {
    let (workspace, listener) = restrict(setup)?;
    let listeners: Vec<_> = listener.iter().map(AsFd::as_fd).collect();
    socket.send(&Report::Ready, &listeners)?;
    drop(listener);
    launch::execute(&launch::receive(socket)?, workspace.as_ref())
}

/// The steps, in order. Returns the workspace and the filter's listener.
fn restrict(setup: &Setup) -> Result<(Option<OwnedFd>, Option<OwnedFd>), Failure> {
    process::die_with_parent().map_err(at(Step::DieWithInit))?;
    process::new_session().map_err(at(Step::NewSession))?;
    set_rlimits(setup).map_err(at(Step::SetRlimits))?;
    let workspace = open_workspace(setup).map_err(at(Step::OpenWorkspace))?;
    // Stdin is the control socket until here; the command must not inherit it.
    fd::dup_stdout_to_stdin().map_err(at(Step::HideDescriptors))?;
    fd::set_cloexec_above_stdio().map_err(at(Step::HideDescriptors))?;
    signal::unblock_all().map_err(at(Step::UnblockSignals))?;
    let Some(security) = &setup.security else { return Ok((workspace, None)) };
    if let Some(executables) = &security.executables {
        restrict::execution(executables).map_err(at(Step::RestrictExecution))?;
    }
    if let Some(paths) = &security.readable {
        restrict::reading(paths).map_err(at(Step::RestrictReading))?;
    }
    if security.shares_network {
        // Older kernels cannot; the sandbox is as the threat model says then.
        landlock::scope_abstract_sockets().map(drop).map_err(at(Step::ScopeSockets))?;
    }
    // Last: afterwards only the calls that every filter allows are possible.
    let listener =
        seccomp::install(&security.filter, security.notify).map_err(at(Step::InstallFilter))?;
    Ok((workspace, listener))
}

fn set_rlimits(setup: &Setup) -> Result<(), Errno> {
    setup.rlimits.iter().try_for_each(|limit| rlimit::lower(limit.resource, limit.max))
}

fn open_workspace(setup: &Setup) -> Result<Option<OwnedFd>, Errno> {
    setup.workspace.as_deref().map(resolve_beneath::open_directory).transpose()
}
