//! One sandbox as the host sees it, shared by every mode: the control socket, the process around
//! `codelia-init`, and the control group. It never outlives its value.
//!
//! A mode creates the control group and starts `codelia-init` in the sandbox with the other end of
//! [`control::Control::pair`] as its standard input and no other descriptor (or has it connect,
//! where nothing can be inherited). It makes a [`Sandbox`] of them and passes it to
//! [`prepared::prepare`] with the setup of [`setup::for_plan`].
//!
//! In an isolating mode init must be PID 1, must already have the ids of the command, and must
//! either hold `CAP_SETPCAP` in its user namespace or have an empty bounding set. It drops all
//! privileges itself and fails if it cannot.

pub(crate) mod cgroups;
pub(crate) mod child;
mod cleanup;
pub(crate) mod control;
mod descriptors;
pub(crate) mod egress;
mod executable_memory;
mod executions;
pub(crate) mod isolation_check;
mod near_limits;
pub(crate) mod operations;
mod outcome;
pub(crate) mod prepared;
pub(crate) mod process;
pub(crate) mod reads;
mod running;
pub(crate) mod setup;
mod supervisor;
mod wake;
mod watch;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use codelia_init::{Report, Request, Setup};
use codelia_sys::{cgroup::Group, process::TreeRoot};
use codelia_telemetry::task;
use codelia_types::Receipt;
use tokio::{runtime::Handle, time::timeout};

use crate::{EgressSockets, Error};
use cleanup::Cleanup;
pub(crate) use cleanup::remove_group;
use control::Control;
use process::SandboxProcess;

/// How long `codelia-init` may take to report that it is ready.
pub(crate) const SETUP_TIMEOUT: Duration = Duration::from_secs(10);

/// A live sandbox. Dropping it destroys it in the background.
#[derive(Debug)]
pub(crate) struct Sandbox {
    control: Control,
    /// Taken when the sandbox is destroyed.
    cleanup: Option<Cleanup>,
}

/// The parts that `codelia-init` sends when it is ready.
#[derive(Debug)]
pub(crate) struct Ready {
    /// Socket to the command's process. `None` if init relays the launch.
    pub(crate) launch: Option<Control>,
    /// Receives the system calls that the filter blocks. `None` without a filter that notifies.
    pub(crate) listener: Option<OwnedFd>,
    /// The sockets of the network, if init created it.
    pub(crate) egress: Option<EgressSockets>,
}

/// Which parts of [`Ready`] a setup asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadyParts {
    launch: bool,
    listener: bool,
    egress: bool,
}

impl ReadyParts {
    pub(crate) fn of_setup(setup: &Setup) -> Self {
        let security = setup.security.as_ref();
        Self {
            launch: !setup.relay_launch,
            listener: security.is_some_and(|security| security.notify),
            egress: security.is_some_and(|security| security.egress.is_some()),
        }
    }
}

impl Sandbox {
    pub(crate) fn new(
        control: Control,
        process: Box<dyn SandboxProcess>,
        group: Option<Group>,
    ) -> Self {
        Self { control, cleanup: Some(Cleanup { process, group }) }
    }

