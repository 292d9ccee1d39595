//! Doing one thing as often as time allows, and how long each took.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use anyhow::Result;
use futures::future::try_join_all;
use hdrhistogram::Histogram;

/// Before each measurement: what the one before left to be done must not count against this one.
const REST: Duration = Duration::from_secs(1);

/// How often something was done and how long each took.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    latencies: Histogram<u64>,
    took: Duration,
}

impl Measured {
    /// Does `work` in each of so many lanes, again and again, for `time`. What it returns is the latency
    /// that counts.
    pub(crate) async fn of<F>(lanes: usize, time: Duration, work: impl Fn(usize) -> F) -> Result<Self>
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

    /// Does `work` so many times, all at once.
    pub(crate) async fn each<F>(times: usize, work: impl Fn(usize) -> F) -> Result<Self>
    where
        F: Future<Output = Result<Duration>>,
    {
        let begin = Instant::now();
        let mut latencies = Histogram::new(3)?;
        for latency in try_join_all((0..times).map(work)).await? {
            latencies.record(u64::try_from(latency.as_micros())?)?;
        }
        Ok(Self { latencies, took: begin.elapsed() })
    }

    /// How often.
    pub(crate) fn count(&self) -> u64 {
        self.latencies.len()
    }

    /// Adds another round.
    pub(crate) fn add(&mut self, other: &Self) {
        self.latencies += &other.latencies;
        self.took += other.took;
    }

    /// How often each second.
    pub(crate) fn rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "nobody counts that far")]
        let count = self.latencies.len() as f64;
        count / self.took.as_secs_f64()
    }

    /// The latency that this share, in percent, stayed within.
    pub(crate) fn percentile(&self, share: f64) -> Duration {
        Duration::from_micros(self.latencies.value_at_percentile(share))
    }
}
