//! A sandbox whose command runs, in any mode.

use std::{
    sync::{Arc, LazyLock, OnceLock},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use codelia_init::{Exit, Failure, Report, Request, Step};
use codelia_policy::{Limit, Limits, Plan};
use codelia_sys::{
    cgroup::{self, Group, GroupReader},
    process::TreeRoot,
};
use codelia_types::{NearLimit, NetworkUsage, Outcome, Receipt, Resource, Usage, Violation};
use tokio::{sync::mpsc, time::timeout_at};

use crate::{
    Error, IsolationCheck, Running, SandboxRemote, UsageReader,
    sandbox::{
        Sandbox,
        control::Control,
        near_limits::{self, NearLimits},
        operations::Operations,
        outcome::{self, KillReason},
        supervisor::Supervisor,
        watch::{WatchedLimits, Watcher},
    },
    usage_reader::UsageSource,
};

/// How long `codelia-init` may take to kill its processes before it is killed itself.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// The shortest interval between two reads of the group's CPU time.
const MIN_CPU_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The interval between two reads of the group's socket buffers, where the kernel does not count
/// them as memory.
const SOCKET_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The capacity of all processors, in thousandths of one. Cached: reading it opens files.
static HOST_CPU_MILLIS: LazyLock<u64> = LazyLock::new(|| {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u64) * 1000
});

/// The limits that are checked here while a command runs: CPU time, with how fast the command can
/// use it, and memory, for the buffers of sockets.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    limits: Limits,
    /// The most CPU time per second that the command can get, in thousandths.
    cpu_millicores: u64,
    /// The limits that no group enforces.
    watched: Option<WatchedLimits>,
    /// Whether the host's processes in the group are those of the sandbox.
    counts_tasks: bool,
}

impl Budget {
    pub(crate) fn from_plan(plan: &Plan) -> Self {
        let max = *HOST_CPU_MILLIS;
        let is_limited = !plan.unenforced.contains(&Limit::CpuMillicores);
        let cpu_millicores = if is_limited { plan.limits.cpu_millicores.min(max) } else { max };
        Self {
            limits: plan.limits.clone(),
            cpu_millicores: cpu_millicores.max(1),
            watched: WatchedLimits::from_plan(plan),
            counts_tasks: !plan.has_own_kernel(),
        }
    }

    fn reader(&self, group: &Group) -> GroupReader {
        if self.counts_tasks { group.reader() } else { group.reader().without_tasks() }
    }

    /// Waits until a group has used its CPU time. Sleeps for as long as that is impossible, or
    /// until the group can first be near its limit.
    async fn cpu_time_exhausted(&self, group: &Group, near: &NearLimits) {
        loop {
            let used = group.cpu_time().unwrap_or_else(|error| {
                tracing::warn!(%error, "CPU time not read");
                None
            });
            // Without a group that counts CPU time, the rlimit of each process still holds.
            let Some(used) = used else { return std::future::pending().await };
            let left = self.limits.cpu_time.saturating_sub(used);
            if left.is_zero() {
                return;
            }
            let mut delay = self.min_time_to_use(left).max(MIN_CPU_CHECK_INTERVAL);
            if let Some(until_near) = near.check_cpu_time(used) {
                delay = delay.min(self.min_time_to_use(until_near).max(near_limits::INTERVAL));
            }
            tokio::time::sleep(delay).await;
        }
    }

    /// Waits until the socket buffers of a group exceed their limit. Never ends where they count as
    /// memory.
    async fn sockets_exceeded(&self, group: &Group) {
        loop {
            match group.sockets_exceed(self.limits.memory_bytes) {
                Ok(Some(true)) => return,
                Ok(Some(false)) => {}
                Ok(None) => return std::future::pending().await,
                Err(error) => tracing::warn!(%error, "socket buffers not read"),
            }
            tokio::time::sleep(SOCKET_CHECK_INTERVAL).await;
        }
    }

    fn min_time_to_use(&self, left: Duration) -> Duration {
        left.mul_f64(1000.0 / self.cpu_millicores as f64)
    }
}

/// A command in its sandbox.
#[derive(Debug)]
pub(crate) struct RunningCommand {
    sandbox: Sandbox,
    supervisor: Option<Supervisor>,
    budget: Budget,
    watcher: Option<Watcher>,
    near_limits: NearLimits,
    started: Instant,
    /// When the kill was first requested.
    killed: OnceLock<Instant>,
    /// Why, if that was decided here.
    kill_reason: Option<KillReason>,
    /// The result of `wait`.
    result: Option<(Outcome, Usage)>,
}

