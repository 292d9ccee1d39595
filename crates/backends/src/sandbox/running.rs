//! A sandbox whose command runs, in any mode.

use std::{
    sync::{LazyLock, OnceLock},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use codelia_init::{Exit, Failure, Report, Request, Step};
use codelia_policy::{Limit, Plan};
use codelia_sys::cgroup::{self, Group};
use codelia_types::{Outcome, Receipt, Usage, Violation};
use tokio::{sync::mpsc, time::timeout_at};

use crate::{
    Error, Running, sandbox::control::Control, sandbox::outcome, sandbox::outcome::Cause,
    sandbox::sandbox::Sandbox, sandbox::supervisor::Supervisor,
};

/// How long `codelia-init` may take to kill its tree before it is killed itself.
const KILL_PATIENCE: Duration = Duration::from_secs(2);

/// CPU time is looked at no more often than this.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// What all processors together can do in a second, in thousandths. The host is asked once: it reads files to tell.
static ALL_PROCESSORS: LazyLock<u64> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, |count| count.get() as u64) * 1000);

/// What is watched from outside while the command runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watch {
    cpu_time: Duration,
    /// The most CPU time that can be used in a second, in thousandths.
    cpu_millis: u64,
}

impl Watch {
    pub(crate) fn of(plan: &Plan) -> Self {
        let is_rated = !plan.unenforced.contains(&Limit::CpuMillis);
        let most = *ALL_PROCESSORS;
        let cpu_millis = if is_rated { plan.limits.cpu_millis.min(most) } else { most };
        Self { cpu_time: plan.limits.cpu_time, cpu_millis: cpu_millis.max(1) }
    }

    /// Waits until a group has used up its CPU time: asleep for as long as it cannot have.
    async fn cpu_time_ends(self, group: &Group) {
        loop {
            let used = group.cpu_time().unwrap_or_else(|error| {
                tracing::warn!(%error, "CPU time not read");
                None
            });
            // The limit of each process still holds where nobody counts for all.
            let Some(used) = used else { return std::future::pending().await };
            let left = self.cpu_time.saturating_sub(used);
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(self.soonest_end(left).max(BETWEEN_LOOKS)).await;
        }
    }

    fn soonest_end(self, left: Duration) -> Duration {
        left.mul_f64(1000.0 / self.cpu_millis as f64)
    }
}

/// A command in its sandbox.
#[derive(Debug)]
pub(crate) struct RunningCommand {
    sandbox: Sandbox,
    supervisor: Option<Supervisor>,
    watch: Watch,
    started: Instant,
    /// When the tree was first ordered to be killed.
    killed: OnceLock<Instant>,
    /// Why it was, if that was decided here.
    cause: Option<Cause>,
    ended: Option<(Outcome, Usage)>,
}

impl RunningCommand {
    pub(crate) fn new(
        sandbox: Sandbox,
        supervisor: Option<Supervisor>,
        watch: Watch,
        started: Instant,
    ) -> Self {
        Self { sandbox, supervisor, watch, started, killed: OnceLock::new(), cause: None, ended: None }
    }

    /// The end as `codelia-init` tells it; `None` if it cannot any more.
    async fn hear_end(&mut self) -> Option<Exit> {
        if self.cause.is_none() && self.killed.get().is_none() {
            let (control, group) = self.sandbox.ends();
            let heard = tokio::select! {
                biased;
                report = control.receive() => Ok(report),
                cause = broken_rule(self.supervisor.as_ref(), self.watch, group) => Err(cause),
            };
            match heard {
                Ok(report) => {
                    self.cause = is_silence(&report).then_some(Cause::Silence);
                    return exit(report);
                }
                Err(cause) => self.cause = Some(cause),
            }
        }
        if self.cause.is_some() {
            self.kill_tree().await;
        }
        let killed = *self.killed.get_or_init(Instant::now);
        let (control, _) = self.sandbox.ends();
        exit(end_soon(control, killed + KILL_PATIENCE).await)
    }

