//! Conversions between columns and Rust types.

use std::{str::FromStr, time::Duration};

use sqlx::postgres::types::PgInterval;

use crate::Error;

/// Parses a text column. An unknown value is an error that names the column.
pub(crate) fn parse<T: FromStr>(column: &'static str, text: &str) -> Result<T, Error> {
    text.parse().map_err(|_| Error::UnknownValue { column, value: text.to_owned() })
}

/// Parses a text column that may be null.
pub(crate) fn parse_optional<T: FromStr>(
    column: &'static str,
    text: Option<&str>,
) -> Result<Option<T>, Error> {
    text.map(|text| parse(column, text)).transpose()
}

/// Parses a column that is an array of texts.
pub(crate) fn parse_all<T: FromStr>(
    column: &'static str,
    texts: &[String],
) -> Result<Vec<T>, Error> {
    texts.iter().map(|text| parse(column, text)).collect()
}

/// Converts an interval that [`interval`] made. It has no months or days.
pub(crate) fn duration(interval: &PgInterval) -> Duration {
    Duration::from_micros(u64::try_from(interval.microseconds).unwrap_or(0))
}

/// Converts a column of microseconds.
pub(crate) fn micros(column: i64) -> Duration {
    Duration::from_micros(column.unsigned_abs())
}

/// Converts a size or number, capped to what a column holds.
pub(crate) fn bigint(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Converts a duration, truncated to microseconds and capped so that `now() + interval` is a valid
/// timestamp.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    const TEN_YEARS: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
    let microseconds = i64::try_from(duration.min(TEN_YEARS).as_micros()).unwrap_or(i64::MAX);
    PgInterval { months: 0, days: 0, microseconds }
}
