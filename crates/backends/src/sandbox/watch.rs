//! Watches the limits that no control group enforces: sums what the processes of a sandbox use and
//! reports the first limit that they exceed. A command can exceed a limit until the next check.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use codelia_policy::{Limit, Plan};
use codelia_sys::{
    cgroup::CurrentUsage,
    process::{Tree, TreeRoot, thread_cpu_time},
};
use codelia_types::Resource;
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep_until},
};

use crate::sandbox::{near_limits::NearLimits, outcome::KillReason};

/// The interval between two checks.
const INTERVAL: Duration = Duration::from_millis(50);

/// A check of many processes is repeated less often: it takes at most one part of this many of a
/// core. Its wall time does not count, since processes that leave it no CPU could delay the next
/// check.
const MAX_LOAD: u32 = 10;

/// The limits to watch. `None` is enforced elsewhere.
#[derive(Debug, Clone, Copy)]
pub(super) struct WatchedLimits {
    memory_bytes: Option<u64>,
    pids: Option<u64>,
    cpu_time: Option<Duration>,
}

impl WatchedLimits {
    /// `None` if the plan has no limit to watch.
    pub(super) fn from_plan(plan: &Plan) -> Option<Self> {
        let is_watched = |limit| plan.watched.contains(&limit);
        (!plan.watched.is_empty()).then(|| Self {
            memory_bytes: is_watched(Limit::MemoryBytes).then_some(plan.limits.memory_bytes),
            // codelia-init counts too.
            pids: is_watched(Limit::Pids).then_some(plan.limits.pids.saturating_add(1)),
            cpu_time: is_watched(Limit::CpuTime).then_some(plan.limits.cpu_time),
        })
    }

    /// Usage of the processes below `tool`, and the limit that they exceed. Memory of at least
    /// `exact_from` is read exactly.
    fn check(self, tool: TreeRoot, exact_from: u64) -> Result<Checked, codelia_sys::Error> {
        let began = thread_cpu_time();
        let tree = Tree::read(tool, self.pids.unwrap_or(u64::MAX))?;
        let mut memory_bytes = tree.memory_bytes;
        if self.memory_bytes.is_some() && memory_bytes >= exact_from {
            memory_bytes = tree.proportional_memory_bytes();
        }
        let exceeded = [
            (KillReason::Pids, self.pids.is_some_and(|limit| tree.tasks > limit)),
            (KillReason::Memory, self.memory_bytes.is_some_and(|limit| memory_bytes > limit)),
            (KillReason::CpuTime, self.cpu_time.is_some_and(|limit| tree.cpu_time > limit)),
        ];
        let exceeded =
            exceeded.into_iter().find_map(|(reason, is_exceeded)| is_exceeded.then_some(reason));
        let cost = thread_cpu_time().saturating_sub(began);
        Ok(Checked { memory_bytes, tasks: tree.tasks, cpu_time: tree.cpu_time, exceeded, cost })
    }

    /// Reports the watched limits that are near.
    fn check_near(self, checked: Checked, near: &NearLimits) {
        if self.memory_bytes.is_some() {
            near.check(Resource::MemoryBytes, checked.memory_bytes);
        }
        if self.pids.is_some() {
            // codelia-init is one of them.
            near.check(Resource::Pids, checked.tasks.saturating_sub(1));
        }
        if self.cpu_time.is_some() {
            near.check_cpu_time(checked.cpu_time);
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Checked {
    memory_bytes: u64,
    tasks: u64,
    cpu_time: Duration,
    exceeded: Option<KillReason>,
    /// CPU time of the check.
    cost: Duration,
}

/// Checks one sandbox from time to time.
#[derive(Debug)]
pub(super) struct Watcher {
    limits: WatchedLimits,
    next: Instant,
    /// The check that has begun. Kept, so that a caller that stops waiting starts no second one.
    checking: Option<JoinHandle<Result<Checked, codelia_sys::Error>>>,
    peak_memory_bytes: u64,
    peak_tasks: u64,
    /// The last check, for those that ask.
    pub(super) latest: Arc<Mutex<CurrentUsage>>,
}

impl Watcher {
    pub(super) fn new(limits: WatchedLimits) -> Self {
        Self {
            limits,
            next: Instant::now(),
            checking: None,
            peak_memory_bytes: 0,
            peak_tasks: 0,
            latest: Arc::default(),
        }
    }

    /// The most memory and tasks that a check has seen.
    pub(super) fn peaks(&self) -> (u64, u64) {
        (self.peak_memory_bytes, self.peak_tasks)
    }

    /// Waits until the processes below `tool` exceed a limit. Cancel-safe.
    pub(super) async fn exceeded(&mut self, tool: TreeRoot, near: &NearLimits) -> KillReason {
        loop {
            if self.checking.is_none() {
                sleep_until(self.next).await;
            }
            let limits = self.limits;
            let exact_from = near.exact_memory_from();
            let check = move || limits.check(tool, exact_from);
            let checking = self.checking.get_or_insert_with(|| spawn_blocking(check));
            let checked = checking.await;
            self.checking = None;
            self.next = Instant::now() + INTERVAL;
            let Ok(Ok(checked)) = checked else {
                // The tool ended, which its owner sees, or a file could not be opened just now.
                let error = checked.ok().and_then(Result::err).map(tracing::field::display);
                tracing::debug!(error, "processes of the sandbox not read");
                continue;
            };
            self.next = Instant::now() + INTERVAL.max(checked.cost * (MAX_LOAD - 1));
            self.keep(checked);
            self.limits.check_near(checked, near);
            if let Some(reason) = checked.exceeded {
                return reason;
            }
        }
    }

    fn keep(&mut self, checked: Checked) {
        self.peak_memory_bytes = self.peak_memory_bytes.max(checked.memory_bytes);
        self.peak_tasks = self.peak_tasks.max(checked.tasks);
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = CurrentUsage {
            cpu_time: Some(checked.cpu_time),
            memory_bytes: Some(checked.memory_bytes),
            peak_memory_bytes: Some(self.peak_memory_bytes),
            tasks: Some(checked.tasks),
            ..CurrentUsage::default()
        };
    }
}
