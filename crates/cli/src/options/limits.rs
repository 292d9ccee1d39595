//! Default and highest limits of runs.

use std::{num::NonZeroU32, time::Duration};

use anyhow::{Result, ensure};
use codelia_api::Timeouts;
use codelia_policy::{Ceilings, Limits};

use super::MIB;
use crate::config::Config;

/// Default timeout of interactive and detached runs.
const LONG_TIMEOUT: u64 = 4 * 3600;
/// Highest queue timeout.
const MAX_QUEUE_TIMEOUT: u64 = 24 * 3600;
/// The longest time that a run may wait for an approval.
const MAX_APPROVAL_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// The limits of runs that request none, and the highest that they may request.
#[derive(Debug)]
pub(super) struct RunLimits {
    pub(super) defaults: Limits,
    pub(super) ceilings: Ceilings,
    pub(super) timeouts: Timeouts,
}

/// Reads the limits. A configured maximum below its default is refused; a built-in one is raised.
pub(super) fn run_limits(config: &Config) -> Result<RunLimits> {
    let (limits, built_in) = (&config.limits, Ceilings::default().0);
    let defaults = defaults(config);
    let max = |key: &str, set: Option<u64>, built_in: u64, default: u64| match set {
        None => Ok(built_in.max(default)),
        Some(max) => {
            ensure!(max >= default, "limits.{key}: {max} is below the default limit {default}; change one");
            Ok(max)
        }
    };
    let amount = |key, set: Option<NonZeroU32>, built_in, default| max(key, set.map(wide), built_in, default);
    let mib = |key, set: Option<NonZeroU32>, built_in: u64, default: u64| {
        Ok::<_, anyhow::Error>(max(key, set.map(wide), built_in / MIB, default / MIB)? * MIB)
    };
    let time = |key, set: Option<NonZeroU32>, built_in: Duration, default: Duration| {
        max(key, set.map(wide), built_in.as_secs(), default.as_secs()).map(Duration::from_secs)
    };
    let ceilings = Limits {
        timeout: time("max_timeout_seconds", limits.max_timeout_seconds, built_in.timeout, defaults.timeout)?,
        memory_bytes: mib(
            "max_memory_mb",
            limits.max_memory_mb,
            built_in.memory_bytes,
            defaults.memory_bytes,
        )?,
        cpu_millicores: max(
            "max_cpus",
            limits.max_cpus.map(millicores),
            built_in.cpu_millicores,
            defaults.cpu_millicores,
        )?,
        pids: amount("max_pids", limits.max_pids, built_in.pids, defaults.pids)?,
        open_files: amount(
            "max_open_files",
            limits.max_open_files,
            built_in.open_files,
            defaults.open_files,
        )?,
        output_bytes: mib(
            "max_output_mb",
            limits.max_output_mb,
            built_in.output_bytes,
            defaults.output_bytes,
        )?,
        cpu_time: time(
            "max_cpu_time_seconds",
            limits.max_cpu_time_seconds,
            built_in.cpu_time,
            defaults.cpu_time,
        )?,
        file_bytes: mib("max_file_mb", limits.max_file_mb, built_in.file_bytes, defaults.file_bytes)?,
        tmp_bytes: mib("max_tmp_mb", limits.max_tmp_mb, built_in.tmp_bytes, defaults.tmp_bytes)?,
        disk_bytes: mib("max_disk_mb", limits.max_disk_mb, built_in.disk_bytes, defaults.disk_bytes)?,
        inodes: amount("max_inodes", limits.max_inodes, built_in.inodes, defaults.inodes)?,
    };
    let timeouts = timeouts(config, ceilings.timeout)?;
    Ok(RunLimits { defaults, ceilings: Ceilings(ceilings), timeouts })
}

fn defaults(config: &Config) -> Limits {
    let limits = &config.limits;
    Limits {
        timeout: seconds(limits.timeout_seconds),
        memory_bytes: config.sandbox.memory_limit_mb.get().saturating_mul(MIB),
        cpu_millicores: millicores(config.sandbox.cpu_limit),
        pids: wide(limits.pids),
        open_files: wide(limits.open_files),
        output_bytes: wide(limits.output_mb) * MIB,
        cpu_time: seconds(limits.cpu_time_seconds),
        file_bytes: wide(limits.file_mb) * MIB,
        tmp_bytes: wide(limits.tmp_mb) * MIB,
        disk_bytes: wide(limits.disk_mb) * MIB,
        inodes: wide(limits.inodes),
    }
}

