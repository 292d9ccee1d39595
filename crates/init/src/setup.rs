//! What init does to itself before it starts the command's process: one list, in order.

use std::io::Stdin;

use codelia_init::{Failure, Request, Setup, Step};
use codelia_sys::{
    Errno, Pid, cgroup, fd,
    process::{self, SingleThread},
    signal::{self, ChildEvents},
};

use crate::{check, control::Control, restrict};

/// What later steps need of the set-up.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) process: SingleThread,
    pub(crate) events: ChildEvents,
    pub(crate) setup: Setup,
}

/// The steps. Whatever takes away a privilege that a later step needs comes after that step.
pub(crate) fn enter(control: &mut Control<Stdin>) -> Result<Surroundings, Failure> {
    let process = SingleThread::claim().map_err(at(Step::Claim))?;
    fd::silence_output().map_err(at(Step::SilenceOutput))?;
    process::new_session().map_err(at(Step::LeaveSession))?;
    process::hide_memory().map_err(at(Step::HideMemory))?;
    process::adopt_orphans().map_err(at(Step::AdoptOrphans))?;
    see_descendants()?;
    let events = hear_children().map_err(at(Step::Signals))?;
    let setup = receive(control)?;
    // Not earlier, so that nothing of the above counts against the command.
    enter_groups(control, setup.cgroup_fds)?;
    if let Some(security) = &setup.security {
        check::surroundings(&security.expected)?;
        restrict::give_up_privileges()?;
    }
    Ok(Surroundings { process, events, setup })
}

/// For `map_err`: names the step that failed.
pub(crate) fn at(step: Step) -> impl FnOnce(Errno) -> Failure {
    move |errno| Failure::new(step, errno)
}

/// Process 1 can kill all others without seeing them.
fn see_descendants() -> Result<(), Failure> {
    if process::own_pid() == Pid::INIT {
        return Ok(());
    }
    let seen = process::descendants(process::own_pid());
    seen.map(drop).map_err(|error| Failure::new(Step::SeeDescendants, error.errno))
}

/// Dispositions are reset here and not in the command's process: it inherits them, and this is not
/// on its way.
fn hear_children() -> Result<ChildEvents, Errno> {
    signal::block_all()?;
    signal::reset_dispositions();
    ChildEvents::open()
}

fn receive(control: &mut Control<Stdin>) -> Result<Setup, Failure> {
    match control.receive()? {
        Some(Request::Setup(setup)) => Ok(setup),
        _ => Err(Failure::new(Step::Understand, Errno::PROTO)),
    }
}

fn enter_groups(control: &mut Control<Stdin>, count: usize) -> Result<(), Failure> {
    (0..count).try_for_each(|_| cgroup::enter(control.take_descriptor()?).map_err(at(Step::EnterGroups)))
}
