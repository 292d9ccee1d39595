//! What init does to itself before it says that it is ready: one list, in order.

use codelia_init::{Failure, Request, Setup, Step};
use codelia_sys::{
    Errno, cgroup, fd,
    process::{self, SingleThread},
    signal::{self, ChildEvents},
};

use crate::control::Control;

/// What later steps need of the set-up.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) process: SingleThread,
    pub(crate) events: ChildEvents,
}

/// The steps. Whatever takes away a privilege that a later step needs comes after that step.
pub(crate) fn enter(control: &mut Control) -> Result<Surroundings, Failure> {
    let process = SingleThread::claim().map_err(at(Step::Claim))?;
    fd::silence_output().map_err(at(Step::SilenceOutput))?;
    process::new_session().map_err(at(Step::LeaveSession))?;
    process::hide_memory().map_err(at(Step::HideMemory))?;
    process::adopt_orphans().map_err(at(Step::AdoptOrphans))?;
    process::descendants(process::own_id())
        .map_err(|error| Failure::new(Step::SeeDescendants, error.errno))?;
    let events = hear_children().map_err(at(Step::Signals))?;
    enter_groups(control)?;
    Ok(Surroundings { process, events })
}

/// For `map_err`: names the step that failed.
pub(crate) fn at(step: Step) -> impl FnOnce(Errno) -> Failure {
    move |errno| Failure::new(step, errno)
}

/// Dispositions are reset here and not in the command's process: it inherits them, and this is not
/// on its way.
fn hear_children() -> Result<ChildEvents, Errno> {
    signal::block_all()?;
    signal::reset_dispositions();
    ChildEvents::open()
}

/// Last, so that nothing of the above counts against the command.
fn enter_groups(control: &mut Control) -> Result<(), Failure> {
    let Some(Request::Setup(Setup { groups })) = control.receive()? else {
        return Err(Failure::new(Step::Understand, Errno::PROTO));
    };
    for entry in control.take_descriptors(groups)? {
        cgroup::enter(&entry).map_err(at(Step::EnterGroups))?;
    }
    Ok(())
}