fn timeouts(config: &Config, max: Duration) -> Result<Timeouts> {
    let limits = &config.limits;
    let long = |key: &str, set: Option<NonZeroU32>| {
        let timeout = set.map_or(max.min(Duration::from_secs(LONG_TIMEOUT)), seconds);
        let (timeout_seconds, max_seconds) = (timeout.as_secs(), max.as_secs());
        ensure!(
            timeout <= max,
            "limits.{key}: {timeout_seconds} is above limits.max_timeout_seconds {max_seconds}; change one"
        );
        Ok(timeout)
    };
    let queue = seconds(limits.queue_timeout_seconds);
    let max_queue =
        limits.max_queue_timeout_seconds.map_or(queue.max(Duration::from_secs(MAX_QUEUE_TIMEOUT)), seconds);
    ensure!(
        max_queue >= queue,
        "limits.max_queue_timeout_seconds: {} is below limits.queue_timeout_seconds {}; change one",
        max_queue.as_secs(),
        queue.as_secs()
    );
    let approval = config.approvals.timeout;
    ensure!(
        (Duration::from_secs(1)..=MAX_APPROVAL_TIMEOUT).contains(&approval),
        "approvals.timeout: must be 1s to 24h"
    );
    Ok(Timeouts {
        interactive: long("interactive_timeout_seconds", limits.interactive_timeout_seconds)?,
        detached: long("detached_timeout_seconds", limits.detached_timeout_seconds)?,
        queue,
        max_queue,
        approval,
    })
}

fn wide(value: NonZeroU32) -> u64 {
    value.get().into()
}

fn seconds(value: NonZeroU32) -> Duration {
    Duration::from_secs(wide(value))
}

/// Thousandths of a core.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "validated when the configuration was loaded"
)]
fn millicores(cores: f64) -> u64 {
    (cores * 1000.0).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::config;

    fn limits(variables: &[(&str, &str)]) -> Result<RunLimits> {
        run_limits(&config(variables))
    }

    #[test]
    fn unset_keys_keep_built_in_limits() {
        let limits = limits(&[]).unwrap();
        assert_eq!(limits.defaults, Limits::default());
        assert_eq!(limits.ceilings, Ceilings::default());
        assert_eq!(limits.timeouts, Timeouts::default());
    }

    #[test]
    fn every_limit_has_a_default_and_a_maximum() {
        let limits = limits(&[
            ("CODELIA_LIMITS_TIMEOUT_SECONDS", "1"),
            ("CODELIA_LIMITS_MAX_TIMEOUT_SECONDS", "2"),
            ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "3"),
            ("CODELIA_LIMITS_MAX_MEMORY_MB", "4"),
            ("CODELIA_SANDBOX_CPU_LIMIT", "0.5"),
            ("CODELIA_LIMITS_MAX_CPUS", "6.5"),
            ("CODELIA_LIMITS_PIDS", "7"),
            ("CODELIA_LIMITS_MAX_PIDS", "8"),
            ("CODELIA_LIMITS_OPEN_FILES", "9"),
            ("CODELIA_LIMITS_MAX_OPEN_FILES", "10"),
            ("CODELIA_LIMITS_OUTPUT_MB", "11"),
            ("CODELIA_LIMITS_MAX_OUTPUT_MB", "12"),
            ("CODELIA_LIMITS_CPU_TIME_SECONDS", "13"),
            ("CODELIA_LIMITS_MAX_CPU_TIME_SECONDS", "14"),
            ("CODELIA_LIMITS_FILE_MB", "15"),
            ("CODELIA_LIMITS_MAX_FILE_MB", "16"),
            ("CODELIA_LIMITS_TMP_MB", "17"),
            ("CODELIA_LIMITS_MAX_TMP_MB", "18"),
            ("CODELIA_LIMITS_DISK_MB", "19"),
            ("CODELIA_LIMITS_MAX_DISK_MB", "20"),
            ("CODELIA_LIMITS_INODES", "21"),
            ("CODELIA_LIMITS_MAX_INODES", "22"),
        ])
        .unwrap();
        let of = |limits: &Limits| {
            let mib = [
                limits.memory_bytes,
                limits.output_bytes,
                limits.file_bytes,
                limits.tmp_bytes,
                limits.disk_bytes,
            ];
            let times = [limits.timeout, limits.cpu_time].map(|time| time.as_secs());
            let counts = [limits.cpu_millicores, limits.pids, limits.open_files, limits.inodes];
            (times, mib.map(|bytes| bytes / MIB), counts)
        };
        assert_eq!(of(&limits.defaults), ([1, 13], [3, 11, 15, 17, 19], [500, 7, 9, 21]));
        assert_eq!(of(&limits.ceilings.0), ([2, 14], [4, 12, 16, 18, 20], [6500, 8, 10, 22]));
        assert_eq!(limits.timeouts.detached, Duration::from_secs(2), "within the maximum");
    }

    #[test]
    fn maximum_below_default_is_refused() {
        for (name, value, expected) in [
            ("CODELIA_LIMITS_MAX_PIDS", "99", "limits.max_pids: 99 is below the default limit 100"),
            ("CODELIA_LIMITS_MAX_TIMEOUT_SECONDS", "60", "limits.max_timeout_seconds: 60 is below"),
            ("CODELIA_LIMITS_DETACHED_TIMEOUT_SECONDS", "90000", "is above limits.max_timeout_seconds 86400"),
            ("CODELIA_LIMITS_MAX_QUEUE_TIMEOUT_SECONDS", "60", "is below limits.queue_timeout_seconds 600"),
        ] {
            let error = limits(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn default_above_built_in_maximum_raises_it() {
        let limits = limits(&[("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "4096")]).unwrap();
        assert_eq!(limits.ceilings.0.memory_bytes, 4096 * MIB);
    }
}
