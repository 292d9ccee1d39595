//! A sandbox as the host sees it: the control socket, what holds `codelia-init`, and its control
//! group. Made by a mode, shared by all; it never outlives its value.
//!
//! A mode creates the group, starts `codelia-init` inside with the other end of [`Control::pair`] as
//! its standard input and nothing else, or has it connect where nothing can be inherited, makes a
//! [`Sandbox`] of them, and gives it to [`crate::sandbox::prepared::prepare`] with the set-up of
//! [`crate::sandbox::setup::of`]. In an isolating mode init must be process 1, already have the ids of the
//! command, and either hold `CAP_SETPCAP` in its user namespace or have an empty bounding set: it gives
//! up all that itself and fails if it cannot.

use std::{os::fd::OwnedFd, thread, time::Duration};

use codelia_init::{Report, Request, Setup};
use codelia_sys::{cgroup::Group, fd};
use codelia_telemetry::task;
use codelia_types::Receipt;
use tokio::{runtime::Handle, time::timeout};

use crate::{Error, sandbox::control::Control, sandbox::sandbox_process::Holder};

/// How long `codelia-init` may take for one answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long it may take to end once the control socket has ended.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// How often, and how far apart, the removal of a group is tried: its last process may be on its
/// way out.
const REMOVALS: u32 = 300;
const BETWEEN_REMOVALS: Duration = Duration::from_millis(10);

/// The same where nothing can be awaited.
const BLOCKING_REMOVALS: u32 = 20;
const BETWEEN_BLOCKING_REMOVALS: Duration = Duration::from_millis(1);

/// How often a socket is looked at before it counts as left.
const SOCKET_LOOKS: u32 = 50;

/// A living sandbox. Dropped, it is destroyed in the background.
#[derive(Debug)]
pub(crate) struct Sandbox {
    control: Control,
    /// Taken when the sandbox ends.
    remains: Option<Remains>,
}

/// What is there until it is taken away.
#[derive(Debug)]
struct Remains {
    holder: Box<dyn Holder>,
    group: Option<Group>,
}

/// What `codelia-init` gives out when it is ready.
#[derive(Debug)]
pub(crate) struct Ready {
    /// To the command's process, unless init relays the launch.
    pub(crate) launch: Option<Control>,
    /// Tells of the calls that the filter blocks; there if there is a filter.
    pub(crate) listener: Option<OwnedFd>,
}

impl Sandbox {
    pub(crate) fn new(control: Control, holder: Box<dyn Holder>, group: Option<Group>) -> Self {
        Self { control, remains: Some(Remains { holder, group }) }
    }

    /// Has `codelia-init` enter its groups and restrict itself; waits until it is ready.
    pub(crate) async fn set_up(&mut self, setup: Setup) -> Result<Ready, Error> {
        let entries = self.group().map(Group::join_fds).transpose()?.unwrap_or_default();
        let fds: Vec<_> = entries.iter().map(std::os::fd::AsFd::as_fd).collect();
        let (relays, tells) =
            (setup.relay_launch, setup.security.as_ref().is_some_and(|security| security.notify));
        let sent = self.control.send(&Request::Setup(Setup { cgroup_fds: fds.len(), ..setup }), &fds).await;
        // Who does not listen may have said why.
        match self.answer().await.or_else(|error| sent.and(Err(error)))? {
            Report::Ready => Ok(Ready {
                launch: (!relays).then(|| Control::new(self.control.take_descriptor()?)).transpose()?,
                listener: tells.then(|| self.control.take_descriptor()).transpose()?,
            }),
            Report::Failed(failure) => Err(Error::InitFailed(failure)),
            Report::Launched | Report::Exited(_) => Err(Error::OutOfTurn),
        }
    }

    /// Waits for an answer that must come soon.
    async fn answer(&mut self) -> Result<Report, Error> {
        let answer = timeout(PATIENCE, self.control.receive()).await.map_err(|_| Error::Unresponsive)?;
        answer?.ok_or(Error::InitEnded)
    }

    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    /// What the command's end is heard from, and what is counted until then.
    pub(crate) fn ends(&mut self) -> (&mut Control, Option<&Group>) {
        (&mut self.control, self.remains.as_ref().and_then(|remains| remains.group.as_ref()))
    }

    pub(crate) fn group(&self) -> Option<&Group> {
        self.remains.as_ref()?.group.as_ref()
    }

    /// Kills every process but `codelia-init`, where it cannot be left to that alone; elsewhere it only
    /// gets the means to do so.
    pub(crate) fn kill_group(&self) -> Result<(), Error> {
        let Some(group) = self.group() else { return Ok(()) };
        group.lift_cpu_limit()?;
        match self.remains.as_ref().and_then(|remains| remains.holder.bare_init()) {
            Some(init) => Ok(group.kill_others(init)?),
            None => Ok(()),
        }
    }

