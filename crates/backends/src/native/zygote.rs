//! A zygote as the worker sees it: the process that holds it, and the socket to that process.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use codelia_init::{Report, StartRequest, ZygoteRequest};
use codelia_policy::Ids;
use codelia_sys::{
    cgroup::Group,
    fd,
    process::{self, PidFd},
    spawn::Program,
};
use tokio::{sync::Mutex, time::timeout};

use crate::{
    Error,
    sandbox::{SETUP_TIMEOUT, child::ChildProcess, control::Control},
};

use super::plan::ZygoteSpec;

/// A zygote. Dropping it kills its process, and with that its sandboxes.
#[derive(Debug)]
pub(super) struct Zygote {
    /// Locked until a request is answered.
    requests: Mutex<Requests>,
    /// Whether one of its sandboxes has found its mounts as planned.
    are_mounts_checked: AtomicBool,
    _process: ChildProcess,
}

/// The socket to the process.
#[derive(Debug)]
struct Requests {
    socket: Control,
    /// Whether nobody received the last answer, so that the next one could be taken for it.
    is_unanswered: bool,
}

/// A sandbox that has started.
#[derive(Debug)]
pub(super) struct Started {
    /// The socket to its init.
    pub(super) control: Control,
    pub(super) init: PidFd,
}

impl Zygote {
    /// Starts the process in these namespaces and waits until the zygote is made.
    pub(super) async fn create(
        init: &Path,
        spec: &ZygoteSpec,
        namespaces: Vec<OwnedFd>,
    ) -> Result<Self, Error> {
        let (mut socket, remote) = Control::pair()?;
        let process = start(init, spec.ids, remote, namespaces)
            .map_err(|cause| Error::InitStart { path: init.to_owned(), cause })?;
        let request = ZygoteRequest::Create(Box::new(spec.zygote.clone()));
        let sent = socket.send(&request, &[]).await;
        // If sending failed, the process may have reported why before it exited.
        let ready = timeout(SETUP_TIMEOUT, socket.expect_report(Report::Ready)).await;
        match ready.map_err(|_| Error::InitTimeout)? {
            Ok(()) => {}
            Err(Error::InitExited) => return sent.and(Err(Error::InitExited)),
            Err(error) => return Err(error),
        }
        Ok(Self {
            requests: Mutex::new(Requests { socket, is_unanswered: false }),
            are_mounts_checked: AtomicBool::new(false),
            _process: process,
        })
    }

    /// Starts a sandbox in this control group.
    pub(super) async fn start(&self, group: Option<&Group>) -> Result<Started, Error> {
        timeout(SETUP_TIMEOUT, self.request_start(group)).await.map_err(|_| Error::InitTimeout)?
    }

    /// The later sandboxes need not check their mounts.
    pub(super) fn set_mounts_checked(&self) {
        self.are_mounts_checked.store(true, Ordering::Relaxed);
    }

    async fn request_start(&self, group: Option<&Group>) -> Result<Started, Error> {
        let (control, remote) = Control::pair()?;
        let directory = group.map_or(Ok(None), start_directory)?;
        let joins = group.map_or_else(|| Ok(Vec::new()), Group::join_fds)?;
        let request = ZygoteRequest::Start(StartRequest {
            has_group: directory.is_some(),
            cgroup_fds: joins.len(),
            are_mounts_checked: self.are_mounts_checked.load(Ordering::Relaxed),
        });
        let fds: Vec<_> =
            [&remote].into_iter().chain(&directory).chain(&joins).map(AsFd::as_fd).collect();
        let mut requests = self.requests.lock().await;
        let init = requests.start(&request, &fds).await?;
        Ok(Started { control, init })
    }
}

impl Requests {
    async fn start(
        &mut self,
        request: &ZygoteRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<PidFd, Error> {
        if std::mem::replace(&mut self.is_unanswered, true) {
            return Err(Error::InitExited);
        }
        self.socket.send(request, fds).await?;
        let started = self.socket.expect_report(Report::Started).await;
        self.is_unanswered = matches!(started, Err(Error::Control(_) | Error::Frame(_)));
        started?;
        Ok(self.socket.take_descriptor()?.into())
    }
}

/// The directory to start a sandbox in. The kernel asks whether the user of the holder may write to
/// the group and to the one above it. With a worker that is root that is another user, who could
/// then move processes of other sessions: there init joins the group through descriptors of the
/// worker.
fn start_directory(group: &Group) -> Result<Option<OwnedFd>, Error> {
    if process::own_uid() == 0 { Ok(None) } else { Ok(group.open_directory()?) }
}

/// The process has the session's user from its first instruction, without privileges.
fn start(
    init: &Path,
    Ids { uid, gid }: Ids,
    socket: OwnedFd,
    namespaces: Vec<OwnedFd>,
) -> io::Result<ChildProcess> {
    let streams = [socket, fd::dev_null()?, fd::dev_null()?];
    let program = Program::new(init, ["--zygote"], streams)?.enter_namespaces(namespaces);
    // Only root can change users. For others the plan has their own ids.
    let program = if process::own_uid() == 0 { program.as_user(uid, gid) } else { program };
    ChildProcess::start(&program)
}
