//! Resource limits: requested values, defaults, ceilings, and the limits a run gets.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;

/// Names one field of [`Limits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Limit {
    /// [`Limits::timeout`].
    #[serde(rename = "limits.timeout")]
    Timeout,
    /// [`Limits::memory_bytes`].
    #[serde(rename = "limits.memory_bytes")]
    MemoryBytes,
    /// [`Limits::cpu_millicores`].
    #[serde(rename = "limits.cpu_millicores")]
    CpuMillicores,
    /// [`Limits::pids`].
    #[serde(rename = "limits.pids")]
    Pids,
    /// [`Limits::open_files`].
    #[serde(rename = "limits.open_files")]
    OpenFiles,
    /// [`Limits::output_bytes`].
    #[serde(rename = "limits.output_bytes")]
    OutputBytes,
    /// [`Limits::cpu_time`].
    #[serde(rename = "limits.cpu_time")]
    CpuTime,
    /// [`Limits::file_bytes`].
    #[serde(rename = "limits.file_bytes")]
    FileBytes,
    /// [`Limits::tmp_bytes`].
    #[serde(rename = "limits.tmp_bytes")]
    TmpBytes,
    /// [`Limits::disk_bytes`].
    #[serde(rename = "limits.disk_bytes")]
    DiskBytes,
    /// [`Limits::inodes`].
    #[serde(rename = "limits.inodes")]
    Inodes,
}

impl Limit {
    /// Every limit, in the order of the fields of [`Limits`].
    pub const ALL: [Self; 11] = [
        Self::Timeout,
        Self::MemoryBytes,
        Self::CpuMillicores,
        Self::Pids,
        Self::OpenFiles,
        Self::OutputBytes,
        Self::CpuTime,
        Self::FileBytes,
        Self::TmpBytes,
        Self::DiskBytes,
        Self::Inodes,
    ];

    /// The path of the field in the API, such as `limits.memory_bytes`.
    #[must_use]
    pub const fn field(self) -> &'static str {
        match self {
            Self::Timeout => "limits.timeout",
            Self::MemoryBytes => "limits.memory_bytes",
            Self::CpuMillicores => "limits.cpu_millicores",
            Self::Pids => "limits.pids",
            Self::OpenFiles => "limits.open_files",
            Self::OutputBytes => "limits.output_bytes",
            Self::CpuTime => "limits.cpu_time",
            Self::FileBytes => "limits.file_bytes",
            Self::TmpBytes => "limits.tmp_bytes",
            Self::DiskBytes => "limits.disk_bytes",
            Self::Inodes => "limits.inodes",
        }
    }

    /// The name of the limit in outcomes, such as `memory_bytes`.
    #[must_use]
    pub fn resource(self) -> &'static str {
        self.field().trim_start_matches("limits.")
    }

    /// A value of this limit with its unit, for error messages.
    fn display_value(self, value: u64) -> String {
        match self {
            Self::MemoryBytes | Self::OutputBytes | Self::FileBytes | Self::TmpBytes | Self::DiskBytes => {
                display_bytes(value)
            }
            Self::CpuMillicores => format!("{value} (thousandths of a core)"),
            Self::Timeout | Self::CpuTime | Self::Pids | Self::OpenFiles | Self::Inodes => value.to_string(),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.field())
    }
}

