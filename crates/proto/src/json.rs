//! Messages of the public API as JSON, in the mapping that protobuf defines: names in
//! lowerCamelCase, 64-bit integers as text, durations such as `"2s"`, and no fields without a
//! value. It is what the API speaks over HTTP and what the command line prints with `--json`.

use std::sync::OnceLock;

use prost::Name;
use prost_reflect::{DescriptorError, DescriptorPool, DynamicMessage};
use serde_json::Value;

use crate::PUBLIC_DESCRIPTORS;

/// The descriptors of the public files, once they were read.
static PUBLIC: OnceLock<DescriptorPool> = OnceLock::new();

/// A message that cannot be written as JSON.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    #[error("the compiled descriptors are invalid")]
    Descriptors(#[from] DescriptorError),
    #[error("{0} is not a message of the public API")]
    NotPublic(String),
    #[error("the message does not fit its descriptor")]
    Message(#[from] prost::DecodeError),
    /// Such as a time after the year 9999.
    #[error("the message has a value that JSON cannot express")]
    Value(#[from] serde_json::Error),
}

/// Returns the descriptors that were compiled into this binary.
///
/// # Errors
/// They do not fit together.
pub fn descriptors() -> Result<DescriptorPool, DescriptorError> {
    if let Some(pool) = PUBLIC.get() {
        return Ok(pool.clone());
    }
    let pool = DescriptorPool::decode(PUBLIC_DESCRIPTORS)?;
    Ok(PUBLIC.get_or_init(|| pool).clone())
}

/// Returns a message with the names of its fields.
///
/// # Errors
/// The message is not of the public API.
pub fn to_dynamic<M: Name>(message: &M) -> Result<DynamicMessage, JsonError> {
    let name = M::full_name();
    let descriptor = descriptors()?.get_message_by_name(&name).ok_or(JsonError::NotPublic(name))?;
    Ok(DynamicMessage::decode(descriptor, message.encode_to_vec().as_slice())?)
}

/// Writes a message as the API does.
///
/// # Errors
/// The message is not of the public API, or has a value that JSON cannot express.
pub fn to_json<M: Name>(message: &M) -> Result<Value, JsonError> {
    Ok(serde_json::to_value(to_dynamic(message)?)?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{internal, v1};

    #[test]
    fn numbers_times_and_choices_are_exact() {
        let run = v1::Run {
            run_id: "x".into(),
            state: v1::RunState::Ended.into(),
            outcome: Some(v1::Outcome { kind: Some(v1::outcome::Kind::Exited(0)) }),
            setup_time: Some(prost_types::Duration { seconds: 1, nanos: 1 }),
            create_time: Some(prost_types::Timestamp { seconds: 1, nanos: 250_000_001 }),
            output_bytes: i64::MAX,
            violations: vec![v1::ViolationEvent { args: vec![u64::MAX], ..Default::default() }],
            ..Default::default()
        };
        let expected = json!({
            "runId": "x",
            "state": "RUN_STATE_ENDED",
            "outcome": { "exited": 0 },
            "setupTime": "1.000000001s",
            "createTime": "1970-01-01T00:00:01.250000001Z",
            "outputBytes": i64::MAX.to_string(),
            "violations": [{ "args": [u64::MAX.to_string()] }],
        });
        assert_eq!(to_json(&run).unwrap(), expected);
    }

    #[test]
    fn internal_message_is_refused() {
        let error = to_json(&internal::v1::OfferSessionRequest::default()).unwrap_err();
        assert!(matches!(error, JsonError::NotPublic(_)), "{error}");
    }
}
