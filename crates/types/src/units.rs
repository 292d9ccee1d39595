//! Sizes and durations as text with a unit, such as `64 MiB` and `10m`: the one style of
//! configuration and policies.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

const UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// A number of bytes, written with its unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(u64);

impl ByteSize {
    /// A number of bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// A number of KiB.
    #[must_use]
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// A number of MiB.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// The number of bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ByteSize {
    /// Writes the largest unit that divides the size without a remainder.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let divides = |size: u64| self.0 > 0 && self.0.is_multiple_of(size);
        match UNITS.into_iter().find(|(_, size)| divides(*size)) {
            Some((unit, size)) => write!(f, "{} {unit}", self.0 / size),
            None => f.write_str("0"),
        }
    }
}

/// A text that is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size with a unit, such as 64 MiB")]
pub struct InvalidSize(String);

impl FromStr for ByteSize {
    type Err = InvalidSize;

    fn from_str(text: &str) -> Result<Self, InvalidSize> {
        let invalid = || InvalidSize(text.to_owned());
        if text.trim() == "0" {
            return Ok(Self(0));
        }
        let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = &text[number.len()..];
        let count: u64 = number.trim().parse().map_err(|_| invalid())?;
        let found = UNITS.into_iter().find(|(known, _)| known.eq_ignore_ascii_case(unit));
        let (_, size) = found.ok_or_else(invalid)?;
        count.checked_mul(size).map(Self).ok_or_else(invalid)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A number of cores, at least a thousandth of one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Cores(f64);

impl Cores {
    /// One core.
    pub const ONE: Self = Self(1.0);

    /// Thousandths of a core.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked when it was created"
    )]
    pub fn millicores(self) -> u64 {
        (self.0 * 1000.0).round() as u64
    }
}

/// A number that is not one of cores.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{0} is not a number of cores")]
pub struct InvalidCores(f64);

impl TryFrom<f64> for Cores {
    type Error = InvalidCores;

    fn try_from(cores: f64) -> Result<Self, InvalidCores> {
        if cores.is_finite() && cores >= 0.001 { Ok(Self(cores)) } else { Err(InvalidCores(cores)) }
    }
}

impl From<Cores> for f64 {
    fn from(Cores(cores): Cores) -> Self {
        cores
    }
}

fn parse_duration<E: Error>(text: &str) -> Result<Duration, E> {
    humantime::parse_duration(text)
        .map_err(|error| E::custom(format!("{text:?} is not a duration such as 10s: {error}")))
}

/// A duration of more than zero, for `#[serde(with)]`.
pub mod duration {
    use super::{Deserialize, Deserializer, Duration, Error, Serializer, parse_duration};

    const UNITS: [(u128, &str); 7] = [
        (86_400_000_000_000, "d"),
        (3_600_000_000_000, "h"),
        (60_000_000_000, "m"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1000, "us"),
        (1, "ns"),
    ];

    /// The text in the largest unit that divides it without a remainder, such as `90s`.
    #[must_use]
    pub fn text(duration: Duration) -> String {
        let nanos = duration.as_nanos();
        let unit = UNITS.into_iter().find(|(size, _)| nanos > 0 && nanos.is_multiple_of(*size));
        // Parsers count fractions of a second in 64 bits of nanoseconds.
        let is_long = u64::try_from(nanos).is_err();
        match unit {
            None => "0s".to_owned(),
            Some((size, _)) if is_long && size < 1_000_000_000 => {
                format!("{}s {}ns", duration.as_secs(), duration.subsec_nanos())
            }
            Some((size, unit)) => format!("{}{unit}", nanos / size),
        }
    }

    /// Writes it with its unit.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&text(*value))
    }

    /// Reads a text with units.
    ///
    /// # Errors
    /// If the text is not a duration, or zero.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let duration = parse_duration(&String::deserialize(from)?)?;
        if duration.is_zero() { Err(D::Error::custom("must be more than 0")) } else { Ok(duration) }
    }
}

/// A duration that may be missing, for `#[serde(with)]`.
pub mod optional_duration {
    use super::{Deserialize, Deserializer, Duration, Serializer, parse_duration};

    /// Writes it with its units.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<S: Serializer>(
        value: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(duration) => super::duration::serialize(duration, serializer),
            None => serializer.serialize_none(),
        }
    }

    /// Reads a text with units.
    ///
    /// # Errors
    /// If the text is not a duration.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        Option::<String>::deserialize(from)?.map(|text| parse_duration(&text)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("64 MiB", 64 << 20),
            ("64MiB", 64 << 20),
            ("1 gib", 1 << 30),
            ("3 KiB", 3 << 10),
            ("7 B", 7),
            ("2 TiB", 2 << 40),
            ("0", 0),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for wrong in ["", "64", "MiB", "-1 MiB", "1.5 GiB", "64 MB", "99999999999 GiB"] {
            assert!(wrong.parse::<ByteSize>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn size_is_written_in_the_largest_whole_unit() {
        for (bytes, text) in
            [(0, "0"), (1500, "1500 B"), (64 << 20, "64 MiB"), (10 << 30, "10 GiB")]
        {
            assert_eq!(ByteSize(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(ByteSize(bytes)));
        }
    }

    #[test]
    fn duration_is_written_in_the_largest_whole_unit() {
        for (micros, text) in [
            (0, "0s"),
            (7, "7us"),
            (500_000, "500ms"),
            (1_000_000, "1s"),
            (90_000_000, "90s"),
            (120_000_000, "2m"),
            (86_400_000_000, "1d"),
        ] {
            assert_eq!(duration::text(Duration::from_micros(micros)), text);
        }
        for long in [
            Duration::MAX,
            Duration::new(101_306_711_822, 331_640_688),
            Duration::new(39_811_018_748, 117_944_000),
            Duration::from_secs(315_576_000_000),
        ] {
            assert_eq!(parse_duration::<serde_json::Error>(&duration::text(long)).unwrap(), long);
        }
    }

    #[test]
    fn durations_have_units() {
        #[derive(Deserialize, Serialize)]
        struct Times {
            #[serde(with = "duration")]
            first: Duration,
            #[serde(with = "optional_duration", default)]
            second: Option<Duration>,
        }
        let times = |first: &str| serde_json::from_str::<Times>(&format!("{{\"first\": {first}}}"));
        for (text, millis) in
            [("500ms", 500), ("10s", 10_000), ("90s", 90_000), ("7d", 604_800_000)]
        {
            let read = times(&format!("{text:?}")).unwrap();
            assert_eq!(read.first, Duration::from_millis(millis));
            let written = serde_json::to_value(&read).unwrap();
            assert_eq!(written, serde_json::json!({ "first": text, "second": null }));
        }
        for wrong in ["10", "\"10\"", "\"-1s\"", "\"soon\"", "\"0s\"", "\"\""] {
            assert!(times(wrong).is_err(), "{wrong}");
        }
    }
}