/// A duration in the largest unit that divides it without a remainder, such as `2m`.
#[must_use]
pub fn display_duration(duration: Duration) -> String {
    let millis = duration.as_millis();
    let units = [(3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];
    match units.into_iter().find(|(size, _)| millis > 0 && millis.is_multiple_of(*size)) {
        Some((size, unit)) => format!("{}{unit}", millis / size),
        None => format!("{duration:?}"),
    }
}

/// The largest binary unit that divides the value without a remainder.
fn display_bytes(bytes: u64) -> String {
    let units = [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")];
    match units.into_iter().find(|(size, _)| bytes > 0 && bytes.is_multiple_of(*size)) {
        Some((size, unit)) => format!("{} {unit}", bytes / size),
        None => format!("{bytes} bytes"),
    }
}

/// The limits that a run is held to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Wall time.
    pub timeout: Duration,
    /// Memory of all processes together, in bytes.
    pub memory_bytes: u64,
    /// CPU rate, in thousandths of a core.
    // Stored under the alias before.
    #[serde(alias = "cpu_millis")]
    pub cpu_millicores: u64,
    /// Number of processes and threads together.
    pub pids: u64,
    /// Number of open files of each process.
    pub open_files: u64,
    /// Output to keep, stdout and stderr together, in bytes.
    pub output_bytes: u64,
    /// CPU time of all processes together.
    pub cpu_time: Duration,
    /// Size of the largest file that the command may write, in bytes.
    pub file_bytes: u64,
    /// Size of each private temporary file system, in bytes.
    pub tmp_bytes: u64,
    /// Size of all files of the session together, in bytes.
    // Left out if it is the default: workers that do not know it refuse unknown fields.
    #[serde(default = "default_disk_bytes", skip_serializing_if = "is_default_disk_bytes")]
    pub disk_bytes: u64,
    /// Number of files, directories and links of the session together.
    #[serde(default = "default_inodes", skip_serializing_if = "is_default_inodes")]
    pub inodes: u64,
}

const DEFAULT_DISK_BYTES: u64 = 10 * GIB;
const DEFAULT_INODES: u64 = 1_000_000;

fn default_disk_bytes() -> u64 {
    DEFAULT_DISK_BYTES
}

fn default_inodes() -> u64 {
    DEFAULT_INODES
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_default_disk_bytes(value: &u64) -> bool {
    *value == DEFAULT_DISK_BYTES
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_default_inodes(value: &u64) -> bool {
    *value == DEFAULT_INODES
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(120),
            memory_bytes: 512 * MIB,
            cpu_millicores: 1000,
            pids: 100,
            open_files: 1024,
            output_bytes: 10 * MIB,
            cpu_time: Duration::from_secs(120),
            file_bytes: 1024 * MIB,
            tmp_bytes: 64 * MIB,
            disk_bytes: DEFAULT_DISK_BYTES,
            inodes: DEFAULT_INODES,
        }
    }
}

/// The limits of all files of a session together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DiskLimits {
    /// See [`Limits::disk_bytes`].
    pub bytes: u64,
    /// See [`Limits::inodes`].
    pub inodes: u64,
}

impl DiskLimits {
    /// The lower of these limits and `other`, each.
    #[must_use]
    pub fn lowered_to(self, other: Self) -> Self {
        Self { bytes: self.bytes.min(other.bytes), inodes: self.inodes.min(other.inodes) }
    }
}

impl Limits {
    /// The limits of the session's files.
    #[must_use]
    pub fn disk(&self) -> DiskLimits {
        DiskLimits { bytes: self.disk_bytes, inodes: self.inodes }
    }

    /// These limits, each lowered to its cap.
    #[must_use]
    pub fn within(&self, caps: &LimitsRequest) -> Self {
        self.lowered_to(&caps.or_default(self))
    }

    /// The lower of these limits and `max`, field by field.
    #[must_use]
    pub fn lowered_to(&self, max: &Self) -> Self {
        Self {
            timeout: self.timeout.min(max.timeout),
            memory_bytes: self.memory_bytes.min(max.memory_bytes),
            cpu_millicores: self.cpu_millicores.min(max.cpu_millicores),
            pids: self.pids.min(max.pids),
            open_files: self.open_files.min(max.open_files),
            output_bytes: self.output_bytes.min(max.output_bytes),
            cpu_time: self.cpu_time.min(max.cpu_time),
            file_bytes: self.file_bytes.min(max.file_bytes),
            tmp_bytes: self.tmp_bytes.min(max.tmp_bytes),
            disk_bytes: self.disk_bytes.min(max.disk_bytes),
            inodes: self.inodes.min(max.inodes),
        }
    }
}

/// The largest limits that may be requested. Operators set them, for the installation and for a tenant.
/// A request above a ceiling is refused, not lowered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ceilings(pub Limits);

impl Default for Ceilings {
    fn default() -> Self {
        Self(Limits {
            timeout: Duration::from_secs(24 * 3600),
            memory_bytes: 2048 * MIB,
            cpu_millicores: 2000,
            pids: 500,
            open_files: 4096,
            output_bytes: 100 * MIB,
            cpu_time: Duration::from_secs(24 * 3600),
            file_bytes: 10 * 1024 * MIB,
            tmp_bytes: 1024 * MIB,
            disk_bytes: 100 * GIB,
            inodes: 10_000_000,
        })
    }
}

impl Ceilings {
    /// These ceilings, replaced by those that a tenant has of its own.
    #[must_use]
    pub fn of_tenant(&self, own: &LimitsRequest) -> Self {
        Self(own.or_default(&self.0))
    }
}

/// Requested limits. `None` means that the next lower level decides, and finally the default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsRequest {
    /// See [`Limits::timeout`].
    pub timeout: Option<Duration>,
    /// See [`Limits::memory_bytes`].
    pub memory_bytes: Option<u64>,
    /// See [`Limits::cpu_millicores`].
    #[serde(alias = "cpu_millis")]
    pub cpu_millicores: Option<u64>,
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
    /// See [`Limits::disk_bytes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// See [`Limits::inodes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inodes: Option<u64>,
}

