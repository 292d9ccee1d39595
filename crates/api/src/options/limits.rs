//! Default and highest limits of runs.

use std::{fmt::Display, num::NonZeroU32, time::Duration};

use codelia_policy::{Ceilings, Limits};
use codelia_types::{
    ByteSize, Cores, duration,
    option::{InvalidOption, positive},
    optional_duration,
};
use serde::{Deserializer, de::Error};

/// Default timeout of interactive and detached runs.
const LONG_TIMEOUT: Duration = Duration::from_secs(4 * 3600);
/// Highest queue timeout.
const MAX_QUEUE_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// The longest time that a run may wait for an approval.
const MAX_APPROVAL_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

codelia_types::options! {
    /// Default and highest limits of runs: the section `limits` of the configuration. Without a
    /// value, a maximum is the built-in one.
    pub struct LimitOptions {
        /// Wall time of a run.
        #[serde(with = "duration")]
        pub timeout: Duration = Duration::from_secs(120),
        /// Wall time of runs with a terminal. Default: 4h, within the maximum.
        #[serde(with = "optional_duration")]
        pub interactive_timeout: Option<Duration> = None,
        /// Wall time of runs whose caller does not wait. Default: 4h, within the maximum.
        #[serde(with = "optional_duration")]
        pub detached_timeout: Option<Duration> = None,
        /// Highest wall time. Default: 24h, at least the default.
        #[serde(with = "optional_duration")]
        pub max_timeout: Option<Duration> = None,
        /// How long a run may wait for a worker.
        #[serde(with = "duration")]
        pub queue_timeout: Duration = Duration::from_secs(600),
        /// Longest time that a run may ask to wait. Default: 24h, at least the default.
        #[serde(with = "optional_duration")]
        pub max_queue_timeout: Option<Duration> = None,
        /// Highest memory; the default is `sandbox.memory_limit`. Default: 2 GiB, at least the
        /// default.
        pub max_memory: Option<ByteSize> = None,
        /// Most cores; the default is `sandbox.cpu_limit`. Default: 2, at least the default.
        pub max_cpus: Option<Cores> = None,
        /// Processes and threads of a run.
        pub pids: NonZeroU32 = const { NonZeroU32::new(100).unwrap() },
        /// Most processes and threads. Default: 500, at least the default.
        pub max_pids: Option<NonZeroU32> = None,
        /// Open files of each process.
        pub open_files: NonZeroU32 = const { NonZeroU32::new(1024).unwrap() },
        /// Most open files. Default: 4096, at least the default.
        pub max_open_files: Option<NonZeroU32> = None,
        /// Output that is stored.
        #[serde(deserialize_with = "positive")]
        pub output_size: ByteSize = ByteSize::mib(10),
        /// Most output. Default: 100 MiB, at least the default.
        pub max_output_size: Option<ByteSize> = None,
        /// CPU time of all processes together.
        #[serde(with = "duration")]
        pub cpu_time: Duration = Duration::from_secs(120),
        /// Most CPU time. Default: 24h, at least the default.
        #[serde(with = "optional_duration")]
        pub max_cpu_time: Option<Duration> = None,
        /// Size of the largest file that a command may write.
        #[serde(deserialize_with = "positive")]
        pub file_size: ByteSize = ByteSize::mib(1024),
        /// Highest size of a file. Default: 10 GiB, at least the default.
        pub max_file_size: Option<ByteSize> = None,
        /// Size of each private temporary file system.
        #[serde(deserialize_with = "positive")]
        pub tmp_size: ByteSize = ByteSize::mib(64),
        /// Highest size of a temporary file system. Default: 1 GiB, at least the default.
        pub max_tmp_size: Option<ByteSize> = None,
        /// Size of all files of a session together.
        #[serde(deserialize_with = "positive")]
        pub disk_size: ByteSize = ByteSize::mib(10240),
        /// Highest size of all files of a session. Default: 100 GiB, at least the default.
        pub max_disk_size: Option<ByteSize> = None,
        /// Number of files, directories and links of a session.
        pub inodes: NonZeroU32 = const { NonZeroU32::new(1_000_000).unwrap() },
        /// Most files, directories and links. Default: 10000000, at least the default.
        pub max_inodes: Option<NonZeroU32> = None,
    }
}

