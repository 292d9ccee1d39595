//! A sandbox whose command runs, in any mode.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use codelia_init::{Exit, Report, Request, Status};
use codelia_policy::{Outcome, Receipt, Usage};
use codelia_sys::cgroup;
use tokio::time::timeout_at;

use crate::{Error, Running, sandbox::Sandbox};

/// How long `codelia-init` may take to kill its tree before it is killed itself.
const KILL_PATIENCE: Duration = Duration::from_secs(2);

const SIGKILL: i32 = 9;

/// What a shell answers when its command was killed.
const KILLED_IN_SHELL: i32 = 128 + SIGKILL;

/// A command in its sandbox.
#[derive(Debug)]
pub(crate) struct RunningCommand {
    sandbox: Sandbox,
    started: Instant,
    /// When the tree was first ordered to be killed.
    killed: OnceLock<Instant>,
    ended: Option<(Outcome, Usage)>,
}

impl RunningCommand {
    pub(crate) fn new(sandbox: Sandbox, started: Instant) -> Self {
        Self { sandbox, started, killed: OnceLock::new(), ended: None }
    }

    /// The end as `codelia-init` tells it; `None` if it cannot any more.
    async fn hear_end(&mut self) -> Option<Exit> {
        let report = match self.killed.get() {
            None => self.sandbox.control_mut().receive().await,
            Some(killed) => {
                let deadline = (*killed + KILL_PATIENCE).into();
                let report = timeout_at(deadline, self.sandbox.control_mut().receive()).await;
                report.unwrap_or(Err(Error::Unresponsive))
            }
        };
        match report {
            Ok(Some(Report::Exited(exit))) => Some(exit),
            other => {
                tracing::warn!(?other, "codelia-init did not tell how its command ended");
                None
            }
        }
    }

    async fn end(&mut self) -> (Outcome, Usage) {
        let exit = self.hear_end().await;
        let wall_time = self.started.elapsed();
        if exit.is_none() {
            self.sandbox.kill_hard().await;
        }
        let counted = self.counted();
        let status = exit.as_ref().map_or(Status::Signaled(SIGKILL), |exit| exit.status);
        let (cpu_time, peak) = exit.map(|exit| (exit.cpu_time, exit.peak_memory_bytes)).unwrap_or_default();
        let usage = Usage {
            cpu_time: counted.cpu_time.unwrap_or(cpu_time),
            peak_memory_bytes: counted.peak_memory_bytes.unwrap_or(peak),
            wall_time,
        };
        (outcome(status, counted.oom_kills), usage)
    }

    fn counted(&self) -> cgroup::Usage {
        let counted = self.sandbox.group().map(cgroup::Group::usage).transpose();
        counted.map(Option::unwrap_or_default).unwrap_or_else(|error| {
            tracing::warn!(%error, "usage not read from the control group");
            cgroup::Usage::default()
        })
    }

    async fn tell(&self, request: Request) {
        if let Err(error) = self.sandbox.control().send(&request, &[]).await {
            // Its end is seen by `wait`.
            tracing::debug!(%error, ?request, "codelia-init does not listen");
        }
    }
}

/// A command that was killed while its group ran out of memory was killed for that. One that
/// lived on, whatever became of its children, ended as it says.
fn outcome(status: Status, oom_kills: u64) -> Outcome {
    match status {
        Status::Signaled(SIGKILL) | Status::Exited(KILLED_IN_SHELL) if oom_kills > 0 => Outcome::Oom,
        Status::Signaled(signal) => Outcome::Signaled(signal),
        Status::Exited(code) => Outcome::Exited(code),
    }
}

#[async_trait]
impl Running for RunningCommand {
    async fn wait(&mut self) -> (Outcome, Usage) {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        let ended = self.end().await;
        self.ended.insert(ended).clone()
    }

    async fn signal(&self, signal: i32) {
        self.tell(Request::Signal(signal)).await;
    }

    async fn kill_tree(&self) {
        self.killed.get_or_init(Instant::now);
        self.tell(Request::Kill).await;
        // It may be stopped or outrun by forks: the group is killed from here too.
        if let Err(error) = self.sandbox.kill_group() {
            tracing::warn!(%error, "control group not killed");
        }
    }

    async fn destroy(self: Box<Self>) -> Receipt {
        self.sandbox.destroy().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_command_that_was_killed_is_out_of_memory() {
        assert_eq!(outcome(Status::Signaled(SIGKILL), 1), Outcome::Oom);
        assert_eq!(outcome(Status::Exited(137), 1), Outcome::Oom);
        assert_eq!(outcome(Status::Signaled(SIGKILL), 0), Outcome::Signaled(9));
        assert_eq!(outcome(Status::Exited(0), 1), Outcome::Exited(0));
        assert_eq!(outcome(Status::Signaled(15), 1), Outcome::Signaled(15));
    }
}
