//! Resource limits: requested values, defaults, ceilings, and the limits a run gets.
//!
//! [`limit_table`](crate::limit_table) lists them. Everything that must know each limit is made
//! from it.

use std::{fmt, time::Duration};

use codelia_types::{ByteSize, duration, optional_duration};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1024 * MIB;

/// Calls the macro `$reader` with the table of limits. A new limit is a row here and a field of the
/// message `Limits`.
///
/// A row has the limit, its field with type and unit, the default, the highest value that may be
/// requested unless an operator sets another, and the policy fields that cap it.
#[macro_export]
macro_rules! limit_table {
    ($reader:ident) => {
        $reader! {
            /// Wall time.
            Timeout: timeout Duration Time,
                Duration::from_secs(120), Duration::from_secs(24 * 3600), [resources.max_wall_time];
            /// Memory of all processes together, in bytes.
            MemoryBytes: memory_bytes u64 Bytes,
                512 * MIB, 2048 * MIB, [resources.max_memory_bytes];
            /// CPU rate, in thousandths of a core.
            CpuMillicores: cpu_millicores u64 Millicores,
                1000, 2000, [resources.max_cpu_millicores];
            /// Number of processes and threads together, as the kernel counts them.
            Pids: pids u64 Count,
                100, 500, [process.max_processes, resources.max_threads];
            /// Number of open files of each process.
            OpenFiles: open_files u64 Count,
                1024, 4096, [resources.max_open_files];
            /// Output to keep, stdout and stderr together, in bytes.
            OutputBytes: output_bytes u64 Bytes,
                10 * MIB, 100 * MIB, [resources.max_output_bytes];
            /// CPU time of all processes together.
            CpuTime: cpu_time Duration Time,
                Duration::from_secs(120), Duration::from_secs(24 * 3600), [resources.max_cpu_time];
            /// Size of the largest file that the command may write, in bytes.
            FileBytes: file_bytes u64 Bytes,
                GIB, 10 * GIB, [filesystem.max_file_bytes];
            /// Size of each private temporary file system, in bytes.
            TmpBytes: tmp_bytes u64 Bytes,
                64 * MIB, GIB, [resources.max_tmp_bytes];
            /// Size of all files of the session together, in bytes.
            DiskBytes: disk_bytes u64 Bytes,
                10 * GIB, 100 * GIB, [filesystem.max_total_bytes];
            /// Number of files, directories and links of the session together.
            Inodes: inodes u64 Count,
                1_000_000, 10_000_000, [filesystem.max_inodes];
        }
    };
}

/// Defines the limits and all that is done to each of them.
macro_rules! define {
    ($(
        $(#[$doc:meta])+
        $limit:ident: $field:ident $type:ident $unit:ident,
            $default:expr, $ceiling:expr, [$($group:ident.$cap:ident),+];
    )+) => {
        /// Names one field of [`Limits`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Limit {
            $($(#[$doc])+ $limit,)+
        }

        /// The limits that a run is held to.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Limits {
            $($(#[$doc])+ pub $field: $type,)+
        }

        /// Requested limits. `None` means that the next lower level decides, and finally the
        /// default. Times are text such as `2m` in documents.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct LimitsRequest {
            $(
                $(#[$doc])+
                #[serde(
                    skip_serializing_if = "Option::is_none",
                    serialize_with = "LimitValue::write",
                    deserialize_with = "LimitValue::read"
                )]
                pub $field: Option<$type>,
            )+
        }

        impl Limit {
            /// Every limit, in the order of the fields of [`Limits`].
            pub const ALL: [Self; [$(stringify!($field)),+].len()] = [$(Self::$limit),+];

            /// The path of the field in the API, such as `limits.memory_bytes`.
            #[must_use]
            pub const fn field(self) -> &'static str {
                match self {
                    $(Self::$limit => concat!("limits.", stringify!($field)),)+
                }
            }

            /// The policy fields that cap it.
            pub(crate) const fn caps(self) -> &'static [&'static str] {
                match self {
                    $(Self::$limit => &[$(concat!(stringify!($group), ".", stringify!($cap))),+],)+
                }
            }

            const fn unit(self) -> Unit {
                match self {
                    $(Self::$limit => Unit::$unit,)+
                }
            }
        }

        impl Default for Limits {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl Default for Ceilings {
            fn default() -> Self {
                Self(Limits { $($field: $ceiling,)+ })
            }
        }

        impl Limits {
            /// The lower of these limits and `max`, field by field.
            #[must_use]
            pub fn lowered_to(&self, max: &Self) -> Self {
                Self { $($field: self.$field.min(max.$field),)+ }
            }
        }

        impl From<&Limits> for LimitsRequest {
            fn from(limits: &Limits) -> Self {
                Self { $($field: Some(limits.$field),)+ }
            }
        }

        impl LimitsRequest {
            /// Combines two requests. A field set in `self` wins over the same field of `below`.
            #[must_use]
            pub fn over(&self, below: &Self) -> Self {
                Self { $($field: self.$field.or(below.$field),)+ }
            }

            /// The requested limits, or the defaults, without checking ceilings. For requests that
            /// were checked before.
            #[must_use]
            pub fn or_default(&self, defaults: &Limits) -> Limits {
                Limits { $($field: self.$field.unwrap_or(defaults.$field),)+ }
            }

            /// The requested limits, each lowered to its ceiling.
            #[must_use]
            pub fn lowered_to(&self, ceilings: &Ceilings) -> Self {
                Self { $($field: self.$field.map(|limit| limit.min(ceilings.0.$field)),)+ }
            }

            /// The requested limits, or the defaults, checked against the ceilings.
            ///
            /// # Errors
            /// Names the first limit that is zero or above its ceiling.
            pub fn resolve(&self, defaults: &Limits, ceilings: &Ceilings) -> Result<Limits, LimitError> {
                Ok(Limits {
                    $($field: match self.$field {
                        Some(requested) => check(Limit::$limit, requested, ceilings.0.$field)?,
                        None => defaults.$field,
                    },)+
                })
            }

            /// Each limit with its requested amount, times in nanoseconds.
            pub fn amounts(&self) -> impl Iterator<Item = (Limit, Option<u128>)> + use<> {
                [$((Limit::$limit, self.$field.map(LimitValue::amount)),)+].into_iter()
            }
        }
    };
}

