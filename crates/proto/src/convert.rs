//! Conversions between the wire and the words of `codelia-policy`.

use std::time::Duration;

use codelia_policy::Limits;
use codelia_types::{CountedViolation, Mode, NetworkMode, Outcome, Receipt, TerminalSize, Usage};

use crate::v1;

/// A duration on the wire that is negative or out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidDuration;

/// Reads a duration; a negative one is an error.
///
/// # Errors
/// If it is negative or not normalised.
pub fn duration_from_proto(wire: &prost_types::Duration) -> Result<Duration, InvalidDuration> {
    let seconds = u64::try_from(wire.seconds).map_err(|_| InvalidDuration)?;
    let nanos = u32::try_from(wire.nanos).map_err(|_| InvalidDuration)?;
    if nanos >= 1_000_000_000 {
        return Err(InvalidDuration);
    }
    Ok(Duration::new(seconds, nanos))
}

/// Writes a duration.
#[must_use]
pub fn duration_to_proto(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: duration.subsec_nanos().cast_signed(),
    }
}

/// Writes a point in time given as nanoseconds since the epoch.
#[must_use]
pub fn timestamp_to_proto(unix_nanos: i128) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: i64::try_from(unix_nanos.div_euclid(1_000_000_000)).unwrap_or(i64::MAX),
        nanos: i32::try_from(unix_nanos.rem_euclid(1_000_000_000)).unwrap_or(0),
    }
}

impl v1::SandboxMode {
    /// The mode; `None` if it is unset.
    #[must_use]
    pub fn to_mode(self) -> Option<Mode> {
        match self {
            Self::Unspecified => None,
            Self::Logical => Some(Mode::Logical),
            Self::Bwrap => Some(Mode::Bwrap),
            Self::Nsjail => Some(Mode::Nsjail),
            Self::Container => Some(Mode::Container),
        }
    }
}

impl From<Mode> for v1::SandboxMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Logical => Self::Logical,
            Mode::Bwrap => Self::Bwrap,
            Mode::Nsjail => Self::Nsjail,
            Mode::Container => Self::Container,
        }
    }
}

impl v1::NetworkMode {
    /// The mode; `None` if it is unset.
    #[must_use]
    pub fn to_mode(self) -> Option<NetworkMode> {
        match self {
            Self::Unspecified => None,
            Self::None => Some(NetworkMode::None),
            Self::Proxy => Some(NetworkMode::Proxy),
            Self::Host => Some(NetworkMode::Host),
        }
    }
}

impl From<NetworkMode> for v1::NetworkMode {
    fn from(mode: NetworkMode) -> Self {
        match mode {
            NetworkMode::None => Self::None,
            NetworkMode::Proxy => Self::Proxy,
            NetworkMode::Host => Self::Host,
        }
    }
}

impl From<&Limits> for v1::Limits {
    fn from(limits: &Limits) -> Self {
        Self {
            timeout: Some(duration_to_proto(limits.timeout)),
            memory_bytes: Some(limits.memory_bytes.cast_signed()),
            cpu_millis: Some(limits.cpu_millis.cast_signed()),
            pids: Some(limits.pids.cast_signed()),
            open_files: Some(limits.open_files.cast_signed()),
            output_bytes: Some(limits.output_bytes.cast_signed()),
            cpu_time: Some(duration_to_proto(limits.cpu_time)),
            file_bytes: Some(limits.file_bytes.cast_signed()),
            tmp_bytes: Some(limits.tmp_bytes.cast_signed()),
        }
    }
}

impl From<TerminalSize> for v1::Terminal {
    fn from(size: TerminalSize) -> Self {
        Self { columns: size.columns.into(), rows: size.rows.into() }
    }
}

impl From<&Outcome> for v1::Outcome {
    fn from(outcome: &Outcome) -> Self {
        use v1::outcome::Kind;
        let kind = match outcome {
            Outcome::Exited(code) => Kind::Exited(*code),
            Outcome::Signaled(signal) => Kind::Signaled(*signal),
            Outcome::TimedOut => Kind::TimedOut(v1::TimedOut {}),
            Outcome::Canceled => Kind::Canceled(v1::Canceled {}),
            Outcome::Oom => Kind::Oom(v1::OutOfMemory {}),
            Outcome::Limit(resource) => Kind::Limit(resource.clone()),
            Outcome::Violation(rule) => Kind::Violation(rule.clone()),
            Outcome::Refused(refusal) => Kind::Refused(v1::Refused {
                reason: refusal.reason.to_string(),
                message: refusal.message.clone(),
            }),
            Outcome::Lost => Kind::Lost(v1::Lost {}),
        };
        Self { kind: Some(kind) }
    }
}

impl From<&Usage> for v1::Usage {
    fn from(usage: &Usage) -> Self {
        Self {
            cpu_time: Some(duration_to_proto(usage.cpu_time)),
            peak_memory_bytes: usage.peak_memory_bytes.cast_signed(),
            wall_time: Some(duration_to_proto(usage.wall_time)),
            read_bytes: usage.read_bytes.cast_signed(),
            written_bytes: usage.written_bytes.cast_signed(),
            peak_processes: usage.peak_processes.cast_signed(),
        }
    }
}

impl From<&CountedViolation> for v1::ViolationEvent {
    fn from(repeated: &CountedViolation) -> Self {
        let violation = &repeated.violation;
        Self {
            kind: violation.kind.clone(),
            syscall: violation.syscall.clone(),
            number: violation.nr,
            args: violation.args.to_vec(),
            count: repeated.count.cast_signed(),
        }
    }
}

impl From<&Receipt> for v1::Receipt {
    fn from(receipt: &Receipt) -> Self {
        Self {
            processes: receipt.processes.cast_signed(),
            mounts: receipt.mounts.cast_signed(),
            cgroups: receipt.cgroups.cast_signed(),
            sockets: receipt.sockets.cast_signed(),
            directories: receipt.directories.cast_signed(),
        }
    }
}