codelia_types::options! {
    /// Requests that a person decides about: the section `approvals` of the configuration.
    pub struct ApprovalOptions {
        /// How long a run waits for a decision, at most 24h.
        #[serde(serialize_with = "duration::serialize", deserialize_with = "approval_timeout")]
        pub timeout: Duration = Duration::from_secs(600),
    }
}

fn approval_timeout<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let timeout = duration::deserialize(from)?;
    let is_within = (Duration::from_secs(1)..=MAX_APPROVAL_TIMEOUT).contains(&timeout);
    if is_within { Ok(timeout) } else { Err(D::Error::custom("must be 1s to 24h")) }
}

/// Timeouts of runs that depend on how they were started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout of a run with a terminal whose caller sets none.
    pub interactive: Duration,
    /// Timeout of a run without a terminal that was started by `StartRun` and whose caller sets
    /// none.
    pub detached: Duration,
    /// How long a run waits for a worker whose caller sets no queue timeout.
    pub queue: Duration,
    /// The highest queue timeout that a caller may set.
    pub max_queue: Duration,
    /// How long a run waits for an approval before it ends as refused.
    pub approval: Duration,
}

/// The limits of runs that request none, and the highest that they may request.
#[derive(Debug, Clone)]
pub struct RunLimits {
    /// Limits of runs whose caller sets none.
    pub defaults: Limits,
    /// The highest limits a caller may set, unless its tenant has ceilings of its own.
    pub ceilings: Ceilings,
    /// Timeouts of runs that depend on how they were started.
    pub timeouts: Timeouts,
}

impl LimitOptions {
    /// The limits of runs; `memory` and `cores` are those of runs that request none.
    ///
    /// # Errors
    /// If a configured maximum is below its default. A built-in one is raised.
    pub fn of_runs(
        &self,
        memory: ByteSize,
        cores: Cores,
        approvals: &ApprovalOptions,
    ) -> Result<RunLimits, InvalidOption> {
        let defaults = self.defaults(memory, cores);
        let ceilings = self.ceilings(&defaults)?;
        let queue = self.queue_timeout;
        let timeouts = Timeouts {
            interactive: long_timeout(
                "interactive_timeout",
                self.interactive_timeout,
                ceilings.timeout,
            )?,
            detached: long_timeout("detached_timeout", self.detached_timeout, ceilings.timeout)?,
            queue,
            max_queue: highest(
                "max_queue_timeout",
                self.max_queue_timeout,
                MAX_QUEUE_TIMEOUT,
                queue,
            )?,
            approval: approvals.timeout,
        };
        Ok(RunLimits { defaults, ceilings: Ceilings(ceilings), timeouts })
    }

    fn defaults(&self, memory: ByteSize, cores: Cores) -> Limits {
        Limits {
            timeout: self.timeout,
            memory_bytes: memory.bytes(),
            cpu_millicores: cores.millicores(),
            pids: self.pids.amount(),
            open_files: self.open_files.amount(),
            output_bytes: self.output_size.bytes(),
            cpu_time: self.cpu_time,
            file_bytes: self.file_size.bytes(),
            tmp_bytes: self.tmp_size.bytes(),
            disk_bytes: self.disk_size.bytes(),
            inodes: self.inodes.amount(),
        }
    }

    fn ceilings(&self, least: &Limits) -> Result<Limits, InvalidOption> {
        let Ceilings(most) = Ceilings::default();
        Ok(Limits {
            timeout: highest("max_timeout", self.max_timeout, most.timeout, least.timeout)?,
            memory_bytes: highest(
                "max_memory",
                self.max_memory,
                most.memory_bytes,
                least.memory_bytes,
            )?,
            cpu_millicores: highest(
                "max_cpus",
                self.max_cpus,
                most.cpu_millicores,
                least.cpu_millicores,
            )?,
            pids: highest("max_pids", self.max_pids, most.pids, least.pids)?,
            open_files: highest(
                "max_open_files",
                self.max_open_files,
                most.open_files,
                least.open_files,
            )?,
            output_bytes: highest(
                "max_output_size",
                self.max_output_size,
                most.output_bytes,
                least.output_bytes,
            )?,
            cpu_time: highest("max_cpu_time", self.max_cpu_time, most.cpu_time, least.cpu_time)?,
            file_bytes: highest(
                "max_file_size",
                self.max_file_size,
                most.file_bytes,
                least.file_bytes,
            )?,
            tmp_bytes: highest("max_tmp_size", self.max_tmp_size, most.tmp_bytes, least.tmp_bytes)?,
            disk_bytes: highest(
                "max_disk_size",
                self.max_disk_size,
                most.disk_bytes,
                least.disk_bytes,
            )?,
            inodes: highest("max_inodes", self.max_inodes, most.inodes, least.inodes)?,
        })
    }
}

