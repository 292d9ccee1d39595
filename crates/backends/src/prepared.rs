//! A sandbox that waits for its command, in any mode.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use async_trait::async_trait;
use codelia_init::{Launch, Report, Request, Rlimit};
use codelia_policy::{CommandSpec, Receipt};
use codelia_sys::{directory, rlimit::Resource};

use crate::{Error, Launched, Prepared, Stdio, running::RunningCommand, sandbox::Sandbox};

/// A sandbox with `codelia-init` waiting in it.
#[derive(Debug)]
pub(crate) struct WaitingSandbox {
    pub(crate) sandbox: Sandbox,
    /// The session's directory.
    pub(crate) root: OwnedFd,
    /// The environment below the command's own.
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) open_files: u64,
}

#[async_trait]
impl Prepared for WaitingSandbox {
    async fn launch(mut self: Box<Self>, command: &CommandSpec, stdio: Stdio) -> Result<Launched, Error> {
        let asked = Instant::now();
        match self.start(command, stdio).await {
            Ok(()) => {
                let started = Instant::now();
                let running = Box::new(RunningCommand::new(self.sandbox, started));
                Ok(Launched { running, setup_time: started - asked })
            }
            Err(error) => {
                self.sandbox.destroy().await;
                Err(error)
            }
        }
    }

    async fn discard(self: Box<Self>) -> Receipt {
        self.sandbox.destroy().await
    }
}

impl WaitingSandbox {
    async fn start(&mut self, command: &CommandSpec, stdio: Stdio) -> Result<(), Error> {
        let directory = directory::open_beneath(&self.root, &command.working_directory)
            .map_err(Error::working_directory)?;
        let request = Request::Launch(self.order(command));
        let fds = [stdio.stdin.as_fd(), stdio.stdout.as_fd(), stdio.stderr.as_fd(), directory.as_fd()];
        self.sandbox.control().send(&request, &fds).await?;
        // The command alone holds its streams, so that they end with it.
        drop((stdio, directory));
        match self.sandbox.answer().await? {
            Report::Started => Ok(()),
            Report::Failed(failure) => {
                Err(Error::launch(failure, command.argv.first().map_or("", String::as_str)))
            }
            Report::Ready | Report::Exited(_) => Err(Error::OutOfTurn),
        }
    }

    fn order(&mut self, command: &CommandSpec) -> Launch {
        let mut env = std::mem::take(&mut self.env);
        env.extend(command.env.clone());
        Launch {
            argv: command.argv.clone(),
            env,
            rlimits: vec![
                Rlimit { resource: Resource::OpenFiles, most: self.open_files },
                Rlimit { resource: Resource::CoreBytes, most: 0 },
            ],
            terminal: command.terminal.is_some(),
        }
    }
}
