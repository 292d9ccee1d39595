//! Guards: the limits of a flag, and the numbers that they are compared with.

use std::time::Duration;

use codelia_types::duration;
use serde::{Deserialize, Serialize};

/// Buckets of setup times: four for each doubling, from a microsecond to two minutes.
pub const SETUP_BUCKETS: usize = 108;
const BUCKETS_PER_DOUBLING: f64 = 4.0;

/// The limits after which a flag rolls itself back. At least one is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlagGuard {
    /// The highest share of sessions and runs that are refused, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_refused_percent: Option<u8>,
    /// The highest share of runs whose sandbox cannot be created, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_failed_percent: Option<u8>,
    /// The highest 95th percentile of the setup time of sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_setup_p95: Option<Duration>,
    /// Nothing is judged before this many.
    pub min_count: u32,
}

/// The sessions and runs under one revision of a flag.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlagNumbers {
    /// Sessions whose mode it chose.
    pub sessions: u64,
    /// Sessions that were refused and would not have been without it.
    pub refused_sessions: u64,
    /// Runs in its mode.
    pub runs: u64,
    /// Runs that were refused because the worker or the host cannot do what they ask for.
    pub refused_runs: u64,
    /// Runs whose sandbox could not be created.
    pub failed_runs: u64,
    /// Setup times of the others, by bucket. Later buckets may be missing.
    pub setups: Vec<u64>,
}

impl FlagNumbers {
    /// Counts a setup time.
    pub fn add_setup(&mut self, time: Duration) {
        let bucket = bucket(time);
        if self.setups.len() <= bucket {
            self.setups.resize(bucket + 1, 0);
        }
        self.setups[bucket] += 1;
    }

    /// A time that 5 % of the setups took at least; the true percentile is at most 19 % above.
    #[must_use]
    pub fn setup_p95(&self) -> Option<Duration> {
        let total: u64 = self.setups.iter().sum();
        let above = total - total * 95 / 100;
        let mut seen = 0;
        let bucket = self.setups.iter().enumerate().rev().find(|(_, count)| {
            seen += **count;
            seen >= above
        });
        bucket.filter(|_| total > 0).map(|(bucket, _)| least_of(bucket))
    }
}

/// The bucket of a setup time.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small and not negative"
)]
fn bucket(time: Duration) -> usize {
    let micros = (time.as_secs_f64() * 1e6).max(1.0);
    ((micros.log2() * BUCKETS_PER_DOUBLING) as usize).min(SETUP_BUCKETS - 1)
}

/// The shortest time in a bucket.
#[expect(clippy::cast_precision_loss, reason = "small")]
fn least_of(bucket: usize) -> Duration {
    Duration::from_secs_f64((bucket as f64 / BUCKETS_PER_DOUBLING).exp2() / 1e6)
}

impl FlagGuard {
    /// Which limit the numbers exceed, for people; `None` if none or if there are too few.
    #[must_use]
    pub fn breach(&self, numbers: &FlagNumbers) -> Option<String> {
        let attempts = numbers.sessions + numbers.refused_sessions + numbers.runs;
        let refused = numbers.refused_sessions + numbers.refused_runs;
        let setups = numbers.setups.iter().sum();
        share(
            "refused sessions and runs",
            self.max_refused_percent,
            refused,
            attempts,
            self.min_count,
        )
        .or_else(|| {
            let failed = numbers.failed_runs;
            let runs = numbers.runs;
            share("runs without a sandbox", self.max_failed_percent, failed, runs, self.min_count)
        })
        .or_else(|| self.slow(numbers.setup_p95()?, setups))
    }

    fn slow(&self, p95: Duration, setups: u64) -> Option<String> {
        let max =
            self.max_setup_p95.filter(|max| p95 > *max && setups >= u64::from(self.min_count))?;
        let micros = u64::try_from(p95.as_micros()).unwrap_or(u64::MAX);
        let p95 = duration::text(Duration::from_micros(micros));
        let max = duration::text(max);
        Some(format!("the 95th percentile of {setups} setup times is at least {p95}, above {max}"))
    }
}

/// The text for a share above its limit.
fn share(what: &str, max: Option<u8>, part: u64, all: u64, min_count: u32) -> Option<String> {
    let max =
        max.filter(|max| all >= u64::from(min_count) && part * 100 > all * u64::from(*max))?;
    Some(format!("{part} of {all} {what}, above {max} %"))
}
