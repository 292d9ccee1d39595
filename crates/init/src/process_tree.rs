//! The processes of the sandbox: watched until the command ends, then killed.

use std::{
    io::Stdin,
    time::{Duration, Instant},
};

use codelia_init::{Exit, ExitStatus, Failure, Request, Step};
use codelia_sys::{
    Errno, Pid,
    process::{self, Reaped},
    signal::{self, ChildEvents},
};

use crate::{control::Control, setup::at};

/// Watches over the command's process until nothing of it is left. `None`: the backend is gone,
/// there is nobody to tell.
pub(crate) fn supervise(
    control: &mut Control<Stdin>,
    events: &ChildEvents,
    main: Pid,
) -> Result<Option<Exit>, Failure> {
    let watched = watch(control, events, main);
    if watched.is_err() {
        // Nothing runs unwatched. The first failure is the one to tell.
        let _ = end_all(main);
    }
    watched
}

fn watch(control: &mut Control<Stdin>, events: &ChildEvents, main: Pid) -> Result<Option<Exit>, Failure> {
    let mut end = None;
    loop {
        let (asked, ended) = signal::wait_readable(&*control, events, end).map_err(at(Step::Supervise))?;
        if !asked && !ended {
            // The backend stands still, and somebody else may have begun where we are.
            return Err(Failure::new(Step::KeepAlive, Errno::TIMEDOUT));
        }
        if ended {
            events.clear().map_err(at(Step::Supervise))?;
            if let Some(status) = reap_until(main)? {
                end_all(main)?;
                return exit(status).map(Some);
            }
        }
        if asked {
            match obey(control, main)? {
                Next::Go(time) => end = time.map(|time| Instant::now() + time).or(end),
                Next::End => return end_all(main)?.map(exit).transpose(),
                Next::Gone => return end_all(main).map(|_| None),
            }
        }
    }
}

enum Next {
    /// Go on watching; no longer than this, if it is said.
    Go(Option<Duration>),
    /// Kill everything and tell.
    End,
    /// Kill everything; nobody listens.
    Gone,
}

fn obey(control: &mut Control<Stdin>, main: Pid) -> Result<Next, Failure> {
    if !control.fill()? {
        return Ok(Next::Gone);
    }
    let mut time = None;
    while let Some(request) = control.next()? {
        match request {
            // The command has not been reaped, so the group is its own. A signal that cannot be
            // sent, for it is none or the group gave up its privileges, changes nothing.
            Request::Signal(number) => drop(process::signal_group(main, number)),
            Request::KeepAlive(most) => time = Some(most),
            Request::Kill => return Ok(Next::End),
            Request::Setup(_) | Request::Launch(_) => {
                return Err(Failure::new(Step::Understand, Errno::PROTO));
            }
        }
    }
    Ok(Next::Go(time))
}

/// Collects what has ended; the command's status if it is among it.
fn reap_until(main: Pid) -> Result<Option<ExitStatus>, Failure> {
    loop {
        match process::reap().map_err(at(Step::Supervise))? {
            Reaped::Ended(pid, status) if pid == main => return Ok(Some(status)),
            Reaped::Ended(..) => {}
            Reaped::StillRunning | Reaped::NoChildren => return Ok(None),
        }
    }
}

/// Kills and collects every descendant: orphans become children, so that none can hide. Answers
/// the command's status if it was among them.
fn end_all(main: Pid) -> Result<Option<ExitStatus>, Failure> {
    let mut status = None;
    loop {
        let mut reaped = process::reap().map_err(at(Step::Supervise))?;
        if reaped == Reaped::StillRunning {
            kill_descendants()?;
            reaped = process::reap_next().map_err(at(Step::Supervise))?;
        }
        match reaped {
            Reaped::NoChildren => return Ok(status),
            Reaped::Ended(pid, ended) if pid == main => status = Some(ended),
            Reaped::Ended(..) | Reaped::StillRunning => {}
        }
    }
}

fn kill_descendants() -> Result<(), Failure> {
    if process::own_pid() == Pid::INIT {
        // At once, so that no fork can outrun it.
        return process::kill_all_others().map_err(at(Step::Supervise));
    }
    let failed = |error: codelia_sys::Error| Failure::new(Step::Supervise, error.errno);
    for pid in process::descendants(process::own_pid()).map_err(failed)? {
        // A process of other ids is killed by its control group or its namespace.
        match process::kill(pid) {
            Ok(()) | Err(Errno::PERM) => {}
            Err(errno) => return Err(Failure::new(Step::Supervise, errno)),
        }
    }
    Ok(())
}

fn exit(status: ExitStatus) -> Result<Exit, Failure> {
    let usage = process::children_usage().map_err(at(Step::Supervise))?;
    Ok(Exit {
        status,
        cpu_time: usage.cpu_time,
        peak_memory_bytes: usage.peak_memory_bytes,
        read_bytes: usage.read_bytes,
        written_bytes: usage.written_bytes,
    })
}
