//! The command's process while it waits for its command: started and restricted when the sandbox is
//! prepared, so that a launch is little more than an exec.

use std::{
    convert::Infallible,
    os::fd::{AsFd, OwnedFd},
};

use codelia_init::{Failure, Report, Setup, Step};
use codelia_sys::{Errno, Pid, fd, process, resolve_beneath, rlimit, seccomp, signal};

use crate::{
    control::Control,
    launch, restrict,
    setup::{Surroundings, at},
};

/// The exit code of a process that did not execute its command.
const NOT_EXECUTED: i32 = 127;

/// The command's process, restricted and waiting.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) pid: Pid,
    /// Where its command goes.
    pub(crate) launch: OwnedFd,
    /// Of its filter, if that notifies.
    pub(crate) listener: Option<OwnedFd>,
}

/// Starts it and returns when all its restrictions are in place.
pub(crate) fn start(surroundings: &Surroundings) -> Result<Waiting, Failure> {
    let (ours, theirs) = fd::socket_pair().map_err(at(Step::LaunchSocket))?;
    let child = || become_command(&surroundings.setup, &theirs);
    let pid = surroundings.process.fork(child).map_err(at(Step::Fork))?;
    // With our copy of it open its end would not be seen.
    drop(theirs);
    let mut socket = Control::new(&ours);
    match socket.receive_report()? {
        Some(Report::Ready) => {}
        Some(Report::Failed(failure)) => return Err(failure),
        Some(Report::Launched | Report::Exited(_)) | None => {
            return Err(Failure::new(Step::Fork, Errno::CHILD));
        }
    }
    let notify = surroundings.setup.security.as_ref().is_some_and(|security| security.notify);
    let listener = notify.then(|| socket.take_descriptor()).transpose()?;
    Ok(Waiting { pid, launch: ours, listener })
}

/// The life of the process until the exec. Answers its exit code, for it comes back only if it failed.
fn become_command(setup: &Setup, socket: &OwnedFd) -> i32 {
    let mut socket = Control::new(socket);
    let Err(failure) = restrict_and_wait(setup, &mut socket);
    // Nobody is left to be told if this fails.
    let _ = socket.send(&Report::Failed(failure), &[]);
    NOT_EXECUTED
}

fn restrict_and_wait(setup: &Setup, socket: &mut Control<&OwnedFd>) -> Result<Infallible, Failure> {
    let (workspace, listener) = restrict(setup)?;
    let listeners: Vec<_> = listener.iter().map(AsFd::as_fd).collect();
    socket.send(&Report::Ready, &listeners)?;
    drop(listener);
    launch::execute(&launch::receive(socket)?, workspace.as_ref())
}

/// The steps. The filter is the last one: after it only the calls that every filter lets pass can be made.
fn restrict(setup: &Setup) -> Result<(Option<OwnedFd>, Option<OwnedFd>), Failure> {
    process::die_with_parent().map_err(at(Step::DieWithInit))?;
    process::new_session().map_err(at(Step::NewSession))?;
    setup
        .rlimits
        .iter()
        .try_for_each(|limit| rlimit::lower(limit.resource, limit.max))
        .map_err(at(Step::Rlimits))?;
    let workspace = setup
        .workspace
        .as_deref()
        .map(resolve_beneath::open_directory)
        .transpose()
        .map_err(at(Step::Workspace))?;
    // The control socket is standard input until then.
    fd::input_like_output().map_err(at(Step::KeepDescriptors))?;
    fd::keep_from_command().map_err(at(Step::KeepDescriptors))?;
    signal::unblock_all().map_err(at(Step::UnblockSignals))?;
    let Some(security) = &setup.security else { return Ok((workspace, None)) };
    if let Some(executables) = &security.executables {
        restrict::execution(executables).map_err(at(Step::RestrictExecution))?;
    }
    let listener = seccomp::install(&security.filter, security.notify).map_err(at(Step::Filter))?;
    Ok((workspace, listener))
}
