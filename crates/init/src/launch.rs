//! From the order to the running command, in the command's own process: one list of steps, in order.

use std::{
    convert::Infallible,
    ffi::CString,
    io::{self, Stdin},
    os::fd::{AsFd, OwnedFd},
};

use codelia_init::{Failure, Launch, Report, Request, Step};
use codelia_sys::{Errno, fd, process, resolve_beneath};

use crate::{control::Control, setup::at};

/// Where a program is looked up if the environment has no PATH.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The command, as the kernel wants it.
#[derive(Debug)]
pub(crate) struct Order {
    /// Where the program may be, best first.
    programs: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    streams: [OwnedFd; 3],
    directory: Directory,
    terminal: bool,
}

#[derive(Debug)]
enum Directory {
    Open(OwnedFd),
    InWorkspace(String),
}

/// Waits for the command. The end of the socket is that of the sandbox.
pub(crate) fn receive(socket: &mut Control<&OwnedFd>) -> Result<Order, Failure> {
    let Some(Request::Launch(launch)) = socket.receive()? else {
        return Err(Failure::new(Step::Understand, Errno::PROTO));
    };
    let streams = [socket.take_descriptor()?, socket.take_descriptor()?, socket.take_descriptor()?];
    let programs = programs(&launch)?;
    let directory = match launch.directory {
        Some(path) => Directory::InWorkspace(path),
        None => Directory::Open(socket.take_descriptor()?),
    };
    let env = launch.env.into_iter().map(|(key, value)| text(format!("{key}={value}")));
    Ok(Order {
        programs,
        argv: launch.argv.into_iter().map(text).collect::<Result<_, _>>()?,
        env: env.collect::<Result<_, _>>()?,
        streams,
        directory,
        terminal: launch.terminal,
    })
}

/// Passes the order on to the command's process, and what becomes of it back. False if there is to be no
/// command, which ends the sandbox.
pub(crate) fn relay(control: &mut Control<Stdin>, launch: &OwnedFd) -> Result<bool, Failure> {
    let request = match control.receive()? {
        Some(request @ Request::Launch(_)) => request,
        Some(Request::Kill) | None => return Ok(false),
        Some(Request::Setup(_) | Request::Signal(_) | Request::KeepAlive(_)) => {
            return Err(Failure::new(Step::Understand, Errno::PROTO));
        }
    };
    let descriptors = control.take_descriptors();
    let mut socket = Control::new(launch);
    socket.send(&request, &descriptors.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
    // The command alone holds its streams.
    drop(descriptors);
    match socket.receive_report()? {
        None => control.send(&Report::Launched, &[]).map(|()| true),
        Some(Report::Failed(failure)) => Err(failure),
        Some(_) => Err(Failure::new(Step::Understand, Errno::PROTO)),
    }
}

fn programs(launch: &Launch) -> Result<Vec<CString>, Failure> {
    let name = launch.argv.first().ok_or(Failure::new(Step::Arguments, Errno::INVAL))?;
    if name.is_empty() || name.contains('/') {
        return Ok(vec![text(name.clone())?]);
    }
    let path = launch.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    path.split(':')
        .map(|dir| if dir.is_empty() { "." } else { dir })
        .map(|dir| text(format!("{dir}/{name}")))
        .collect()
}

fn text(word: String) -> Result<CString, Failure> {
    CString::new(word).map_err(|_| Failure::new(Step::Arguments, Errno::INVAL))
}

/// The steps. Returns only if one failed.
pub(crate) fn execute(order: &Order, workspace: Option<&OwnedFd>) -> Result<Infallible, Failure> {
    change_directory(order, workspace).map_err(at(Step::WorkingDirectory))?;
    let [stdin, stdout, stderr] = &order.streams;
    fd::replace_streams(stdin, stdout, stderr).map_err(at(Step::Streams))?;
    take_terminal(order).map_err(at(Step::TakeTerminal))?;
    Err(Failure::new(Step::Execute, try_programs(order)))
}

fn change_directory(order: &Order, workspace: Option<&OwnedFd>) -> Result<(), Errno> {
    match (&order.directory, workspace) {
        (Directory::Open(directory), _) => process::change_directory(directory),
        (Directory::InWorkspace(path), Some(workspace)) => {
            process::change_directory(resolve_beneath::open_directory_beneath(workspace, path)?)
        }
        (Directory::InWorkspace(_), None) => Err(Errno::BADF),
    }
}

fn take_terminal(order: &Order) -> Result<(), Errno> {
    if order.terminal { process::take_terminal(io::stdin()) } else { Ok(()) }
}

/// Tries each place; returns only if none could be executed. That one was found and not permitted
/// says more than that the last one was not found.
fn try_programs(order: &Order) -> Errno {
    let mut answer = Errno::NOENT;
    for program in &order.programs {
        match process::execute(program, &order.argv, &order.env) {
            Errno::NOENT | Errno::NOTDIR => {}
            Errno::ACCESS => answer = Errno::ACCESS,
            errno => return errno,
        }
    }
    answer
}