    /// Starts the process around `codelia-init`, which gets the other end of the control socket.
    /// Removes the group if that fails; the sandbox removes it otherwise.
    pub(crate) fn start<P: SandboxProcess + 'static>(
        group: Option<Group>,
        start: impl FnOnce(OwnedFd) -> Result<P, Error>,
    ) -> Result<Self, Error> {
        let started = Control::pair().and_then(|(control, remote)| Ok((control, start(remote)?)));
        match (started, group) {
            (Ok((control, process)), group) => Ok(Self::new(control, Box::new(process), group)),
            (Err(error), Some(mut group)) => {
                group.remove()?;
                Err(error)
            }
            (Err(error), None) => Err(error),
        }
    }

    /// Has `codelia-init` join its control groups and restrict itself. Waits until it is ready.
    pub(crate) async fn set_up(&mut self, setup: Setup) -> Result<Ready, Error> {
        let join_fds = self.group().map(Group::join_fds).transpose()?.unwrap_or_default();
        let fds: Vec<_> = join_fds.iter().map(AsFd::as_fd).collect();
        let parts = ReadyParts::of_setup(&setup);
        let request = Request::Setup(Box::new(Setup { cgroup_fds: fds.len(), ..setup }));
        let sent = self.control.send(&request, &fds).await;
        // If sending failed, init may have reported why before it exited.
        self.ready(parts).await.or_else(|error| sent.and(Err(error)))
    }

    /// Waits until `codelia-init` is ready.
    pub(crate) async fn ready(&mut self, parts: ReadyParts) -> Result<Ready, Error> {
        let mut report = self.receive_report().await?;
        let mut egress = None;
        if parts.egress && report == Report::Egress {
            egress = Some(egress::take(&mut self.control)?);
            report = self.receive_report().await?;
        }
        match report {
            Report::Ready if parts.egress == egress.is_some() => {}
            Report::Failed(failure) => return Err(Error::InitFailed(failure)),
            _ => return Err(Error::UnexpectedMessage),
        }
        self.require_group()?;
        if let Some(cleanup) = &self.cleanup {
            cleanup.process.limit_terminals().map_err(io::Error::from)?;
        }
        Ok(Ready {
            launch: parts
                .launch
                .then(|| Control::new(self.control.take_descriptor()?))
                .transpose()?,
            listener: parts.listener.then(|| self.control.take_descriptor()).transpose()?,
            egress,
        })
    }

    /// Checks from outside that init has joined its group. Without that no limit of the group
    /// holds, and what it counts is zero.
    fn require_group(&self) -> Result<(), Error> {
        match self.group().map(Group::has_processes).transpose()? {
            Some(false) => Err(Error::OutsideGroup),
            Some(true) | None => Ok(()),
        }
    }

    async fn receive_report(&mut self) -> Result<Report, Error> {
        let report =
            timeout(SETUP_TIMEOUT, self.control.receive()).await.map_err(|_| Error::InitTimeout)?;
        report?.ok_or(Error::InitExited)
    }

    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    /// Where the processes of the sandbox begin, if this process sees them.
    pub(crate) fn tool(&self) -> Option<TreeRoot> {
        self.cleanup.as_ref()?.process.tool()
    }

    /// The control socket and the group, to use both at the same time.
    pub(crate) fn parts(&mut self) -> (&mut Control, Option<&Group>) {
        (&mut self.control, self.cleanup.as_ref().and_then(|cleanup| cleanup.group.as_ref()))
    }

    pub(crate) fn group(&self) -> Option<&Group> {
        self.cleanup.as_ref()?.group.as_ref()
    }

    /// Lifts the group's CPU limit so that `codelia-init` can kill its processes quickly. Where
    /// init shares our PID namespace, also kills every process but init: it may be outrun by forks.
    pub(crate) fn kill_group(&self) -> Result<(), Error> {
        let Some(Cleanup { process, group: Some(group) }) = &self.cleanup else { return Ok(()) };
        group.lift_cpu_limit()?;
        match process.init_in_host_namespace() {
            Some(init) => Ok(group.kill_others(init)?),
            None => Ok(()),
        }
    }

    /// Kills `codelia-init` too. Its children die with it or with the group.
    pub(crate) async fn kill_init(&mut self) {
        if let Some(cleanup) = &mut self.cleanup {
            cleanup.kill().await;
        }
    }

    /// Whether the sandbox ended because it ran out of memory. Ask once it has ended.
    pub(crate) async fn ran_out_of_memory(&mut self) -> bool {
        match &mut self.cleanup {
            Some(cleanup) => cleanup.process.ran_out_of_memory().await,
            None => false,
        }
    }

    /// Ends the sandbox and counts what is left.
    pub(crate) async fn destroy(mut self) -> Receipt {
        let Some(cleanup) = self.cleanup.take() else { return Receipt::default() };
        let mut socket = self.shut_down_control();
        if socket.is_none() {
            descriptors::available().await;
            socket = self.shut_down_control();
        }
        cleanup.run(socket).await
    }

    /// Shuts the control socket down, which orders init to end. Returns our end of the socket, or
    /// `None` if it could not be kept.
    fn shut_down_control(&self) -> Option<OwnedFd> {
        let socket = self.control.shut_down();
        socket.inspect_err(|error| tracing::warn!(%error, "control socket not shut down")).ok()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Without a runtime, dropping the cleanup removes what it can.
        if let (Some(cleanup), Ok(_)) = (self.cleanup.take(), Handle::try_current()) {
            task::background("sandbox teardown", cleanup.run(self.shut_down_control()));
        }
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;

    /// A process that has ended and left nothing.
    #[derive(Debug)]
    struct Ended;

    #[async_trait]
    impl SandboxProcess for Ended {
        async fn wait(&mut self) -> bool {
            true
        }

        async fn kill(&mut self) {}
    }

    #[tokio::test]
    async fn open_socket_is_counted_in_the_receipt() {
        for (is_open, sockets) in [(true, 1), (false, 0)] {
            let (control, remote) = Control::pair().unwrap();
            let open = is_open.then_some(remote);
            let receipt = Sandbox::new(control, Box::new(Ended), None).destroy().await;
            assert_eq!(receipt, Receipt { sockets, ..Receipt::default() });
            drop(open);
        }
    }
}
