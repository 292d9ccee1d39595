//! The processes of the sandbox: supervised until the command ends, then killed and reaped.

use std::{
    io::Stdin,
    time::{Duration, Instant},
};

use codelia_init::{Exit, ExitStatus, Failure, Request, Step};
use codelia_sys::{
    Errno, Pid, fd,
    process::{self, Reaped},
    signal::ChildEvents,
};

use crate::{
    control::{Control, UNEXPECTED},
    failure::at,
};

/// Supervises the command's process until no process is left. Returns `None` if the backend is gone
/// and cannot receive a report.
pub(crate) fn supervise(
    control: &mut Control<Stdin>,
    events: &ChildEvents,
    main: Pid,
) -> Result<Option<Exit>, Failure> {
    let result = watch(control, events, main);
    if result.is_err() {
        // Nothing may run unsupervised. Report the first failure, not one of this cleanup.
        let _ = kill_and_reap_all(main);
    }
    result
}

fn watch(
    control: &mut Control<Stdin>,
    events: &ChildEvents,
    main: Pid,
) -> Result<Option<Exit>, Failure> {
    let mut deadline = None;
    loop {
        let [has_request, child_ended] = wait(&*control, events, deadline)?;
        if !has_request && !child_ended {
            // The deadline passed: the backend hangs, and another worker may have the session now.
            return Err(Failure::new(Step::KeepAlive, Errno::TIMEDOUT));
        }
        if child_ended {
            events.clear().map_err(at(Step::Supervise))?;
            if let Some(status) = reap_until(main)? {
                kill_and_reap_all(main)?;
                return exit(status).map(Some);
            }
        }
        if has_request {
            match handle_requests(control, main)? {
                Next::Continue(time) => {
                    deadline = time.map(|time| Instant::now() + time).or(deadline)
                }
                Next::Kill => return kill_and_reap_all(main)?.map(exit).transpose(),
                Next::BackendGone => return kill_and_reap_all(main).map(|_| None),
            }
        }
    }
}

/// Waits until there is something to do. Returns whether it is a message, and whether it is the end
/// of a child: neither if the deadline passes first.
pub(crate) fn wait(
    control: &Control<Stdin>,
    events: &ChildEvents,
    deadline: Option<Instant>,
) -> Result<[bool; 2], Failure> {
    let ready = fd::wait_readable(control, events, deadline).map_err(at(Step::Supervise))?;
    Ok(ready.map(|ready| ready != fd::Readiness::Pending))
}

/// How to continue after handling requests.
enum Next {
    /// Continue, with a new deadline if there is one.
    Continue(Option<Duration>),
    /// Kill everything and report the exit.
    Kill,
    /// Kill everything without a report.
    BackendGone,
}

fn handle_requests(control: &mut Control<Stdin>, main: Pid) -> Result<Next, Failure> {
    if !control.fill()? {
        return Ok(Next::BackendGone);
    }
    let mut keep_alive = None;
    while let Some(request) = control.next_buffered()? {
        match request {
            // The command is not reaped yet, so the group is its own. Failing to send a signal,
            // because it is invalid or the group changed its ids, is not an error.
            Request::Signal(number) => drop(process::signal_process_group(main, number)),
            Request::KeepAlive(time) => keep_alive = Some(time),
            Request::Kill => return Ok(Next::Kill),
            Request::Setup(_) | Request::Launch(_) => return Err(UNEXPECTED),
        }
    }
    Ok(Next::Continue(keep_alive))
}

/// Reaps processes that have ended. Returns the command's status if it is among them.
fn reap_until(main: Pid) -> Result<Option<ExitStatus>, Failure> {
    loop {
        match process::try_reap().map_err(at(Step::Supervise))? {
            Reaped::Ended(pid, status) if pid == main => return Ok(Some(status)),
            Reaped::Ended(..) => {}
            Reaped::StillRunning | Reaped::NoChildren => return Ok(None),
        }
    }
}

/// Kills and reaps every descendant. Orphans become children of init, so none can escape. Returns
/// the command's status if it was among them.
fn kill_and_reap_all(main: Pid) -> Result<Option<ExitStatus>, Failure> {
    let mut main_status = None;
    loop {
        let mut reaped = process::try_reap().map_err(at(Step::Supervise))?;
        if reaped == Reaped::StillRunning {
            kill_descendants()?;
            reaped = process::reap_next().map_err(at(Step::Supervise))?;
        }
        match reaped {
            Reaped::NoChildren => return Ok(main_status),
            Reaped::Ended(pid, status) if pid == main => main_status = Some(status),
            Reaped::Ended(..) | Reaped::StillRunning => {}
        }
    }
}

fn kill_descendants() -> Result<(), Failure> {
    if process::own_pid() == Pid::INIT {
        // One call for all, so that no fork can outrun it.
        return process::kill_all_others().map_err(at(Step::Supervise));
    }
    let failed = |error: codelia_sys::Error| Failure::new(Step::Supervise, error.errno);
    for pid in process::descendants(process::own_pid()).map_err(failed)? {
        match process::kill(pid) {
            // A process with other ids is killed through its cgroup or its namespace.
            Ok(()) | Err(Errno::PERM) => {}
            Err(errno) => return Err(Failure::new(Step::Supervise, errno)),
        }
    }
    Ok(())
}

fn exit(status: ExitStatus) -> Result<Exit, Failure> {
    let usage = process::children_usage().map_err(at(Step::Supervise))?;
    Ok(Exit { status, usage, unreachable_attempts: 0 })
}
