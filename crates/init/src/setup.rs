//! The setup of init itself, before it starts the command's process: one ordered list of steps.

use std::{
    io::{self, Stdin},
    path::PathBuf,
};

use codelia_init::{ExpectedMount, Failure, Request, Setup, Step};
use codelia_sys::{
    Errno, Pid, cgroup, fd,
    process::{self, SingleThread},
    signal::{self, ChildEvents},
};

use crate::{check, control::Control, network, no_route::NoRouteCounters, restrict, view};

/// What later steps need.
#[derive(Debug)]
pub(crate) struct InitState {
    pub(crate) process: SingleThread,
    pub(crate) events: ChildEvents,
    pub(crate) setup: Setup,
    pub(crate) no_routes: NoRouteCounters,
}

/// The steps, in order. A step that drops a privilege comes after those that need it.
pub(crate) fn run(
    control: &mut Control<Stdin>,
    made: &[(PathBuf, ExpectedMount)],
) -> Result<InitState, Failure> {
    let process = SingleThread::claim().map_err(at(Step::ClaimSingleThread))?;
    fd::redirect_output_to_null().map_err(at(Step::RedirectOutput))?;
    process::new_session().map_err(at(Step::LeaveSession))?;
    process::set_not_dumpable().map_err(at(Step::SetNotDumpable))?;
    process::become_subreaper().map_err(at(Step::BecomeSubreaper))?;
    check_descendants()?;
    let events = watch_children().map_err(at(Step::BlockSignals))?;
    let mut setup = receive_setup(control)?;
    // Not earlier, so that the steps above do not count against the command.
    join_cgroups(control, setup.cgroup_fds)?;
    let mut no_routes = NoRouteCounters::default();
    if let Some(security) = &mut setup.security {
        // After the cgroups are joined: they pay for the sockets. Before the view, which makes the
        // settings of the network read-only.
        if let Some(egress) = &security.egress {
            network::create(egress, &security.expected, control)?;
        }
        // After the cgroups are joined: the root of the new cgroup namespace is the own cgroup.
        if let Some(view) = &security.view {
            let mounts = view::create(view, &security.expected)?;
            security.expected.mounts.extend(made.iter().cloned().chain(mounts));
        }
        check::environment(&security.expected)?;
        // After the check that the network is the sandbox's own.
        no_routes = NoRouteCounters::open(security);
        // Last: no later step of init needs a privilege.
        restrict::drop_privileges(&security.expected)?;
        check::privileges(&security.expected)?;
    }
    Ok(InitState { process, events, setup, no_routes })
}

/// For `map_err`: adds the step to an errno.
pub(crate) fn at(step: Step) -> impl FnOnce(Errno) -> Failure {
    move |errno| Failure::new(step, errno)
}

/// For `map_err`: adds the step to an I/O error.
pub(crate) fn at_io(step: Step) -> impl FnOnce(io::Error) -> Failure {
    move |error| Failure::new(step, Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// Checks that descendants can be listed. PID 1 can kill them without that.
fn check_descendants() -> Result<(), Failure> {
    if process::own_pid() == Pid::INIT {
        return Ok(());
    }
    let listed = process::descendants(process::own_pid());
    listed.map(drop).map_err(|error| Failure::new(Step::ListDescendants, error.errno))
}

/// Blocks signals and opens the descriptor for children's exits. The command's process inherits the
/// dispositions that are reset here, so a launch need not do it.
fn watch_children() -> Result<ChildEvents, Errno> {
    signal::block_all()?;
    signal::reset_dispositions();
    ChildEvents::open()
}

fn receive_setup(control: &mut Control<Stdin>) -> Result<Setup, Failure> {
    match control.receive_request()? {
        Some(Request::Setup(setup)) => Ok(*setup),
        _ => Err(Failure::new(Step::Protocol, Errno::PROTO)),
    }
}

fn join_cgroups(control: &mut Control<Stdin>, count: usize) -> Result<(), Failure> {
    (0..count).try_for_each(|_| cgroup::join(control.take_descriptor()?).map_err(at(Step::JoinCgroups)))
}
