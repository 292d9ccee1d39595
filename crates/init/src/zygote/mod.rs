//! `codelia-init --zygote`: holds the namespaces and mounts that the sandboxes of a session have in
//! common, and starts sandboxes out of them. It runs as the session's user from its first
//! instruction.
//!
//! A sandbox is a fork of this process in user, mount, PID and IPC namespaces of its own, and
//! continues as its `codelia-init`. It dies with this process, and this process ends with its
//! backend.

mod mounts;
mod networks;

use std::{
    io::{Stdin, stdin},
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use codelia_init::{Failure, HOST_PROC, Report, StartRequest, Step, Zygote, ZygoteRequest};
use codelia_sys::{
    fd, mount,
    process::{self, IsolatedChild, Reaped, SingleThread},
    signal::{self, ChildEvents},
    user_namespace,
};

use crate::{
    control::{Control, UNEXPECTED},
    failure::{at, at_io},
    process_tree,
    setup::{Inherited, join_cgroups},
    view::Made,
};
use networks::Networks;

/// The exit code of a sandbox that failed. Its backend gets the failure as a message.
const FAILED: i32 = 1;

/// The zygote's process.
struct Holder {
    process: SingleThread,
    zygote: Zygote,
    /// The mounts that cover the runtime.
    made: Made,
    networks: Networks,
}

/// Makes the zygote and serves requests until the backend closes the socket.
pub(crate) fn serve(control: &mut Control<Stdin>) -> Result<(), Failure> {
    let process = SingleThread::claim().map_err(at(Step::ClaimSingleThread))?;
    fd::redirect_output_to_null().map_err(at(Step::RedirectOutput))?;
    process::new_session().map_err(at(Step::LeaveSession))?;
    process::set_name(c"codelia-session").map_err(at(Step::LeaveSession))?;
    signal::block_all().map_err(at(Step::BlockSignals))?;
    let events = ChildEvents::open().map_err(at(Step::BlockSignals))?;
    let ZygoteRequest::Create(zygote) = control.expect_message()? else { return Err(UNEXPECTED) };
    let (made, networks) = create(&zygote)?;
    control.send(&Report::Ready, &[])?;
    let mut holder = Holder { process, zygote: *zygote, made, networks };
    loop {
        let [has_request, child_ended] = process_tree::wait(control, &events, None)?;
        if child_ended {
            events.clear().map_err(at(Step::Supervise))?;
            holder.reap()?;
        }
        if has_request {
            // The kernel kills the sandboxes with this process.
            if !control.fill()? {
                return Ok(());
            }
            while let Some(request) = control.next_buffered()? {
                match request {
                    ZygoteRequest::Start(request) => {
                        let start = Start::receive(control, request)?;
                        holder.start(control, start)?;
                    }
                    ZygoteRequest::Create(_) => return Err(UNEXPECTED),
                }
            }
        }
    }
}

/// A sandbox to start.
struct Start {
    /// The control socket of the sandbox.
    socket: OwnedFd,
    /// The directory of the cgroup to start it in.
    group: Option<OwnedFd>,
    /// For joining its cgroups.
    joins: Vec<OwnedFd>,
    are_mounts_checked: bool,
}

impl Start {
    fn receive(control: &mut Control<Stdin>, request: StartRequest) -> Result<Self, Failure> {
        let StartRequest { has_group, cgroup_fds, are_mounts_checked } = request;
        Ok(Self {
            socket: control.take_descriptor()?,
            group: has_group.then(|| control.take_descriptor()).transpose()?,
            joins: control.take_first_descriptors(cgroup_fds)?,
            are_mounts_checked,
        })
    }
}

/// The steps, in order.
fn create(zygote: &Zygote) -> Result<(Made, Networks), Failure> {
    let ids = (process::own_uid(), process::own_gid());
    mount::unshare_for_zygote().map_err(at(Step::ZygoteNamespaces))?;
    user_namespace::map_ids(Path::new("/proc"), (zygote.uid, ids.0), (zygote.gid, ids.1))
        .map_err(at(Step::ZygoteNamespaces))?;
    // After the maps: the files in /proc belong to root then.
    process::set_not_dumpable().map_err(at(Step::SetNotDumpable))?;
    if let Some(name) = &zygote.hostname {
        process::set_host_name(name).map_err(at(Step::ZygoteNamespaces))?;
    }
    let made = mounts::create(zygote).map_err(at_io(Step::ZygoteMounts))?;
    Ok((made, Networks::create(zygote.has_networks).map_err(at(Step::ZygoteNetwork))?))
}

impl Holder {
    /// Starts a sandbox. A failure is reported and does not end the zygote.
    fn start(&mut self, control: &Control<Stdin>, mut start: Start) -> Result<(), Failure> {
        self.reap()?;
        match self.fork(&mut start) {
            Ok(IsolatedChild { pidfd, .. }) => control.send(&Report::Started, &[pidfd.as_fd()]),
            Err(failure) => control.send(&Report::Failed(failure), &[]),
        }
    }

    fn fork(&mut self, start: &mut Start) -> Result<IsolatedChild, Failure> {
        let network = self.networks.enter_free().map_err(at(Step::ZygoteNetwork))?;
        let zygote = &self.zygote;
        let made = &self.made;
        let group = start.group.take();
        let group = group.as_ref().map(AsFd::as_fd);
        let child = |is_in_group| run(zygote, made, start, is_in_group);
        let init = self.process.fork_isolated(group, child).map_err(at(Step::StartSandbox))?;
        self.networks.occupy(network, init.pid);
        Ok(init)
    }

    /// Reaps sandboxes that have ended. No process of them is left then.
    fn reap(&mut self) -> Result<(), Failure> {
        while let Reaped::Ended(pid, _) = process::try_reap().map_err(at(Step::Supervise))? {
            self.networks.release(pid);
        }
        Ok(())
    }
}

/// Runs in the sandbox, as its init, until it ends.
fn run(zygote: &Zygote, made: &Made, start: &mut Start, is_in_group: bool) -> i32 {
    // Its own end is the first thing that a sandbox without a holder must see.
    let joined = fd::replace_stdin(&start.socket).and_then(|()| process::die_with_parent());
    let mut control = Control::new(stdin());
    let served = joined.map_err(at(Step::JoinZygote)).and_then(|()| {
        // First: the cgroups pay for everything that the sandbox makes.
        if !is_in_group {
            join_cgroups(std::mem::take(&mut start.joins))?;
        }
        become_init(zygote)?;
        let setup = &zygote.setup;
        let are_mounts_checked = start.are_mounts_checked;
        crate::serve(&mut control, Some(Inherited { setup, made, are_mounts_checked }))
    });
    match served {
        Ok(()) => 0,
        Err(failure) => {
            // If the backend does not get this, it sees the end of the socket.
            let _ = control.send(&Report::Failed(failure), &[]);
            FAILED
        }
    }
}

/// The steps up to where an init that a tool has executed begins.
fn become_init(zygote: &Zygote) -> Result<(), Failure> {
    process::set_name(c"codelia-init").map_err(at(Step::JoinZygote))?;
    // Only a dumpable process may write its maps. Init makes itself undumpable next.
    process::set_dumpable().map_err(at(Step::JoinZygote))?;
    let uids = (zygote.uid, zygote.uid);
    let gids = (zygote.gid, zygote.gid);
    user_namespace::map_ids(Path::new(HOST_PROC), uids, gids).map_err(at(Step::JoinZygote))?;
    mounts::create_own(&zygote.own_mounts).map_err(at_io(Step::OwnMounts))
}
