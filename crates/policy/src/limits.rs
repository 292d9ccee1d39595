//! Resource limits: what was asked for, the defaults, the ceilings, and what holds.

use std::time::Duration;

use serde::{Deserialize, Serialize};

const MIB: u64 = 1024 * 1024;

/// The limits a run is held to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Wall time.
    pub timeout: Duration,
    /// Memory of all processes together.
    pub memory_bytes: u64,
    /// CPU rate in thousandths of a core.
    pub cpu_millis: u64,
    /// Processes and threads together.
    pub pids: u64,
    /// Open files of each process.
    pub open_files: u64,
    /// Kept output, stdout and stderr together.
    pub output_bytes: u64,
    /// CPU time of all processes together.
    pub cpu_time: Duration,
    /// The largest file it may write.
    pub file_bytes: u64,
    /// The size of each private temporary file system.
    pub tmp_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(120),
            memory_bytes: 512 * MIB,
            cpu_millis: 1000,
            pids: 100,
            open_files: 1024,
            output_bytes: 10 * MIB,
            cpu_time: Duration::from_secs(120),
            file_bytes: 1024 * MIB,
            tmp_bytes: 64 * MIB,
        }
    }
}

impl Limits {
    /// The same limits, none above those of `caps`.
    #[must_use]
    pub fn within(&self, caps: &LimitsRequest) -> Self {
        fn least<T: Ord + Copy>(limit: T, cap: Option<T>) -> T {
            cap.map_or(limit, |cap| limit.min(cap))
        }
        Self {
            timeout: least(self.timeout, caps.timeout),
            memory_bytes: least(self.memory_bytes, caps.memory_bytes),
            cpu_millis: least(self.cpu_millis, caps.cpu_millis),
            pids: least(self.pids, caps.pids),
            open_files: least(self.open_files, caps.open_files),
            output_bytes: least(self.output_bytes, caps.output_bytes),
            cpu_time: least(self.cpu_time, caps.cpu_time),
            file_bytes: least(self.file_bytes, caps.file_bytes),
            tmp_bytes: least(self.tmp_bytes, caps.tmp_bytes),
        }
    }
}

/// The most that may be asked for. Operators set them; above one is refused, never cut.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ceilings(pub Limits);

impl Default for Ceilings {
    fn default() -> Self {
        Self(Limits {
            timeout: Duration::from_secs(600),
            memory_bytes: 2048 * MIB,
            cpu_millis: 2000,
            pids: 500,
            open_files: 4096,
            output_bytes: 10 * MIB,
            cpu_time: Duration::from_secs(600),
            file_bytes: 10 * 1024 * MIB,
            tmp_bytes: 1024 * MIB,
        })
    }
}

/// Limits as somebody asked for them. `None` means the one below holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsRequest {
    /// See [`Limits::timeout`].
    pub timeout: Option<Duration>,
    /// See [`Limits::memory_bytes`].
    pub memory_bytes: Option<u64>,
    /// See [`Limits::cpu_millis`].
    pub cpu_millis: Option<u64>,
    /// See [`Limits::pids`].
    pub pids: Option<u64>,
    /// See [`Limits::open_files`].
    pub open_files: Option<u64>,
    /// See [`Limits::output_bytes`].
    pub output_bytes: Option<u64>,
    /// See [`Limits::cpu_time`].
    pub cpu_time: Option<Duration>,
    /// See [`Limits::file_bytes`].
    pub file_bytes: Option<u64>,
    /// See [`Limits::tmp_bytes`].
    pub tmp_bytes: Option<u64>,
}

/// A limit that cannot be granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// Zero is no limit.
    #[error("must be more than zero")]
    Zero {
        /// The field, as in the API.
        field: &'static str,
    },
    /// More than the ceiling.
    #[error("is above the ceiling of {ceiling}")]
    AboveCeiling {
        /// The field, as in the API.
        field: &'static str,
        /// The most that is granted, for people.
        ceiling: String,
    },
}

impl LimitError {
    /// The field at fault, as in the API.
    #[must_use]
    pub fn field(&self) -> &'static str {
        match self {
            Self::Zero { field } | Self::AboveCeiling { field, .. } => field,
        }
    }
}

impl LimitsRequest {
    /// Fields set in `self` win over those of `below`.
    #[must_use]
    pub fn over(&self, below: &Self) -> Self {
        Self {
            timeout: self.timeout.or(below.timeout),
            memory_bytes: self.memory_bytes.or(below.memory_bytes),
            cpu_millis: self.cpu_millis.or(below.cpu_millis),
            pids: self.pids.or(below.pids),
            open_files: self.open_files.or(below.open_files),
            output_bytes: self.output_bytes.or(below.output_bytes),
            cpu_time: self.cpu_time.or(below.cpu_time),
            file_bytes: self.file_bytes.or(below.file_bytes),
            tmp_bytes: self.tmp_bytes.or(below.tmp_bytes),
        }
    }

