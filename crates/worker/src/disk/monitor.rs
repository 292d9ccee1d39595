//! Measures sessions on a thread of its own: those with runs again and again, others after
//! something used them.
//!
//! The thread works at most a fifth of the time. It measures several sessions by turns, so that a
//! large one does not delay the others.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_types::SessionId;
use rustix::fs::statvfs;
use tokio::time::{sleep, timeout};

use super::{
    Disk,
    account::Begun,
    scan::{Progress, Walk},
};

/// How often the thread looks for something to do while there are runs.
const TICK: Duration = Duration::from_millis(50);
/// How long it works then, at most.
const WORK: Duration = Duration::from_millis(10);
/// One turn of a measurement.
const SLICE: Duration = Duration::from_millis(2);
/// Measurements at the same time: each holds descriptors and memory.
const MAX_WALKS: usize = 16;
/// With nothing to do the thread waits for a change, and looks again after this time.
const IDLE: Duration = Duration::from_secs(5);

/// A measurement that has begun.
#[derive(Debug)]
struct Measurement {
    session: SessionId,
    walk: Walk,
    cost: Duration,
}

/// The measurements that have begun.
#[derive(Debug, Default)]
struct Monitor {
    walks: VecDeque<Measurement>,
}

impl Disk {
    /// Measures sessions indefinitely. Blocks its thread while it works.
    pub(crate) async fn monitor(self: Arc<Self>) {
        let mut monitor = Monitor::default();
        loop {
            monitor.run_once(&self);
            match self.next_due() {
                _ if !monitor.walks.is_empty() => sleep(TICK).await,
                Some(Duration::ZERO) => sleep(TICK).await,
                Some(pause) if self.has_scanned_runs() => sleep(pause.min(TICK)).await,
                pause => {
                    let _ = timeout(pause.unwrap_or(IDLE), self.changed.notified()).await;
                }
            }
        }
    }
}

impl Monitor {
    fn run_once(&mut self, disk: &Disk) {
        let began = Instant::now();
        self.begin_due(disk);
        while began.elapsed() < WORK
            && let Some(mut measurement) = self.walks.pop_front()
        {
            let slice_began = Instant::now();
            let progress = measurement.walk.advance(slice_began + SLICE);
            measurement.cost += slice_began.elapsed();
            match progress {
                Ok(Progress::Unfinished) => self.walks.push_back(measurement),
                Ok(Progress::Done(found)) => {
                    disk.measured(measurement.session, found, measurement.cost)
                }
                Err(error) => {
                    let session = measurement.session;
                    tracing::warn!(%error, %session, "cannot measure a session directory, retrying");
                    disk.failed(session, measurement.cost);
                }
            }
            if self.walks.len() < MAX_WALKS / 2 {
                self.begin_due(disk);
            }
        }
    }

    /// Begins the measurements that are due, as far as there may be more.
    fn begin_due(&mut self, disk: &Disk) {
        let free_bytes = free_bytes(disk);
        for session in disk.due(MAX_WALKS - self.walks.len(), free_bytes) {
            let began = Instant::now();
            match disk.begin(session, free_bytes) {
                None => {}
                Some(Ok(Begun::Walk(walk))) => {
                    self.walks.push_back(Measurement { session, walk, cost: began.elapsed() });
                }
                Some(Ok(Begun::Known(found))) => disk.measured(session, found, began.elapsed()),
                Some(Err(error)) => {
                    tracing::warn!(%error, %session, "cannot measure a session directory, retrying");
                    disk.failed(session, began.elapsed());
                }
            }
        }
    }
}

/// Free bytes of the disk of the sessions. Reading it costs nothing.
pub(super) fn free_bytes(disk: &Disk) -> u64 {
    statvfs(&disk.sessions).map_or(0, |found| found.f_bfree.saturating_mul(found.f_frsize))
}
