//! Reports the limits that a command gets near to, each once.
//!
//! CPU time is seen on the way to its limit, where the command could first have used so much.
//! Memory and processes are looked at from time to time, or by the watcher where no group counts
//! them. What happened between two looks is seen at the end if it ended at the limit.

use std::{
    convert::Infallible,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use codelia_policy::Limits;
use codelia_sys::cgroup::GroupReader;
use codelia_types::{NearLimit, Resource};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

/// The interval between two looks at memory and processes. Most commands have ended before the
/// first.
pub(super) const INTERVAL: Duration = Duration::from_millis(250);

/// The reports about one command.
#[derive(Debug)]
pub(super) struct NearLimits {
    limits: Limits,
    started: Instant,
    reported: Mutex<Vec<Resource>>,
    sender: mpsc::Sender<NearLimit>,
    /// The reports, until somebody takes them.
    pub(super) reports: Option<mpsc::Receiver<NearLimit>>,
}

impl NearLimits {
    pub(super) fn new(limits: Limits) -> Self {
        // Room for each resource once.
        let (sender, reports) = mpsc::channel(Resource::ALL.len());
        Self {
            limits,
            started: Instant::now(),
            reported: Mutex::default(),
            sender,
            reports: Some(reports),
        }
    }

    /// Reports a limit if this much of it is near and it was not reported.
    pub(super) fn check(&self, resource: Resource, used: u64) {
        let Some(near) = NearLimit::reached(resource, used, self.limit(resource)) else { return };
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if !reported.contains(&resource) {
            reported.push(resource);
            // Without a receiver, no one wants to know.
            let _ = self.sender.try_send(near);
        }
    }

    /// Reports a limit at which the kernel stopped the command.
    pub(super) fn reached(&self, resource: Resource) {
        self.check(resource, self.limit(resource));
    }

    /// Checks the CPU time. Returns how much more must be used until it is near; `None` once it is.
    pub(super) fn check_cpu_time(&self, used: Duration) -> Option<Duration> {
        self.check(Resource::CpuTime, millis(used));
        let near = Duration::from_millis(NearLimit::threshold(self.limit(Resource::CpuTime)));
        (!self.is_reported(Resource::CpuTime)).then(|| near.saturating_sub(used))
    }

    /// The memory from which a look must be exact.
    pub(super) fn exact_memory_from(&self) -> u64 {
        let limit = self.limits.memory_bytes;
        if self.is_reported(Resource::MemoryBytes) { limit } else { NearLimit::threshold(limit) }
    }

    /// Looks at a group until nothing is left to report. Never ends.
    pub(super) async fn watch(&self, group: &GroupReader) -> Infallible {
        loop {
            sleep_until(self.next_look()).await;
            match self.look(group) {
                Ok(true) => {}
                Ok(false) => return std::future::pending().await,
                Err(error) => tracing::debug!(%error, "usage of control group not read"),
            }
        }
    }

    /// The next multiple of the interval: a caller that waits again must not delay it.
    fn next_look(&self) -> Instant {
        let looks = self.started.elapsed().as_nanos() / INTERVAL.as_nanos();
        self.started + INTERVAL * u32::try_from(looks + 1).unwrap_or(u32::MAX)
    }

    /// Returns whether another look can report something.
    fn look(&self, group: &GroupReader) -> Result<bool, codelia_sys::Error> {
        let mut is_needed = false;
        if !self.is_reported(Resource::MemoryBytes)
            && let Some(used) = group.unreclaimable_memory(self.exact_memory_from())?
        {
            self.check(Resource::MemoryBytes, used);
            is_needed = true;
        }
        if !self.is_reported(Resource::Pids)
            && let Some(tasks) = group.tasks()?
        {
            // codelia-init is one of them.
            self.check(Resource::Pids, tasks.saturating_sub(1));
            is_needed = true;
        }
        Ok(is_needed)
    }

    fn is_reported(&self, resource: Resource) -> bool {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner).contains(&resource)
    }

    fn limit(&self, resource: Resource) -> u64 {
        match resource {
            Resource::MemoryBytes => self.limits.memory_bytes,
            Resource::Pids => self.limits.pids,
            Resource::CpuTime => millis(self.limits.cpu_time),
            // The worker counts output.
            Resource::OutputBytes => u64::MAX,
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near_limits() -> NearLimits {
        NearLimits::new(Limits {
            memory_bytes: 1000,
            pids: 10,
            cpu_time: Duration::from_secs(10),
            ..Limits::default()
        })
    }

    #[tokio::test]
    async fn each_limit_is_reported_once() {
        let mut near = near_limits();
        let mut reports = near.reports.take().unwrap();
        near.check(Resource::MemoryBytes, 799);
        near.check(Resource::MemoryBytes, 800);
        near.check(Resource::MemoryBytes, 900);
        near.reached(Resource::Pids);
        near.reached(Resource::Pids);
        let report = |resource, used, limit| Ok(NearLimit { resource, used, limit });
        assert_eq!(reports.try_recv(), report(Resource::MemoryBytes, 800, 1000));
        assert_eq!(reports.try_recv(), report(Resource::Pids, 10, 10));
        assert!(reports.try_recv().is_err() && near.reports.take().is_none());
        assert_eq!(near.exact_memory_from(), 1000);
    }

    #[tokio::test]
    async fn cpu_time_says_how_much_is_left_until_near() {
        let near = near_limits();
        assert_eq!(near.check_cpu_time(Duration::from_secs(2)), Some(Duration::from_secs(6)));
        assert_eq!(
            near.check_cpu_time(Duration::from_millis(7999)),
            Some(Duration::from_millis(1))
        );
        assert_eq!(near.check_cpu_time(Duration::from_secs(8)), None);
    }
}