/// A requested limit that is not granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// The limit is zero.
    #[error("must be more than zero")]
    Zero {
        /// The limit at fault.
        limit: Limit,
    },
    /// The limit is above its ceiling.
    #[error("maximum is {maximum}")]
    TooHigh {
        /// The limit at fault.
        limit: Limit,
        /// The ceiling, with its unit.
        maximum: String,
    },
}

impl LimitError {
    /// The limit at fault.
    #[must_use]
    pub fn limit(&self) -> Limit {
        match self {
            Self::Zero { limit } | Self::TooHigh { limit, .. } => *limit,
        }
    }

    /// The path of the field at fault, as in the API.
    #[must_use]
    pub fn field(&self) -> &'static str {
        self.limit().field()
    }
}

impl LimitsRequest {
    /// Combines two requests. A field set in `self` wins over the same field of `below`.
    #[must_use]
    pub fn over(&self, below: &Self) -> Self {
        Self {
            timeout: self.timeout.or(below.timeout),
            memory_bytes: self.memory_bytes.or(below.memory_bytes),
            cpu_millicores: self.cpu_millicores.or(below.cpu_millicores),
            pids: self.pids.or(below.pids),
            open_files: self.open_files.or(below.open_files),
            output_bytes: self.output_bytes.or(below.output_bytes),
            cpu_time: self.cpu_time.or(below.cpu_time),
            file_bytes: self.file_bytes.or(below.file_bytes),
            tmp_bytes: self.tmp_bytes.or(below.tmp_bytes),
            disk_bytes: self.disk_bytes.or(below.disk_bytes),
            inodes: self.inodes.or(below.inodes),
        }
    }

    /// The requested limits, or the defaults, without checking ceilings. For requests that were checked before.
    #[must_use]
    pub fn or_default(&self, defaults: &Limits) -> Limits {
        Limits {
            timeout: self.timeout.unwrap_or(defaults.timeout),
            memory_bytes: self.memory_bytes.unwrap_or(defaults.memory_bytes),
            cpu_millicores: self.cpu_millicores.unwrap_or(defaults.cpu_millicores),
            pids: self.pids.unwrap_or(defaults.pids),
            open_files: self.open_files.unwrap_or(defaults.open_files),
            output_bytes: self.output_bytes.unwrap_or(defaults.output_bytes),
            cpu_time: self.cpu_time.unwrap_or(defaults.cpu_time),
            file_bytes: self.file_bytes.unwrap_or(defaults.file_bytes),
            tmp_bytes: self.tmp_bytes.unwrap_or(defaults.tmp_bytes),
            disk_bytes: self.disk_bytes.unwrap_or(defaults.disk_bytes),
            inodes: self.inodes.unwrap_or(defaults.inodes),
        }
    }