limit_table!(define);

/// The unit that an amount of a limit counts.
#[derive(Clone, Copy)]
pub(crate) enum Unit {
    Time,
    Bytes,
    Millicores,
    Count,
}

/// The value of a limit: an amount or a time.
pub(crate) trait LimitValue: Copy + Ord + Default {
    /// The value as a number, times in nanoseconds.
    fn amount(self) -> u128;
    /// The value with its unit, for error messages.
    fn display(self, unit: Unit) -> String;
    fn write<S: Serializer>(value: &Option<Self>, serializer: S) -> Result<S::Ok, S::Error>;
    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error>;
}

impl LimitValue for u64 {
    fn amount(self) -> u128 {
        self.into()
    }

    fn display(self, unit: Unit) -> String {
        match unit {
            Unit::Bytes => ByteSize::new(self).to_string(),
            Unit::Millicores => format!("{self} (thousandths of a core)"),
            Unit::Count | Unit::Time => self.to_string(),
        }
    }

    fn write<S: Serializer>(value: &Option<Self>, serializer: S) -> Result<S::Ok, S::Error> {
        value.serialize(serializer)
    }

    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error> {
        Deserialize::deserialize(deserializer)
    }
}

impl LimitValue for Duration {
    fn amount(self) -> u128 {
        self.as_nanos()
    }

    fn display(self, _: Unit) -> String {
        duration::text(self)
    }

    fn write<S: Serializer>(value: &Option<Self>, serializer: S) -> Result<S::Ok, S::Error> {
        optional_duration::serialize(value, serializer)
    }

    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error> {
        optional_duration::deserialize(deserializer)
    }
}

/// The requested limit, if it is neither zero nor above the maximum.
pub(crate) fn check<T: LimitValue>(limit: Limit, requested: T, max: T) -> Result<T, LimitError> {
    if requested == T::default() {
        return Err(LimitError::Zero { limit });
    }
    if requested > max {
        return Err(LimitError::TooHigh { limit, maximum: max.display(limit.unit()) });
    }
    Ok(requested)
}

impl Limit {
    /// The name of the limit in outcomes, such as `memory_bytes`.
    #[must_use]
    pub fn resource(self) -> &'static str {
        self.field().trim_start_matches("limits.")
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.field())
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.field())
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let found = Self::ALL.into_iter().find(|limit| limit.field() == text);
        found.ok_or_else(|| D::Error::custom(format!("unknown limit {text:?}")))
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
}

/// The largest limits that may be requested. Operators set them, for the installation and for a
/// tenant. A request above a ceiling is refused, not lowered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ceilings(pub Limits);

impl Ceilings {
    /// These ceilings, replaced by those that a tenant has of its own.
    #[must_use]
    pub fn of_tenant(&self, own: &LimitsRequest) -> Self {
        Self(own.or_default(&self.0))
    }
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
        assert_eq!(
            (default.memory_bytes, max.memory_bytes),
            (512 * 1024 * 1024, 2 * 1024 * 1024 * 1024)
        );
        assert_eq!((default.timeout.as_secs(), max.timeout.as_secs()), (2 * 60, 24 * 3600));
        assert_eq!((default.pids, max.pids), (100, 500));
        assert_eq!((default.open_files, max.open_files), (1024, 4096));
        assert_eq!((default.output_bytes, max.output_bytes), (10 * 1024 * 1024, 100 * 1024 * 1024));
    }

    #[test]
    fn zero_or_above_ceiling_is_refused() {
        let too_long = Duration::from_secs(24 * 3600 + 1);
        for (request, limit, message) in [
            (
                LimitsRequest { pids: Some(0), ..Default::default() },
                Limit::Pids,
                "must be more than zero",
            ),
            (
                LimitsRequest { pids: Some(501), ..Default::default() },
                Limit::Pids,
                "maximum is 500",
            ),
            (
                LimitsRequest { memory_bytes: Some(u64::MAX), ..Default::default() },
                Limit::MemoryBytes,
                "maximum is 2 GiB",
            ),
            (
                LimitsRequest { timeout: Some(too_long), ..Default::default() },
                Limit::Timeout,
                "maximum is 1d",
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
    fn ceilings_of_tenant_replace_those_of_installation() {
        let own = LimitsRequest {
            pids: Some(1000),
            timeout: Some(Duration::from_secs(60)),
            ..Default::default()
        };
        let ceilings = Ceilings::default().of_tenant(&own);
        assert_eq!((ceilings.0.pids, ceilings.0.timeout.as_secs()), (1000, 60));
        assert_eq!(ceilings.0.memory_bytes, Ceilings::default().0.memory_bytes);
    }

    #[test]
    fn limit_serializes_as_its_field() {
        for limit in Limit::ALL {
            assert_eq!(serde_json::to_value(limit).unwrap(), limit.field());
            assert_eq!(serde_json::from_value::<Limit>(limit.field().into()).unwrap(), limit);
        }
    }
}
