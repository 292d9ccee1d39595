//! Launching the command, in its own process: receive it, then one list of steps up to exec.

use std::{
    convert::Infallible,
    ffi::CString,
    io::{self, Stdin},
    os::fd::{AsFd, OwnedFd},
};

use codelia_init::{Failure, Launch, Report, Request, Step};
use codelia_sys::{
    Errno, fd, process,
    pty::{Pty, WindowSize},
};

use crate::{
    control::{Control, UNEXPECTED},
    failure::at,
};

/// The search path if the environment has no PATH.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The command in the form that exec needs.
#[derive(Debug)]
pub(crate) struct Command {
    /// The candidate paths of the program, in search order.
    programs: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    streams: Streams,
    directory: Directory,
}

#[derive(Debug)]
enum Streams {
    Received([OwnedFd; 3]),
    /// All three are this terminal, which becomes the controlling one.
    Terminal(OwnedFd),
}

#[derive(Debug)]
enum Directory {
    Open(OwnedFd),
    InWorkspace(String),
}

/// Waits for the command and opens its terminal. Fails at end of file, which ends the sandbox.
pub(crate) fn receive(socket: &mut Control<&OwnedFd>) -> Result<Command, Failure> {
    let Request::Launch(launch) = socket.expect_message()? else { return Err(UNEXPECTED) };
    let streams = match launch.terminal {
        Some(size) => Streams::Terminal(open_terminal(socket, size)?),
        None => {
            let stdin = socket.take_descriptor()?;
            let stdout = socket.take_descriptor()?;
            Streams::Received([stdin, stdout, socket.take_descriptor()?])
        }
    };
    let programs = programs(&launch)?;
    let directory = match launch.directory {
        Some(path) => Directory::InWorkspace(path),
        None => Directory::Open(socket.take_descriptor()?),
    };
    let env = launch.env.into_iter().map(|(key, value)| c_string(format!("{key}={value}")));
    Ok(Command {
        programs,
        argv: launch.argv.into_iter().map(c_string).collect::<Result<_, _>>()?,
        env: env.collect::<Result<_, _>>()?,
        streams,
        directory,
    })
}

/// Opens a terminal where the command finds it by name, and sends the other side to the backend.
fn open_terminal(socket: &Control<&OwnedFd>, size: WindowSize) -> Result<OwnedFd, Failure> {
    let pty = Pty::open(size).map_err(at(Step::OpenTerminal))?;
    // Our copy ends here: the terminal must hang up when the backend closes its own.
    socket.send(&Report::Terminal, &[pty.controller.as_fd()])?;
    Ok(pty.terminal)
}

/// Forwards the launch to the command's process and reports its result. Returns false if the
/// backend ends the sandbox instead.
pub(crate) fn relay(control: &mut Control<Stdin>, launch: &OwnedFd) -> Result<bool, Failure> {
    let request = match control.receive_message()? {
        Some(request @ Request::Launch(_)) => request,
        Some(Request::Kill) | None => return Ok(false),
        Some(Request::Setup(_) | Request::Signal(_) | Request::KeepAlive(_)) => {
            return Err(UNEXPECTED);
        }
    };
    let descriptors = control.take_descriptors();
    let mut socket = Control::new(launch);
    socket.send(&request, &descriptors.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
    // Only the command may hold its stdio, so that its end is seen.
    drop(descriptors);
    match socket.receive_message()? {
        None => control.send(&Report::Launched, &[]).map(|()| true),
        Some(Report::Failed(failure)) => Err(failure),
        Some(_) => Err(UNEXPECTED),
    }
}

fn programs(launch: &Launch) -> Result<Vec<CString>, Failure> {
    let name = launch.argv.first().ok_or(Failure::new(Step::BuildArguments, Errno::INVAL))?;
    if name.is_empty() || name.contains('/') {
        return Ok(vec![c_string(name.clone())?]);
    }
    let path = launch.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    path.split(':')
        .map(|dir| if dir.is_empty() { "." } else { dir })
        .map(|dir| c_string(format!("{dir}/{name}")))
        .collect()
}

fn c_string(text: String) -> Result<CString, Failure> {
    CString::new(text).map_err(|_| Failure::new(Step::BuildArguments, Errno::INVAL))
}

/// The steps, in order. Returns only on failure.
pub(crate) fn execute(
    command: &Command,
    workspace: Option<&OwnedFd>,
) -> Result<Infallible, Failure> {
    change_directory(command, workspace).map_err(at(Step::WorkingDirectory))?;
    let [stdin, stdout, stderr] = match &command.streams {
        Streams::Received([stdin, stdout, stderr]) => [stdin, stdout, stderr],
        Streams::Terminal(terminal) => [terminal; 3],
    };
    fd::replace_stdio(stdin, stdout, stderr).map_err(at(Step::ReplaceStdio))?;
    // After stdin is the terminal.
    if matches!(command.streams, Streams::Terminal(_)) {
        process::set_controlling_terminal(io::stdin()).map_err(at(Step::SetTerminal))?;
    }
    Err(Failure::new(Step::Execute, try_programs(command)))
}

fn change_directory(command: &Command, workspace: Option<&OwnedFd>) -> Result<(), Errno> {
    match (&command.directory, workspace) {
        (Directory::Open(directory), _) => process::change_directory(directory),
        (Directory::InWorkspace(path), Some(workspace)) => {
            process::change_directory_below(workspace, path)
        }
        (Directory::InWorkspace(_), None) => Err(Errno::BADF),
    }
}

/// Tries each candidate. Returns only if none could be executed: `EACCES` if one was found but not
/// permitted, which says more than that the last one was not found.
fn try_programs(command: &Command) -> Errno {
    let mut result = Errno::NOENT;
    for program in &command.programs {
        match process::exec(program, &command.argv, &command.env) {
            Errno::NOENT | Errno::NOTDIR => {}
            Errno::ACCESS => result = Errno::ACCESS,
            errno => return errno,
        }
    }
    result
}
