//! Durations and timestamps.

use std::time::Duration;

use time::OffsetDateTime;

use crate::error::InvalidField;

/// The largest protobuf duration, 10,000 years.
const MAX_SECONDS: u64 = 315_576_000_000;

/// A received duration is negative or malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must not be negative or malformed")]
pub struct InvalidDuration;

/// Converts a received duration.
///
/// # Errors
/// If the duration is negative or its nanoseconds are out of range.
pub fn duration_from_proto(wire: &prost_types::Duration) -> Result<Duration, InvalidDuration> {
    let seconds = u64::try_from(wire.seconds).map_err(|_| InvalidDuration)?;
    let nanos = u32::try_from(wire.nanos).map_err(|_| InvalidDuration)?;
    if nanos >= 1_000_000_000 {
        return Err(InvalidDuration);
    }
    Ok(Duration::new(seconds, nanos))
}

/// Converts a duration to send it. A duration that protobuf cannot represent becomes the largest
/// number of seconds, which internal messages refuse.
#[must_use]
pub fn duration_to_proto(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: duration.subsec_nanos().cast_signed(),
    }
}

/// Converts a duration of an internal message, within the range that protobuf allows.
pub(crate) fn read_duration(
    field: &str,
    wire: &prost_types::Duration,
) -> Result<Duration, InvalidField> {
    match duration_from_proto(wire) {
        Ok(duration) if duration.as_secs() > MAX_SECONDS => {
            Err(InvalidField::new(field, "is too long"))
        }
        Ok(duration) => Ok(duration),
        Err(error) => Err(InvalidField::new(field, error.to_string())),
    }
}

/// Converts a point in time to send it.
#[must_use]
pub fn timestamp_to_proto(at: OffsetDateTime) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: at.unix_timestamp(), nanos: at.nanosecond().cast_signed() }
}
