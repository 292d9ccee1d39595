//! From the order to the running command: one list of steps, in order.

use std::{convert::Infallible, ffi::CString, io, os::fd::OwnedFd};

use codelia_init::{Failure, Launch, Request, Step};
use codelia_sys::{
    Errno, Pid, fd,
    process::{self, SingleThread},
    rlimit, signal,
};

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
    launch: Launch,
    streams: [OwnedFd; 3],
    directory: OwnedFd,
}

/// Waits for the command; `None` if the sandbox is discarded instead.
pub(crate) fn receive(control: &mut Control) -> Result<Option<Order>, Failure> {
    let launch = match control.receive()? {
        None | Some(Request::Kill) => return Ok(None),
        Some(Request::Launch(launch)) => launch,
        Some(Request::Setup(_) | Request::Signal(_)) => {
            return Err(Failure::new(Step::Understand, Errno::PROTO));
        }
    };
    let descriptors = control.take_descriptors(Launch::DESCRIPTORS)?;
    let [stdin, stdout, stderr, directory] =
        descriptors.try_into().map_err(|_| Failure::new(Step::Understand, Errno::BADF))?;
    Ok(Some(Order {
        programs: programs(&launch)?,
        argv: launch.argv.iter().map(|word| text(word.clone())).collect::<Result<_, _>>()?,
        env: launch
            .env
            .iter()
            .map(|(key, value)| text(format!("{key}={value}")))
            .collect::<Result<_, _>>()?,
        launch,
        streams: [stdin, stdout, stderr],
        directory,
    }))
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

/// Starts the command and returns when its program was executed.
pub(crate) fn start(process: &SingleThread, order: Order) -> Result<Pid, Failure> {
    let (pid, failure) = process.spawn(|| become_command(&order)).map_err(at(Step::Spawn))?;
    match failure {
        None => Ok(pid),
        Some(Err(failure)) => {
            // The child has ended; it is not left to others to collect.
            process::reap_next().map_err(at(Step::Spawn))?;
            Err(failure)
        }
    }
}

/// The steps. Descriptors go last, since they are needed until then.
fn become_command(order: &Order) -> Result<Infallible, Failure> {
    let [stdin, stdout, stderr] = &order.streams;
    process::die_with_parent().map_err(at(Step::DieWithInit))?;
    process::new_session().map_err(at(Step::NewSession))?;
    fd::replace_streams(stdin, stdout, stderr).map_err(at(Step::Streams))?;
    take_terminal(order).map_err(at(Step::TakeTerminal))?;
    process::change_directory(&order.directory).map_err(at(Step::WorkingDirectory))?;
    limit(order).map_err(at(Step::Rlimits))?;
    fd::keep_from_command().map_err(at(Step::KeepDescriptors))?;
    signal::unblock_all().map_err(at(Step::UnblockSignals))?;
    Err(Failure::new(Step::Execute, execute(order)))
}

fn take_terminal(order: &Order) -> Result<(), Errno> {
    if order.launch.terminal { process::take_terminal(io::stdin()) } else { Ok(()) }
}

fn limit(order: &Order) -> Result<(), Errno> {
    order.launch.rlimits.iter().try_for_each(|limit| rlimit::lower(limit.resource, limit.most))
}

/// Tries each place; returns only if none could be executed. That one was found and not permitted
/// says more than that the last one was not found.
fn execute(order: &Order) -> Errno {
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
