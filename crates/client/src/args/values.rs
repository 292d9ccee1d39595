//! Parsers for argument values.

use std::time::Duration;

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// Parses a duration such as `500ms`, `2s` or `10m`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{error} (use a duration such as 500ms, 2s, 10m)"))
}

/// Parses a time: a duration before now such as `2h`, or a date and time such as
/// `2030-01-31T12:00:00Z`.
pub(super) fn past_time(text: &str) -> Result<OffsetDateTime, String> {
    if let Ok(time) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok(time);
    }
    let ago =
        humantime::parse_duration(text).ok().and_then(|ago| time::Duration::try_from(ago).ok());
    ago.and_then(|ago| OffsetDateTime::now_utc().checked_sub(ago)).ok_or_else(|| {
        "not a time (use one such as 2h for two hours ago, or 2030-01-31T12:00:00Z)".into()
    })
}

/// Parses `K=V`. The value may contain `=`.
pub(super) fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected K=V")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Parses a number of bytes with an optional unit, such as `1g`, `512m` or `64KiB`. Units are
/// powers of 1024.
pub(super) fn bytes(text: &str) -> Result<i64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let count: i64 = digits.parse().map_err(|_| "not a size (use one such as 512m or 1g)")?;
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        unit => return Err(format!("unknown unit {unit:?} (use b, k, m or g)")),
    };
    count.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

/// Parses the name or number of a signal, such as `TERM`, `SIGTERM` or `15`.
pub(super) fn signal(text: &str) -> Result<i32, String> {
    // The numbers of Linux, where the command runs.
    const NUMBERS: [(&str, i32); 14] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ABRT", 6),
        ("KILL", 9),
        ("USR1", 10),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("CONT", 18),
        ("STOP", 19),
        ("TSTP", 20),
        ("WINCH", 28),
    ];
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let found = NUMBERS.iter().find(|(known, _)| *known == name);
    found.map(|(_, signal)| *signal).ok_or_else(|| {
        let names: Vec<&str> = NUMBERS.iter().map(|(name, _)| *name).collect();
        format!("unknown signal (use a number or one of {})", names.join(", "))
    })
}

/// Parses a number of MiB and returns bytes.
pub(super) fn mebibytes(text: &str) -> Result<i64, String> {
    let count: i64 = text.parse().map_err(|_| "not an integer")?;
    count.checked_mul(1024 * 1024).ok_or_else(|| "too large".to_owned())
}

/// Parses a number of cores and returns thousandths of a core.
pub(super) fn cpu_millicores(text: &str) -> Result<i64, String> {
    let cores: f64 = text.parse().map_err(|_| "not a number")?;
    if cores.abs() > 1e6 || cores.is_nan() {
        return Err("not a number of cores".to_owned());
    }
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    Ok((cores * 1000.0).round() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates_or_durations_ago() {
        let date = past_time("2030-01-31T12:00:00Z").unwrap();
        assert_eq!(date.unix_timestamp(), 1_896_091_200);
        assert!(past_time("2h").unwrap() < OffsetDateTime::now_utc());
        for bad in ["", "2", "yesterday", "2030-01-31", "99999999999999y"] {
            assert!(past_time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("10m"), Ok(Duration::from_secs(600)));
        assert!(duration("soon").is_err());
        assert!(duration("-2s").is_err());
    }

    #[test]
    fn sizes_have_optional_units() {
        for (text, size) in
            [("1g", 1 << 30), ("512M", 512 << 20), ("64KiB", 64 << 10), ("7", 7), ("-1", -1)]
        {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        for wrong in ["", "g", "1.5g", "1t", "9999999999g"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, number) in [("TERM", 15), ("SIGHUP", 1), ("usr1", 10), ("9", 9)] {
            assert_eq!(signal(text), Ok(number), "{text}");
        }
        assert!(signal("TREM").unwrap_err().contains("TERM"));
    }
}
