//! From columns to words: how rows become types.

use std::{str::FromStr, time::Duration};

use sqlx::postgres::types::PgInterval;

use crate::Error;

/// Reads a word; one that is unknown is an error that names the column.
pub(crate) fn parse<T: FromStr>(column: &'static str, text: &str) -> Result<T, Error> {
    text.parse().map_err(|_| Error::UnknownValue { column })
}

/// Reads a list of words.
pub(crate) fn parse_all<T: FromStr>(column: &'static str, texts: &[String]) -> Result<Vec<T>, Error> {
    texts.iter().map(|text| parse(column, text)).collect()
}

/// An interval as it is stored by [`interval`]: never months or days.
pub(crate) fn duration(interval: &PgInterval) -> Duration {
    Duration::from_micros(u64::try_from(interval.microseconds).unwrap_or(0))
}

/// A column of microseconds.
pub(crate) fn micros(column: i64) -> Duration {
    Duration::from_micros(column.unsigned_abs())
}

/// A duration, cut to microseconds and to what the database can count from now on.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    const TEN_YEARS: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
    let microseconds = i64::try_from(duration.min(TEN_YEARS).as_micros()).unwrap_or(i64::MAX);
    PgInterval { months: 0, days: 0, microseconds }
}
