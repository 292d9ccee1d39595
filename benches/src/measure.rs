//! Repeats one operation for a given time and records its latencies.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use anyhow::Result;
use futures::future::try_join_all;
use hdrhistogram::Histogram;

/// Pause before each measurement, so that leftover work of the previous one does not count.
const REST: Duration = Duration::from_millis(700);

/// Count, latencies and duration of a measurement.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    latencies: Histogram<u64>,
    took: Duration,
}

impl Measured {
    /// Repeats `work` in each lane for `time`. The latency that `work` returns counts.
    pub(crate) async fn repeat<F>(
        lanes: usize,
        time: Duration,
        work: impl Fn(usize) -> F,
    ) -> Result<Self>
    where
        F: Future<Output = Result<Duration>>,
    {
        tokio::time::sleep(REST).await;
        let begin = Instant::now();
        let lane = async |number: usize| -> Result<Histogram<u64>> {
            let mut latencies = Histogram::new(3)?;
            while begin.elapsed() < time {
                latencies.record(u64::try_from(work(number).await?.as_micros())?)?;
            }
            Ok(latencies)
        };
        let all = try_join_all((0..lanes).map(lane)).await?;
        let mut latencies = Histogram::new(3)?;
        for lane in all {
            latencies.add(lane)?;
        }
        Ok(Self { latencies, took: begin.elapsed() })
    }

    /// Does `work` this many times concurrently.
    pub(crate) async fn each<F>(times: usize, work: impl Fn(usize) -> F) -> Result<Self>
    where
        F: Future<Output = Result<Duration>>,
    {
        tokio::time::sleep(REST).await;
        let begin = Instant::now();
        let mut latencies = Histogram::new(3)?;
        for latency in try_join_all((0..times).map(work)).await? {
            latencies.record(u64::try_from(latency.as_micros())?)?;
        }
        Ok(Self { latencies, took: begin.elapsed() })
    }

    /// Latencies that another process measured in `took`.
    pub(crate) fn from_latencies(
        all: impl IntoIterator<Item = Duration>,
        took: Duration,
    ) -> Result<Self> {
        let mut latencies = Histogram::new(3)?;
        for latency in all {
            latencies.record(u64::try_from(latency.as_micros())?)?;
        }
        Ok(Self { latencies, took })
    }

    /// Returns the number of operations.
    pub(crate) fn count(&self) -> u64 {
        self.latencies.len()
    }

    /// Adds another round.
    pub(crate) fn add(&mut self, other: &Self) {
        self.latencies += &other.latencies;
        self.took += other.took;
    }

    /// Returns the operations per second.
    pub(crate) fn rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
        let count = self.latencies.len() as f64;
        count / self.took.as_secs_f64()
    }

    /// Returns the latency at this percentile.
    pub(crate) fn percentile(&self, share: f64) -> Duration {
        Duration::from_micros(self.latencies.value_at_percentile(share))
    }
}