impl RunningCommand {
    pub(crate) fn new(
        sandbox: Sandbox,
        supervisor: Option<Supervisor>,
        budget: Budget,
        started: Instant,
    ) -> Self {
        Self {
            sandbox,
            supervisor,
            watcher: budget.watched.map(Watcher::new),
            near_limits: NearLimits::new(budget.limits.clone()),
            budget,
            started,
            killed: OnceLock::new(),
            kill_reason: None,
            result: None,
        }
    }

    /// Waits for the exit that `codelia-init` reports. `None` if it cannot report any more.
    async fn receive_exit(&mut self) -> Option<Exit> {
        if self.kill_reason.is_none() && self.killed.get().is_none() {
            let tool = self.sandbox.tool();
            let near = &self.near_limits;
            let (control, group) = self.sandbox.parts();
            let first = tokio::select! {
                biased;
                report = control.receive() => Ok(report),
                reason = limit_exceeded(self.supervisor.as_ref(), &self.budget, group, near) => Err(reason),
                reason = watched_limit_exceeded(self.watcher.as_mut(), tool, near) => Err(reason),
            };
            match first {
                Ok(report) => {
                    self.kill_reason =
                        is_keep_alive_expired(&report).then_some(KillReason::KeepAliveExpired);
                    return exit_of(report);
                }
                Err(reason) => self.kill_reason = Some(reason),
            }
        }
        if self.kill_reason.is_some() {
            self.kill_tree().await;
        }
        let killed = *self.killed.get_or_init(Instant::now);
        let (control, _) = self.sandbox.parts();
        exit_of(receive_until(control, killed + KILL_TIMEOUT).await)
    }

    async fn finish(&mut self) -> (Outcome, Usage) {
        let exit = self.receive_exit().await;
        let wall_time = self.started.elapsed();
        let group_usage = self.group_usage();
        let mut oom_kills = group_usage.oom_kills;
        if exit.is_none() {
            self.sandbox.kill_init().await;
            oom_kills += u64::from(self.sandbox.ran_out_of_memory().await);
        }
        let status = exit.as_ref().map_or(outcome::KILLED, |exit| exit.status);
        let usage = usage(exit.as_ref(), group_usage, wall_time);
        self.check_near_limits(&usage, oom_kills, group_usage.pids_refused);
        let observed = outcome::Observations {
            kill_reason: self.kill_reason(),
            oom_kills,
            pids_refused: group_usage.pids_refused,
            // The clock behind SIGXCPU is coarser than the group's and may run ahead of it.
            cpu_time_exceeded: usage.cpu_time * 10 >= self.budget.limits.cpu_time * 9,
        };
        (outcome::outcome(status, observed), usage)
    }

    /// Reports limits that the command reached between two looks.
    fn check_near_limits(&self, usage: &Usage, oom_kills: u64, pids_refused: u64) {
        self.near_limits.check_cpu_time(usage.cpu_time);
        if oom_kills > 0 || self.kill_reason == Some(KillReason::Memory) {
            self.near_limits.reached(Resource::MemoryBytes);
        }
        let pids_refused = pids_refused > 0 && self.budget.counts_tasks;
        if pids_refused || self.kill_reason == Some(KillReason::Pids) {
            self.near_limits.reached(Resource::Pids);
        }
    }

    /// Too many violations count even if the command ended before it could be killed for them.
    fn kill_reason(&self) -> Option<KillReason> {
        let is_exceeded = self.supervisor.as_ref().is_some_and(Supervisor::is_exceeded);
        if is_exceeded { Some(KillReason::Violations) } else { self.kill_reason }
    }

    fn group_usage(&self) -> cgroup::Usage {
        let usage = self.sandbox.group().map(cgroup::Group::usage).transpose();
        let usage = usage.map(Option::unwrap_or_default).unwrap_or_else(|error| {
            tracing::warn!(%error, "usage of control group not read");
            cgroup::Usage::default()
        });
        let (memory, tasks) = self.watcher.as_ref().map(Watcher::peaks).unzip();
        cgroup::Usage {
            peak_memory_bytes: usage.peak_memory_bytes.or(memory),
            peak_pids: usage.peak_pids.or(tasks),
            ..usage
        }
    }

    async fn send(&self, request: Request) {
        if let Err(error) = self.sandbox.control().send(&request, &[]).await {
            // Init has exited; `wait` sees that.
            tracing::debug!(%error, "request not sent to codelia-init");
        }
    }
}

