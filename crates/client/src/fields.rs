//! A message of the API as text: a row for each field that is set, with the names of its JSON.

use prost_reflect::{DynamicMessage, Kind, MapKey, ReflectMessage, Value};
use serde_json::Value as Json;

use crate::words;

/// Returns rows of a name and a value. A field of a message in the message is `outer.inner`.
pub(crate) fn rows(message: &DynamicMessage) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for (field, value) in message.fields() {
        let name = field.json_name();
        match value {
            Value::Message(inner) if !has_own_json(inner) => {
                rows.extend(self::rows(inner).into_iter().map(|mut row| {
                    row[0] = format!("{name}.{}", row[0]);
                    row
                }));
            }
            value => rows.push(vec![name.to_owned(), text(&field.kind(), value)]),
        }
    }
    rows
}

/// Whether a message is one text in JSON, such as a time or a duration.
fn has_own_json(message: &DynamicMessage) -> bool {
    message.descriptor().package_name() == "google.protobuf"
}

fn text(kind: &Kind, value: &Value) -> String {
    match value {
        Value::Bool(value) => value.to_string(),
        Value::I32(value) => value.to_string(),
        Value::I64(value) => value.to_string(),
        Value::U32(value) => value.to_string(),
        Value::U64(value) => value.to_string(),
        Value::F32(value) => value.to_string(),
        Value::F64(value) => value.to_string(),
        Value::String(value) => value.clone(),
        Value::Bytes(value) => String::from_utf8_lossy(value).into_owned(),
        Value::EnumNumber(number) => word(kind, *number),
        Value::Message(message) => match serde_json::to_value(message) {
            Ok(Json::String(text)) => text,
            Ok(json) => json.to_string(),
            Err(error) => format!("({error})"),
        },
        Value::List(items) => {
            items.iter().map(|item| text(kind, item)).collect::<Vec<_>>().join(" ")
        }
        Value::Map(entries) => {
            let kind = kind.as_message().map(|entry| entry.map_entry_value_field().kind());
            let mut entries: Vec<_> =
                entries.iter().map(|(key, value)| entry(key, kind.as_ref(), value)).collect();
            entries.sort();
            entries.join(" ")
        }
    }
}

fn entry(key: &MapKey, kind: Option<&Kind>, value: &Value) -> String {
    let value = kind.map_or_else(String::new, |kind| text(kind, value));
    format!("{}={value}", key.as_str().unwrap_or_default())
}

/// The word of an enum's value, or the number of one that is newer than this program.
fn word(kind: &Kind, number: i32) -> String {
    let found =
        kind.as_enum().and_then(|values| Some((values.get_value(number)?, values.default_value())));
    found.map_or_else(
        || number.to_string(),
        |(value, first)| words::of_name(value.name(), first.name()),
    )
}

#[cfg(test)]
mod tests {
    use codelia_proto::{json::to_dynamic, v1};

    use super::*;

    #[test]
    fn every_kind_of_field_has_a_row() {
        let session = v1::Session {
            session_id: "x".into(),
            state: v1::SessionState::Open.into(),
            idle_ttl: Some(prost_types::Duration { seconds: 300, nanos: 0 }),
            labels: [("b", "2"), ("a", "1")]
                .map(|(name, value)| (name.into(), value.into()))
                .into(),
            limits: Some(v1::Limits { pids: Some(3), ..Default::default() }),
            mode: 77,
            ..Default::default()
        };
        let expected = [
            ["sessionId", "x"],
            ["state", "open"],
            ["mode", "77"],
            ["idleTtl", "300s"],
            ["labels", "a=1 b=2"],
            ["limits.pids", "3"],
        ];
        assert_eq!(rows(&to_dynamic(&session).unwrap()), expected);
        let key = v1::Key {
            scopes: vec![v1::Scope::Run.into(), v1::Scope::Files.into()],
            ..Default::default()
        };
        assert_eq!(rows(&to_dynamic(&key).unwrap()), [["scopes", "run files"]]);
    }
}