    /// The requested limits, or the defaults, checked against the ceilings.
    ///
    /// # Errors
    /// Names the first limit that is zero or above its ceiling.
    pub fn resolve(&self, defaults: &Limits, ceilings: &Ceilings) -> Result<Limits, LimitError> {
        let max = &ceilings.0;
        let amount = |limit, requested, default, max| match requested {
            None => Ok(default),
            Some(0) => Err(LimitError::Zero { limit }),
            Some(value) if value > max => {
                Err(LimitError::TooHigh { limit, maximum: limit.display_value(max) })
            }
            Some(value) => Ok(value),
        };
        let time = |limit, requested, default, max| match requested {
            None => Ok(default),
            Some(Duration::ZERO) => Err(LimitError::Zero { limit }),
            Some(value) if value > max => Err(LimitError::TooHigh { limit, maximum: display_duration(max) }),
            Some(value) => Ok(value),
        };
        Ok(Limits {
            timeout: time(Limit::Timeout, self.timeout, defaults.timeout, max.timeout)?,
            memory_bytes: amount(
                Limit::MemoryBytes,
                self.memory_bytes,
                defaults.memory_bytes,
                max.memory_bytes,
            )?,
            cpu_millicores: amount(
                Limit::CpuMillicores,
                self.cpu_millicores,
                defaults.cpu_millicores,
                max.cpu_millicores,
            )?,
            pids: amount(Limit::Pids, self.pids, defaults.pids, max.pids)?,
            open_files: amount(Limit::OpenFiles, self.open_files, defaults.open_files, max.open_files)?,
            output_bytes: amount(
                Limit::OutputBytes,
                self.output_bytes,
                defaults.output_bytes,
                max.output_bytes,
            )?,
            cpu_time: time(Limit::CpuTime, self.cpu_time, defaults.cpu_time, max.cpu_time)?,
            file_bytes: amount(Limit::FileBytes, self.file_bytes, defaults.file_bytes, max.file_bytes)?,
            tmp_bytes: amount(Limit::TmpBytes, self.tmp_bytes, defaults.tmp_bytes, max.tmp_bytes)?,
            disk_bytes: amount(Limit::DiskBytes, self.disk_bytes, defaults.disk_bytes, max.disk_bytes)?,
            inodes: amount(Limit::Inodes, self.inodes, defaults.inodes, max.inodes)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_limit_takes_default() {
        let limits = LimitsRequest::default().resolve(&Limits::default(), &Ceilings::default());
        assert_eq!(limits, Ok(Limits::default()));
    }

    /// The table of container limits: resource, default, maximum.
    #[test]
    fn defaults_and_ceilings_are_as_published() {
        let (default, max) = (Limits::default(), Ceilings::default().0);
        assert_eq!((default.cpu_millicores, max.cpu_millicores), (1000, 2000));
        assert_eq!((default.memory_bytes, max.memory_bytes), (512 * 1024 * 1024, 2 * 1024 * 1024 * 1024));
        assert_eq!((default.timeout.as_secs(), max.timeout.as_secs()), (2 * 60, 24 * 3600));
        assert_eq!((default.pids, max.pids), (100, 500));
        assert_eq!((default.open_files, max.open_files), (1024, 4096));
        assert_eq!((default.output_bytes, max.output_bytes), (10 * 1024 * 1024, 100 * 1024 * 1024));
    }

    #[test]
    fn zero_or_above_ceiling_is_refused() {
        let too_long = Duration::from_secs(24 * 3600 + 1);
        for (request, limit, message) in [
            (LimitsRequest { pids: Some(0), ..Default::default() }, Limit::Pids, "must be more than zero"),
            (LimitsRequest { pids: Some(501), ..Default::default() }, Limit::Pids, "maximum is 500"),
            (
                LimitsRequest { memory_bytes: Some(u64::MAX), ..Default::default() },
                Limit::MemoryBytes,
                "maximum is 2 GiB",
            ),
            (
                LimitsRequest { timeout: Some(too_long), ..Default::default() },
                Limit::Timeout,
                "maximum is 24h",
            ),
        ] {
            let error = request.resolve(&Limits::default(), &Ceilings::default()).unwrap_err();
            assert_eq!(error.field(), limit.field());
            assert_eq!(error.to_string(), message);
        }
    }

    #[test]
    fn ceiling_itself_is_granted() {
        let max = Ceilings::default();
        let request = LimitsRequest { pids: Some(max.0.pids), ..Default::default() };
        assert_eq!(request.resolve(&Limits::default(), &max).unwrap().pids, max.0.pids);
    }

    #[test]
    fn limits_stored_under_former_name_are_readable() {
        let mut stored = serde_json::to_value(Limits::default()).unwrap();
        let rate = stored.as_object_mut().unwrap().remove("cpu_millicores").unwrap();
        stored["cpu_millis"] = rate;
        assert_eq!(serde_json::from_value::<Limits>(stored).unwrap(), Limits::default());
        let request = LimitsRequest { cpu_millicores: Some(5), ..Default::default() };
        assert_eq!(serde_json::from_str::<LimitsRequest>(r#"{"cpu_millis": 5}"#).unwrap(), request);
    }

    #[test]
    fn ceilings_of_tenant_replace_those_of_installation() {
        let own =
            LimitsRequest { pids: Some(1000), timeout: Some(Duration::from_secs(60)), ..Default::default() };
        let ceilings = Ceilings::default().of_tenant(&own);
        assert_eq!((ceilings.0.pids, ceilings.0.timeout.as_secs()), (1000, 60));
        assert_eq!(ceilings.0.memory_bytes, Ceilings::default().0.memory_bytes);
    }

    #[test]
    fn durations_are_shown_in_largest_exact_unit() {
        for (millis, text) in
            [(500, "500ms"), (1000, "1s"), (90_000, "90s"), (120_000, "2m"), (86_400_000, "24h")]
        {
            assert_eq!(display_duration(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn limit_serializes_as_its_field() {
        for limit in Limit::ALL {
            assert_eq!(serde_json::to_value(limit).unwrap(), limit.field());
        }
    }

    #[test]
    fn bytes_are_shown_in_largest_exact_unit() {
        for (bytes, text) in [(0, "0 bytes"), (1500, "1500 bytes"), (64 * MIB, "64 MiB"), (GIB, "1 GiB")] {
            assert_eq!(display_bytes(bytes), text);
        }
    }
}
