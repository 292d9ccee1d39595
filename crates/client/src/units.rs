//! Sizes, durations and times as text.

use std::time::Duration;

use codelia_proto::duration_from_proto;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Formats a size in the largest unit that fits, such as `10 MiB` or `1.5 GiB`.
pub fn bytes(count: u64) -> String {
    let Some((unit, size)) = UNITS.into_iter().find(|(_, size)| count >= *size) else {
        return format!("{count} B");
    };
    let tenths = u128::from(count) * 10 / u128::from(size);
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole} {unit}"),
        (whole, tenth) => format!("{whole}.{tenth} {unit}"),
    }
}

/// Formats a duration the way `--timeout` takes it, such as `2m` or `1m 30s`.
pub fn duration(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

/// Formats seconds before now (or, if negative, after it) in the largest unit, such as `5m ago`.
fn relative(seconds: i64) -> String {
    let amount = match seconds.unsigned_abs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3600 => format!("{}m", seconds / 60),
        seconds @ 3600..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    };
    if seconds < 0 { format!("in {amount}") } else { format!("{amount} ago") }
}

/// Formats a time as the distance from now, such as `5m ago` or `in 2h`, for tables.
pub fn age(time: Option<&prost_types::Timestamp>) -> String {
    time.map_or_else(String::new, |time| {
        relative(OffsetDateTime::now_utc().unix_timestamp().saturating_sub(time.seconds))
    })
}

/// Formats a time as RFC 3339, with all fractions of the second that the server sent.
pub fn timestamp(time: Option<&prost_types::Timestamp>) -> Option<String> {
    let time = time?;
    let nanos = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos);
    OffsetDateTime::from_unix_timestamp_nanos(nanos).ok()?.format(&Rfc3339).ok()
}

/// Converts a duration to milliseconds, for people.
pub fn millis(duration: Option<&prost_types::Duration>) -> Option<f64> {
    duration
        .and_then(|wire| duration_from_proto(wire).ok())
        .map(|duration| duration.as_secs_f64() * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_use_the_largest_unit() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (50 << 20, "50 MiB"),
            (10 << 20, "10 MiB"),
            (3 << 29, "1.5 GiB"),
            ((1 << 20) + 1, "1 MiB"),
            (2 << 30, "2 GiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn relative_times_use_the_largest_unit() {
        for (seconds, text) in [
            (0, "0s ago"),
            (59, "59s ago"),
            (60, "1m ago"),
            (7_199, "1h ago"),
            (172_800, "2d ago"),
            (-1, "in 1s"),
            (-3_600, "in 1h"),
        ] {
            assert_eq!(relative(seconds), text);
        }
    }

    #[test]
    fn durations_read_like_flag_values() {
        assert_eq!(duration(Duration::from_secs(120)), "2m");
        assert_eq!(duration(Duration::from_millis(1500)), "1s 500ms");
    }
}