    async fn end(&mut self) -> (Outcome, Usage) {
        let exit = self.hear_end().await;
        let wall_time = self.started.elapsed();
        let counted = self.counted();
        let mut oom_kills = counted.oom_kills;
        if exit.is_none() {
            self.sandbox.kill_hard().await;
            oom_kills += u64::from(self.sandbox.ran_out_of_memory().await);
        }
        let status = exit.as_ref().map_or(outcome::KILLED, |exit| exit.status);
        let usage = usage(exit.as_ref(), counted, wall_time);
        let signs = outcome::Signs {
            cause: self.cause(),
            oom_kills,
            pids_refused: counted.pids_refused,
            // The clock behind the signal is coarser than the group's and may run ahead of it.
            cpu_time_used_up: usage.cpu_time * 10 >= self.watch.cpu_time * 9,
        };
        (outcome::outcome(status, signs), usage)
    }

    /// Too many violations count even if the command ended before it could be killed for them.
    fn cause(&self) -> Option<Cause> {
        let is_exceeded = self.supervisor.as_ref().is_some_and(Supervisor::is_exceeded);
        if is_exceeded { Some(Cause::Violations) } else { self.cause }
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

/// The group knows of all; init of those that were waited for.
fn usage(exit: Option<&Exit>, counted: cgroup::Usage, wall_time: Duration) -> Usage {
    let told = |of: fn(&Exit) -> u64| exit.map(of).unwrap_or_default();
    let (read, written) = counted.io_bytes.unwrap_or_default();
    Usage {
        cpu_time: counted.cpu_time.or(exit.map(|exit| exit.cpu_time)).unwrap_or_default(),
        peak_memory_bytes: counted.peak_memory_bytes.unwrap_or_else(|| told(|exit| exit.peak_memory_bytes)),
        wall_time,
        read_bytes: read.max(told(|exit| exit.read_bytes)),
        written_bytes: written.max(told(|exit| exit.written_bytes)),
        // codelia-init is one of them.
        peak_processes: counted.peak_pids.unwrap_or_default().saturating_sub(1),
    }
}

async fn end_soon(control: &mut Control, deadline: Instant) -> Result<Option<Report>, Error> {
    timeout_at(deadline.into(), control.receive()).await.unwrap_or(Err(Error::Unresponsive))
}

fn exit(report: Result<Option<Report>, Error>) -> Option<Exit> {
    match report {
        Ok(Some(Report::Exited(exit))) => Some(exit),
        other => {
            tracing::warn!(?other, "codelia-init did not tell how its command ended");
            None
        }
    }
}

/// Whether `codelia-init` ended everything because it heard nothing from here for too long.
fn is_silence(report: &Result<Option<Report>, Error>) -> bool {
    matches!(report, Ok(Some(Report::Failed(Failure { step: Step::KeepAlive, .. }))))
}

/// Waits until the command must be killed for a rule it broke.
async fn broken_rule(supervisor: Option<&Supervisor>, watch: Watch, group: Option<&Group>) -> Cause {
    let violations = async {
        match supervisor {
            Some(supervisor) => supervisor.exceeded().await,
            None => std::future::pending().await,
        }
    };
    let cpu_time = async {
        match group {
            Some(group) => watch.cpu_time_ends(group).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = violations => Cause::Violations,
        () = cpu_time => Cause::CpuTime,
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

    async fn keep_alive(&self, time: Duration) {
        self.tell(Request::KeepAlive(time)).await;
    }

    fn lower_priority(&self) {
        if let Some(Err(error)) = self.sandbox.group().map(Group::lower_priority) {
            tracing::warn!(%error, "a command that takes its time keeps its weight");
        }
    }

    fn violations(&mut self) -> Option<mpsc::Receiver<Violation>> {
        self.supervisor.as_mut()?.violations()
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
