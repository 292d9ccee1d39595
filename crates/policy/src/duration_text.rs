//! Durations in documents: text with units, such as `10s`, `500ms` or `1m 30s`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de::Error};

#[expect(clippy::ref_option, reason = "serde passes the field")]
pub(crate) fn serialize<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(duration) => serializer.collect_str(&humantime::format_duration(*duration)),
        None => serializer.serialize_none(),
    }
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
    let duration = humantime::parse_duration(&text);
    duration
        .map(Some)
        .map_err(|error| D::Error::custom(format!("{text:?} is not a duration such as 10s: {error}")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::{Format, Policy};

    #[test]
    fn duration_is_written_with_its_unit() {
        for (text, expected) in [("10s", 10_000), ("500ms", 500), ("1m 30s", 90_000), ("2h", 7_200_000)] {
            let policy =
                Policy::parse(&format!("resources: {{max_wall_time: {text}}}"), Format::Yaml).unwrap();
            assert_eq!(policy.resources.max_wall_time, Some(Duration::from_millis(expected)));
            for format in [Format::Json, Format::Yaml, Format::Toml] {
                assert_eq!(Policy::parse(&policy.write(format).unwrap(), format), Ok(policy.clone()));
            }
        }
    }

    #[test]
    fn duration_without_unit_is_refused_by_field() {
        for text in ["10", "'10'", "-1s", "soon", "''"] {
            let error =
                Policy::parse(&format!("resources: {{max_cpu_time: {text}}}"), Format::Yaml).unwrap_err();
            assert!(error.to_string().starts_with("resources.max_cpu_time: "), "{error}");
        }
    }
}
