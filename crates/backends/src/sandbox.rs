//! A sandbox as the host sees it: the control socket, `codelia-init` and its control group. Made by
//! a mode, shared by all; it never outlives its value.

use std::{thread, time::Duration};

use codelia_init::{Report, Request, Setup};
use codelia_policy::Receipt;
use codelia_sys::{Pid, cgroup::Group};
use codelia_telemetry::task;
use tokio::{process::Child, runtime::Handle, time::timeout};

use crate::{Error, control::Control};

/// How long `codelia-init` may take for one answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long it may take to end once the control socket has ended.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// How often, and how far apart, the removal of a group is tried: its last process may be on its
/// way out.
const REMOVALS: u32 = 100;
const BETWEEN_REMOVALS: Duration = Duration::from_millis(10);

/// The same where nothing can be awaited.
const BLOCKING_REMOVALS: u32 = 20;
const BETWEEN_BLOCKING_REMOVALS: Duration = Duration::from_millis(1);

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
    init: Child,
    group: Option<Group>,
}

impl Sandbox {
    pub(crate) fn new(control: Control, init: Child, group: Option<Group>) -> Self {
        Self { control, remains: Some(Remains { init, group }) }
    }

    /// Has `codelia-init` enter its groups and waits until it is ready.
    pub(crate) async fn set_up(&mut self) -> Result<(), Error> {
        let entries = self.group().map(Group::entries).transpose()?.unwrap_or_default();
        let fds: Vec<_> = entries.iter().map(std::os::fd::AsFd::as_fd).collect();
        self.control.send(&Request::Setup(Setup { groups: fds.len() }), &fds).await?;
        match self.answer().await? {
            Report::Ready => Ok(()),
            Report::Failed(failure) => Err(Error::Inside(failure)),
            Report::Started | Report::Exited(_) => Err(Error::OutOfTurn),
        }
    }

    /// Waits for an answer that must come soon.
    pub(crate) async fn answer(&mut self) -> Result<Report, Error> {
        let answer = timeout(PATIENCE, self.control.receive()).await.map_err(|_| Error::Unresponsive)?;
        answer?.ok_or(Error::InitEnded)
    }

    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    pub(crate) fn control_mut(&mut self) -> &mut Control {
        &mut self.control
    }

    pub(crate) fn group(&self) -> Option<&Group> {
        self.remains.as_ref()?.group.as_ref()
    }

    /// Kills every process but `codelia-init`, as far as there is a group to find them by.
    pub(crate) fn kill_group(&self) -> Result<(), Error> {
        let init = self.remains.as_ref().and_then(|remains| Pid::from_raw(remains.init.id()?.cast_signed()));
        match (self.group(), init) {
            (Some(group), Some(init)) => Ok(group.kill_others(init)?),
            (Some(group), None) => Ok(group.kill_all()?),
            (None, _) => Ok(()),
        }
    }

    /// Kills `codelia-init` too. What it was parent of dies with it or by the group.
    pub(crate) async fn kill_hard(&mut self) {
        if let Some(remains) = &mut self.remains {
            remains.kill().await;
        }
    }

    /// Ends it and counts what is left.
    pub(crate) async fn destroy(mut self) -> Receipt {
        let remains = self.remains.take();
        // The end of the control socket is the order to end.
        drop(self);
        match remains {
            Some(remains) => remains.end().await,
            None => Receipt::default(),
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Without a runtime the remains see to themselves.
        if let (Some(remains), Ok(_)) = (self.remains.take(), Handle::try_current()) {
            task::background("sandbox teardown", remains.end());
        }
    }
}

impl Remains {
    async fn end(mut self) -> Receipt {
        let clean = match timeout(END_PATIENCE, self.init.wait()).await {
            Ok(Ok(status)) => status.code().is_some(),
            Ok(Err(_)) | Err(_) => {
                self.kill().await;
                false
            }
        };
        let receipt = match self.group.take() {
            Some(group) => remove(group).await,
            // It ends by itself only when it has no descendants. Otherwise nobody can tell.
            None => Receipt { processes: u32::from(!clean), ..Receipt::default() },
        };
        if !receipt.is_clean() {
            tracing::error!(?receipt, "a sandbox left something behind");
        }
        receipt
    }

    async fn kill(&mut self) {
        if let Err(error) = self.init.start_kill() {
            tracing::debug!(%error, "codelia-init has ended already");
        }
        if let Some(group) = &self.group {
            log(group.kill_all());
        }
        if timeout(END_PATIENCE, self.init.wait()).await.is_err() {
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

async fn remove(mut group: Group) -> Receipt {
    for _ in 0..REMOVALS {
        match group.remove() {
            Ok(()) => return Receipt::default(),
            Err(error) => tracing::debug!(%error, "control group not removed yet"),
        }
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