    /// Kills `codelia-init` too. What it was parent of dies with it or by the group.
    pub(crate) async fn kill_hard(&mut self) {
        if let Some(remains) = &mut self.remains {
            remains.kill().await;
        }
    }

    /// Whether it ended for want of memory, once it has ended.
    pub(crate) async fn ran_out_of_memory(&mut self) -> bool {
        match &mut self.remains {
            Some(remains) => remains.holder.ran_out_of_memory().await,
            None => false,
        }
    }

    /// Ends it and counts what is left.
    pub(crate) async fn destroy(mut self) -> Receipt {
        match self.remains.take() {
            Some(remains) => remains.end(self.order_end()).await,
            None => Receipt::default(),
        }
    }
}

impl Sandbox {
    /// The end of the control socket is the order to end. Answers our end of it, if it could be kept.
    fn order_end(&self) -> Option<OwnedFd> {
        self.control.end().inspect_err(|error| tracing::warn!(%error, "control socket not ended")).ok()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Without a runtime the remains see to themselves.
        if let (Some(remains), Ok(_)) = (self.remains.take(), Handle::try_current()) {
            task::background("sandbox teardown", remains.end(self.order_end()));
        }
    }
}

impl Remains {
    async fn end(mut self, socket: Option<OwnedFd>) -> Receipt {
        let clean = match timeout(END_PATIENCE, self.holder.ended()).await {
            Ok(clean) => clean,
            Err(_) => {
                self.kill().await;
                false
            }
        };
        let mut receipt = match self.group.take() {
            Some(group) => remove(group).await,
            // It ends by itself only when it has no descendants. Otherwise nobody can tell.
            None => Receipt { processes: u32::from(!clean), ..Receipt::default() },
        };
        // Last, for what was killed may have needed until now to die.
        let held = self.holder.remove().await;
        receipt.processes += held.processes;
        receipt.mounts += held.mounts;
        receipt.cgroups += held.cgroups;
        receipt.directories += held.directories;
        let is_closed = match socket {
            Some(socket) => is_closed_soon(&socket).await,
            None => false,
        };
        receipt.sockets += held.sockets + u32::from(!is_closed);
        if !receipt.is_clean() {
            tracing::error!(?receipt, "a sandbox left something behind");
        }
        receipt
    }

    async fn kill(&mut self) {
        self.holder.kill().await;
        if let Some(group) = &self.group {
            log(group.lift_cpu_limit());
            log(group.kill_all());
        }
        if timeout(END_PATIENCE, self.holder.ended()).await.is_err() {
            tracing::error!("codelia-init does not die");
        }
    }
}

/// Where nothing can be awaited: the runtime is gone or going.
impl Drop for Remains {
    fn drop(&mut self) {
        let Some(mut group) = self.group.take() else { return };
        for _ in 0..BLOCKING_REMOVALS {
            log(group.kill_all());
            if group.remove().is_ok() {
                return;
            }
            thread::sleep(BETWEEN_BLOCKING_REMOVALS);
        }
        tracing::error!(?group, "a control group is left behind");
    }
}

/// Whether the other end of a socket is closed everywhere. A program that is being started has a copy of all that we hold
/// until it is executed. One that cannot be looked at is not closed.
async fn is_closed_soon(socket: &OwnedFd) -> bool {
    for _ in 0..SOCKET_LOOKS {
        if fd::is_peer_closed(socket).unwrap_or(false) {
            return true;
        }
        tokio::time::sleep(BETWEEN_REMOVALS).await;
    }
    false
}

async fn remove(mut group: Group) -> Receipt {
    for _ in 0..REMOVALS {
        match group.remove() {
            Ok(()) => return Receipt::default(),
            Err(error) => tracing::debug!(%error, "control group not removed yet"),
        }
        log(group.lift_cpu_limit());
        log(group.kill_all());
        tokio::time::sleep(BETWEEN_REMOVALS).await;
    }
    let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
    Receipt {
        // A list that cannot be read is not an empty one.
        processes: group.processes().map_or(1, |processes| count(processes.len())),
        cgroups: count(group.directories().count()),
        ..Receipt::default()
    }
}

fn log(result: Result<(), codelia_sys::Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, "control group not killed");
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;

    /// Of which nothing is left.
    #[derive(Debug)]
    struct Ended;

    #[async_trait]
    impl Holder for Ended {
        async fn ended(&mut self) -> bool {
            true
        }

        async fn kill(&mut self) {}
    }

    #[tokio::test]
    async fn a_socket_that_somebody_still_holds_is_counted() {
        for (is_held, sockets) in [(true, 1), (false, 0)] {
            let (control, there) = Control::pair().unwrap();
            let held = is_held.then_some(there);
            let receipt = Sandbox::new(control, Box::new(Ended), None).destroy().await;
            assert_eq!(receipt, Receipt { sockets, ..Receipt::default() });
            drop(held);
        }
    }
}