/// A value of the configuration, and its amount in [`Limits`].
trait Amount {
    type Amount: Ord;
    fn amount(&self) -> Self::Amount;
    fn show(amount: &Self::Amount) -> impl Display;
}

impl Amount for Duration {
    type Amount = Self;

    fn amount(&self) -> Self {
        *self
    }

    fn show(amount: &Self) -> impl Display {
        duration::text(*amount)
    }
}

impl Amount for ByteSize {
    type Amount = u64;

    fn amount(&self) -> u64 {
        self.bytes()
    }

    fn show(amount: &u64) -> impl Display {
        Self::new(*amount)
    }
}

impl Amount for NonZeroU32 {
    type Amount = u64;

    fn amount(&self) -> u64 {
        self.get().into()
    }

    fn show(amount: &u64) -> impl Display {
        *amount
    }
}

impl Amount for Cores {
    type Amount = u64;

    fn amount(&self) -> u64 {
        self.millicores()
    }

    fn show(amount: &u64) -> impl Display {
        format!("{amount} thousandths of a core")
    }
}

/// The configured maximum, or the built-in one.
fn highest<T: Amount>(
    key: &str,
    set: Option<T>,
    built_in: T::Amount,
    default: T::Amount,
) -> Result<T::Amount, InvalidOption> {
    let Some(max) = set.map(|max| max.amount()) else { return Ok(built_in.max(default)) };
    if max >= default {
        return Ok(max);
    }
    let max = T::show(&max);
    let default = T::show(&default);
    let message = format!("{max} is below the default {default}; change one");
    Err(InvalidOption::new(format!("limits.{key}"), message))
}

fn long_timeout(
    key: &str,
    set: Option<Duration>,
    max: Duration,
) -> Result<Duration, InvalidOption> {
    let timeout = set.unwrap_or(LONG_TIMEOUT.min(max));
    let message = if timeout.is_zero() {
        "must be more than 0".to_owned()
    } else if timeout > max {
        let timeout = duration::text(timeout);
        let max = duration::text(max);
        format!("{timeout} is above limits.max_timeout {max}; change one")
    } else {
        return Ok(timeout);
    };
    Err(InvalidOption::new(format!("limits.{key}"), message))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn of_runs(limits: &LimitOptions) -> Result<RunLimits, InvalidOption> {
        limits.of_runs(ByteSize::mib(512), Cores::ONE, &ApprovalOptions::default())
    }

    #[test]
    fn unset_keys_keep_built_in_limits() {
        let limits = of_runs(&LimitOptions::default()).unwrap();
        assert_eq!(limits.defaults, Limits::default());
        assert_eq!(limits.ceilings, Ceilings::default());
    }

    #[test]
    fn maximum_below_default_is_refused() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        let limits = LimitOptions::default();
        for (limits, expected) in [
            (
                LimitOptions { max_pids: NonZeroU32::new(99), ..limits.clone() },
                "limits.max_pids: 99 is below the default 100; change one",
            ),
            (
                LimitOptions { max_timeout: seconds(60), ..limits.clone() },
                "limits.max_timeout: 1m is below the default 2m; change one",
            ),
            (
                LimitOptions { detached_timeout: seconds(90_000), ..limits.clone() },
                "limits.detached_timeout: 25h is above limits.max_timeout 1d; change one",
            ),
            (
                LimitOptions { max_queue_timeout: seconds(60), ..limits },
                "limits.max_queue_timeout: 1m is below the default 10m; change one",
            ),
        ] {
            assert_eq!(of_runs(&limits).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn default_above_built_in_maximum_raises_it() {
        let limits = LimitOptions::default();
        let limits =
            limits.of_runs(ByteSize::mib(4096), Cores::ONE, &ApprovalOptions::default()).unwrap();
        assert_eq!(limits.ceilings.0.memory_bytes, 4096 * MIB);
    }
}
