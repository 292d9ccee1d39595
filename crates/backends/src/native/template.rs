//! A template as the worker sees it: the process that holds it, and the socket to that process.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use codelia_init::{Report, TemplateRequest};
use codelia_policy::Ids;
use codelia_sys::{
    fd,
    process::{self, PidFd},
    spawn::Program,
};
use tokio::{sync::Mutex, time::timeout};

use crate::{
    Error,
    sandbox::{SETUP_TIMEOUT, child::ChildProcess, control::Control},
};

use super::plan::TemplateSpec;

/// A template. Dropping it kills its process, and with that its sandboxes.
#[derive(Debug)]
pub(super) struct Template {
    /// Locked, because a request with a descriptor may be sent in parts.
    socket: Mutex<Control>,
    _process: ChildProcess,
}

/// A sandbox that has started.
#[derive(Debug)]
pub(super) struct Started {
    /// The socket to its init.
    pub(super) control: Control,
    pub(super) init: PidFd,
    pub(super) is_in_group: bool,
}

impl Template {
    /// Starts the process in these namespaces and waits until the template is made.
    pub(super) async fn create(
        init: &Path,
        spec: &TemplateSpec,
        namespaces: Vec<OwnedFd>,
    ) -> Result<Self, Error> {
        let (mut socket, remote) = Control::pair()?;
        let process = start(init, spec.ids, remote, namespaces)
            .map_err(|cause| Error::InitStart { path: init.to_owned(), cause })?;
        let request = TemplateRequest::Create(Box::new(spec.template.clone()));
        let sent = socket.send(&request, &[]).await;
        // If sending failed, the process may have reported why before it exited.
        let report = timeout(SETUP_TIMEOUT, socket.receive()).await.map_err(|_| Error::InitTimeout)?;
        match report? {
            Some(Report::Ready) => Ok(Self { socket: Mutex::new(socket), _process: process }),
            Some(Report::Failed(failure)) => Err(Error::InitFailed(failure)),
            Some(_) => Err(Error::UnexpectedMessage),
            None => sent.and(Err(Error::InitExited)),
        }
    }

    /// Starts a sandbox, in the control group with this directory if that is allowed.
    pub(super) async fn start(&self, group: Option<&OwnedFd>) -> Result<Started, Error> {
        timeout(SETUP_TIMEOUT, self.request_start(group)).await.map_err(|_| Error::InitTimeout)?
    }

    async fn request_start(&self, group: Option<&OwnedFd>) -> Result<Started, Error> {
        let (mut control, remote) = Control::pair()?;
        let request = TemplateRequest::Start { has_group: group.is_some() };
        let fds: Vec<_> = [&remote].into_iter().chain(group).map(AsFd::as_fd).collect();
        self.socket.lock().await.send(&request, &fds).await?;
        drop(remote);
        match control.receive().await? {
            Some(Report::Started { is_in_group }) => {
                let init = control.take_descriptor()?.into();
                Ok(Started { control, init, is_in_group })
            }
            Some(Report::Failed(failure)) => Err(Error::InitFailed(failure)),
            Some(_) => Err(Error::UnexpectedMessage),
            None => Err(Error::InitExited),
        }
    }
}

/// The process has the session's user from its first instruction, without privileges.
fn start(
    init: &Path,
    Ids { uid, gid }: Ids,
    socket: OwnedFd,
    namespaces: Vec<OwnedFd>,
) -> io::Result<ChildProcess> {
    let streams = [socket, fd::dev_null()?, fd::dev_null()?];
    let program = Program::new(init, ["--template"], streams)?.enter_namespaces(namespaces);
    // Only root can change users. For others the plan has their own ids.
    let program = if process::own_uid() == 0 { program.as_user(uid, gid) } else { program };
    ChildProcess::start(&program)
}