    /// What was asked for, else the default, without a look at ceilings: for what was admitted once.
    #[must_use]
    pub fn or_default(&self, defaults: &Limits) -> Limits {
        Limits {
            timeout: self.timeout.unwrap_or(defaults.timeout),
            memory_bytes: self.memory_bytes.unwrap_or(defaults.memory_bytes),
            cpu_millis: self.cpu_millis.unwrap_or(defaults.cpu_millis),
            pids: self.pids.unwrap_or(defaults.pids),
            open_files: self.open_files.unwrap_or(defaults.open_files),
            output_bytes: self.output_bytes.unwrap_or(defaults.output_bytes),
            cpu_time: self.cpu_time.unwrap_or(defaults.cpu_time),
            file_bytes: self.file_bytes.unwrap_or(defaults.file_bytes),
            tmp_bytes: self.tmp_bytes.unwrap_or(defaults.tmp_bytes),
        }
    }

    /// The limits that hold: what was asked for, else the default.
    ///
    /// # Errors
    /// Names the first field that is zero or above its ceiling.
    pub fn resolve(&self, defaults: &Limits, ceilings: &Ceilings) -> Result<Limits, LimitError> {
        let most = &ceilings.0;
        Ok(Limits {
            timeout: pick_duration("limits.timeout", self.timeout, defaults.timeout, most.timeout)?,
            memory_bytes: pick(
                "limits.memory_bytes",
                self.memory_bytes,
                defaults.memory_bytes,
                most.memory_bytes,
            )?,
            cpu_millis: pick("limits.cpu_millis", self.cpu_millis, defaults.cpu_millis, most.cpu_millis)?,
            pids: pick("limits.pids", self.pids, defaults.pids, most.pids)?,
            open_files: pick("limits.open_files", self.open_files, defaults.open_files, most.open_files)?,
            output_bytes: pick(
                "limits.output_bytes",
                self.output_bytes,
                defaults.output_bytes,
                most.output_bytes,
            )?,
            cpu_time: pick_duration("limits.cpu_time", self.cpu_time, defaults.cpu_time, most.cpu_time)?,
            file_bytes: pick("limits.file_bytes", self.file_bytes, defaults.file_bytes, most.file_bytes)?,
            tmp_bytes: pick("limits.tmp_bytes", self.tmp_bytes, defaults.tmp_bytes, most.tmp_bytes)?,
        })
    }
}

fn pick(field: &'static str, asked: Option<u64>, default: u64, most: u64) -> Result<u64, LimitError> {
    match asked {
        None => Ok(default),
        Some(0) => Err(LimitError::Zero { field }),
        Some(value) if value > most => Err(LimitError::AboveCeiling { field, ceiling: most.to_string() }),
        Some(value) => Ok(value),
    }
}

fn pick_duration(
    field: &'static str,
    asked: Option<Duration>,
    default: Duration,
    most: Duration,
) -> Result<Duration, LimitError> {
    match asked {
        None => Ok(default),
        Some(Duration::ZERO) => Err(LimitError::Zero { field }),
        Some(value) if value > most => Err(LimitError::AboveCeiling { field, ceiling: format!("{most:?}") }),
        Some(value) => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_limit_takes_the_default() {
        let limits = LimitsRequest::default().resolve(&Limits::default(), &Ceilings::default());
        assert_eq!(limits, Ok(Limits::default()));
    }

    #[test]
    fn zero_and_above_the_ceiling_are_refused_with_the_field() {
        for (request, field) in [
            (LimitsRequest { pids: Some(0), ..Default::default() }, "limits.pids"),
            (LimitsRequest { memory_bytes: Some(u64::MAX), ..Default::default() }, "limits.memory_bytes"),
            (
                LimitsRequest { timeout: Some(Duration::from_secs(601)), ..Default::default() },
                "limits.timeout",
            ),
        ] {
            let error = request.resolve(&Limits::default(), &Ceilings::default()).unwrap_err();
            assert_eq!(error.field(), field);
        }
    }

    #[test]
    fn the_ceiling_itself_is_granted() {
        let most = Ceilings::default();
        let request = LimitsRequest { pids: Some(most.0.pids), ..Default::default() };
        assert_eq!(request.resolve(&Limits::default(), &most).unwrap().pids, most.0.pids);
    }
}
