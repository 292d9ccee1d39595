//! The setup of init itself, before it starts the command's process: one ordered list of steps.

use std::{borrow::Cow, io::Stdin, os::fd::OwnedFd};

use codelia_init::{Failure, Request, Setup, Step};
use codelia_sys::{
    Errno, Pid, cgroup, fd,
    process::{self, SingleThread},
    signal::{self, ChildEvents},
};

use crate::{
    check,
    control::{Control, UNEXPECTED},
    failure::at,
    network,
    no_route::NoRouteCounters,
    restrict,
    view::{self, Made},
};

/// The state that later steps need.
#[derive(Debug)]
pub(crate) struct InitState<'a> {
    pub(crate) process: SingleThread,
    pub(crate) events: ChildEvents,
    pub(crate) setup: Cow<'a, Setup>,
    pub(crate) no_routes: NoRouteCounters,
}

/// Things that a sandbox has of its zygote.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inherited<'a> {
    pub(crate) setup: &'a Setup,
    /// The mounts that cover the runtime.
    pub(crate) made: &'a Made,
    /// Whether an earlier sandbox found the same mounts as expected.
    pub(crate) are_mounts_checked: bool,
}

/// The steps, in order. A step that drops a privilege comes after those that need it.
pub(crate) fn run<'a>(
    control: &mut Control<Stdin>,
    inherited: Option<Inherited<'a>>,
) -> Result<InitState<'a>, Failure> {
    let process = SingleThread::claim().map_err(at(Step::ClaimSingleThread))?;
    fd::redirect_output_to_null().map_err(at(Step::RedirectOutput))?;
    process::new_session().map_err(at(Step::LeaveSession))?;
    process::set_not_dumpable().map_err(at(Step::SetNotDumpable))?;
    process::become_subreaper().map_err(at(Step::BecomeSubreaper))?;
    check_descendants()?;
    let events = watch_children().map_err(at(Step::BlockSignals))?;
    let setup = match inherited {
        Some(inherited) => Cow::Borrowed(inherited.setup),
        None => Cow::Owned(receive_setup(control)?),
    };
    let mut no_routes = NoRouteCounters::default();
    if let Some(security) = &setup.security {
        // After the cgroups are joined: they pay for the sockets. Before the view, which makes the
        // settings of the network read-only.
        if let Some(egress) = &security.egress {
            network::create(egress, &security.expected, control)?;
        }
        // After the cgroups are joined: the root of the new cgroup namespace is the own cgroup.
        let view = security.view.as_ref();
        let made = view
            .map(|view| view::create(view, &security.expected))
            .transpose()?
            .unwrap_or_default();
        check::environment(&security.expected)?;
        if !inherited.is_some_and(|inherited| inherited.are_mounts_checked) {
            let of_zygote =
                inherited.into_iter().flat_map(|inherited| inherited.made.iter().cloned());
            let mut expected = security.expected.clone();
            expected.mounts.extend(of_zygote.chain(made));
            check::mounts(&expected)?;
        }
        // After the check that the network is the sandbox's own.
        no_routes = NoRouteCounters::open(security);
        // Last: no later step of init needs a privilege.
        restrict::drop_privileges(&security.expected)?;
        check::privileges(&security.expected)?;
    }
    Ok(InitState { process, events, setup, no_routes })
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

/// Receives the setup and joins the cgroups. Not earlier, so that the steps before do not count
/// against the command.
fn receive_setup(control: &mut Control<Stdin>) -> Result<Setup, Failure> {
    let Request::Setup(setup) = control.expect_message()? else { return Err(UNEXPECTED) };
    join_cgroups(control.take_first_descriptors(setup.cgroup_fds)?)?;
    Ok(*setup)
}

pub(crate) fn join_cgroups(groups: Vec<OwnedFd>) -> Result<(), Failure> {
    groups.into_iter().try_for_each(cgroup::join).map_err(at(Step::JoinCgroups))
}