/// Combines both counts: the group counts all processes, init only those that it has reaped.
fn usage(exit: Option<&Exit>, group: cgroup::Usage, wall_time: Duration) -> Usage {
    let reported = exit.map(|exit| exit.usage).unwrap_or_default();
    let (read, written) = group.io_bytes.unwrap_or_default();
    let unreachable_attempts = exit.map_or(0, |exit| exit.unreachable_attempts);
    Usage {
        cpu_time: group.cpu_time.unwrap_or(reported.cpu_time),
        peak_memory_bytes: group.peak_memory_bytes.unwrap_or(reported.peak_memory_bytes),
        wall_time,
        read_bytes: read.max(reported.read_bytes),
        written_bytes: written.max(reported.written_bytes),
        // codelia-init is one of them.
        peak_processes: group.peak_pids.unwrap_or_default().saturating_sub(1),
        network: (unreachable_attempts > 0)
            .then(|| NetworkUsage { unreachable_attempts, ..NetworkUsage::default() }),
    }
}

async fn receive_until(control: &mut Control, deadline: Instant) -> Result<Option<Report>, Error> {
    timeout_at(deadline.into(), control.receive()).await.unwrap_or(Err(Error::InitTimeout))
}

fn exit_of(report: Result<Option<Report>, Error>) -> Option<Exit> {
    match report {
        Ok(Some(Report::Exited(exit))) => Some(exit),
        other => {
            let error = other.err().map(tracing::field::display);
            tracing::warn!(error, "codelia-init did not report the exit of its command");
            None
        }
    }
}

/// Whether `codelia-init` killed the command because `keep_alive` was not called in time.
fn is_keep_alive_expired(report: &Result<Option<Report>, Error>) -> bool {
    matches!(report, Ok(Some(Report::Failed(Failure { step: Step::KeepAlive, .. }))))
}

/// Waits until the command exceeds a limit for which it must be killed.
async fn limit_exceeded(
    supervisor: Option<&Supervisor>,
    budget: &Budget,
    group: Option<&Group>,
    near: &NearLimits,
) -> KillReason {
    let violations = async {
        match supervisor {
            Some(supervisor) => supervisor.exceeded().await,
            None => std::future::pending().await,
        }
    };
    let in_group = async {
        let Some(group) = group else { return std::future::pending().await };
        let reader = budget.reader(group);
        tokio::select! {
            () = budget.cpu_time_exhausted(group, near) => KillReason::CpuTime,
            () = budget.sockets_exceeded(group) => KillReason::Memory,
            never = near.watch(&reader) => match never {},
        }
    };
    tokio::select! {
        () = violations => KillReason::Violations,
        reason = in_group => reason,
    }
}

async fn watched_limit_exceeded(
    watcher: Option<&mut Watcher>,
    tool: Option<TreeRoot>,
    near: &NearLimits,
) -> KillReason {
    match (watcher, tool) {
        (Some(watcher), Some(tool)) => watcher.exceeded(tool, near).await,
        _ => std::future::pending().await,
    }
}

#[async_trait]
impl Running for RunningCommand {
    async fn wait(&mut self) -> (Outcome, Usage) {
        if let Some(result) = &self.result {
            return result.clone();
        }
        let result = self.finish().await;
        self.result.insert(result).clone()
    }

    async fn signal(&self, signal: i32) {
        self.send(Request::Signal(signal)).await;
    }

    fn remote(&self) -> Arc<dyn SandboxRemote> {
        Arc::new(self.sandbox.control().remote())
    }

    fn lower_priority(&self) {
        if let Some(Err(error)) = self.sandbox.group().map(Group::lower_priority) {
            tracing::warn!(%error, "CPU weight of a long-running command not lowered");
        }
    }

    fn violations(&mut self) -> Option<mpsc::Receiver<Violation>> {
        self.supervisor.as_mut()?.violations.take()
    }

    fn take_operations(&mut self) -> Option<Operations> {
        self.supervisor.as_mut()?.take_operations()
    }

    fn near_limits(&mut self) -> Option<mpsc::Receiver<NearLimit>> {
        self.near_limits.reports.take()
    }

    fn usage_reader(&self) -> Option<UsageReader> {
        match (self.sandbox.group(), &self.watcher) {
            (Some(group), _) => Some(UsageReader(UsageSource::Group(self.budget.reader(group)))),
            (None, Some(watcher)) => {
                let latest = watcher.latest.clone();
                Some(UsageReader(UsageSource::Watched(latest, self.sandbox.tool()?)))
            }
            (None, None) => None,
        }
    }

    fn isolation_check(&self) -> Option<IsolationCheck> {
        self.sandbox.tool().map(IsolationCheck::new)
    }

    async fn kill_tree(&self) {
        self.killed.get_or_init(Instant::now);
        self.send(Request::Kill).await;
        // Init may be stopped or outrun by forks, so kill the group from here too.
        if let Err(error) = self.sandbox.kill_group() {
            tracing::warn!(%error, "control group not killed");
        }
    }

    async fn destroy(self: Box<Self>) -> Receipt {
        self.sandbox.destroy().await
    }
}
