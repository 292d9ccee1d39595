//! Messages as JSON, in the mapping that protobuf defines, by the descriptors of the API.

use std::{collections::HashMap, sync::Arc};

use codelia_proto::json::descriptors;
use codelia_telemetry::TenantPool;
use prost::Message as _;
use prost_reflect::{
    DescriptorError, DescriptorPool, DeserializeOptions, DynamicMessage, MessageDescriptor,
};

use crate::error::ApiError;

/// An error quotes what it found, which may be as long as the request.
const MAX_ERROR_CHARS: usize = 300;

/// The messages and methods that can be used with JSON.
#[derive(Debug)]
pub(crate) struct Schema {
    pool: DescriptorPool,
    methods: HashMap<String, Arc<Method>>,
    conversions: Arc<TenantPool>,
}

/// A method and its messages.
#[derive(Debug)]
pub(crate) struct Method {
    request: MessageDescriptor,
    response: MessageDescriptor,
    pub(crate) is_client_streaming: bool,
    pub(crate) is_server_streaming: bool,
}

impl Schema {
    /// Reads the descriptors that were compiled into this binary.
    pub(crate) fn load() -> Result<Self, DescriptorError> {
        let mut pool = descriptors()?;
        for set in [tonic_health::pb::FILE_DESCRIPTOR_SET, tonic_types::pb::FILE_DESCRIPTOR_SET] {
            pool.decode_file_descriptor_set(set)?;
        }
        let methods = pool.services().flat_map(|service| {
            let methods: Vec<_> = service.methods().collect();
            methods.into_iter().map(move |method| {
                let path = format!("/{}/{}", service.full_name(), method.name());
                (
                    path,
                    Arc::new(Method {
                        request: method.input(),
                        response: method.output(),
                        is_client_streaming: method.is_client_streaming(),
                        is_server_streaming: method.is_server_streaming(),
                    }),
                )
            })
        });
        // The number of calls of a key is limited, so all may wait.
        let conversions = TenantPool::new(usize::MAX);
        Ok(Self { methods: methods.collect(), pool, conversions })
    }

    /// The method with a path such as `/codelia.v1.RunService/StartRun`.
    pub(crate) fn method(&self, path: &str) -> Option<&Arc<Method>> {
        self.methods.get(path)
    }

    /// Where large messages are converted.
    pub(crate) fn conversions(&self) -> &Arc<TenantPool> {
        &self.conversions
    }

    /// A message of any known type as JSON.
    pub(crate) fn any_to_json(&self, name: &str, bytes: &[u8]) -> Option<serde_json::Value> {
        let message = DynamicMessage::decode(self.pool.get_message_by_name(name)?, bytes).ok()?;
        serde_json::to_value(message).ok()
    }
}

impl Method {
    /// Encodes a request. Refuses fields that the message does not have.
    pub(crate) fn request_from_json(&self, json: &[u8]) -> Result<Vec<u8>, ApiError> {
        let mut parser = serde_json::Deserializer::from_slice(json);
        let mut track = serde_path_to_error::Track::new();
        let tracked = serde_path_to_error::Deserializer::new(&mut parser, &mut track);
        let options = DeserializeOptions::new().deny_unknown_fields(true);
        let message =
            DynamicMessage::deserialize_with_options(self.request.clone(), tracked, &options);
        let message = message.map_err(|error| {
            let path = track.path().to_string();
            // A part that the parser could not read is a question mark.
            match path.trim_end_matches("?").trim_end_matches(".") {
                "" => invalid("request", &error),
                path => invalid(path, &error),
            }
        })?;
        parser.end().map_err(|error| invalid("request", &error))?;
        Ok(message.encode_to_vec())
    }

    /// Decodes a response of this server.
    pub(crate) fn response_to_json(&self, message: &[u8]) -> Result<Vec<u8>, ApiError> {
        to_json(&self.response, message)
    }

    /// Decodes a request that [`Method::request_from_json`] encoded.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn request_to_json(&self, message: &[u8]) -> Result<Vec<u8>, ApiError> {
        to_json(&self.request, message)
    }
}

fn to_json(descriptor: &MessageDescriptor, message: &[u8]) -> Result<Vec<u8>, ApiError> {
    let message =
        DynamicMessage::decode(descriptor.clone(), message).map_err(ApiError::internal)?;
    serde_json::to_vec(&message).map_err(ApiError::internal)
}

fn invalid(field: &str, error: &serde_json::Error) -> ApiError {
    let cut = |text: &str| text.chars().take(MAX_ERROR_CHARS).collect::<String>();
    ApiError::invalid(cut(field), cut(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use codelia_proto::v1::{StartRunRequest, StartRunResponse};

    use super::*;

    fn start_run() -> Arc<Method> {
        Schema::load().unwrap().method("/codelia.v1.RunService/StartRun").unwrap().clone()
    }

    fn refused(json: &str) -> (String, String) {
        let error = start_run().request_from_json(json.as_bytes()).unwrap_err();
        let field = error.invalid_field().unwrap().to_owned();
        let message = error.text().strip_prefix(&format!("{field}: ")).unwrap().to_owned();
        (field, message)
    }

    #[test]
    fn request_is_read_with_either_case() {
        for json in [
            r#"{"parent": "sessions/a", "command": {"argv": ["true"], "workingDirectory": "x"}}"#,
            r#"{"parent": "sessions/a", "command": {"argv": ["true"], "working_directory": "x"}}"#,
        ] {
            let bytes = start_run().request_from_json(json.as_bytes()).unwrap();
            let request = StartRunRequest::decode(bytes.as_slice()).unwrap();
            assert_eq!(request.command.unwrap().working_directory, "x");
        }
    }

    #[test]
    fn unknown_field_is_refused_by_name() {
        let (field, message) = refused(r#"{"command": {"agrv": []}}"#);
        assert_eq!(field, "command");
        assert!(message.contains("agrv"), "{message}");
    }

    #[test]
    fn wrong_type_is_refused_with_its_path() {
        let (field, message) = refused(r#"{"command": {"argv": ["a", 7]}}"#);
        assert_eq!(field, "command.argv[1]", "{message}");
    }

    #[test]
    fn long_and_deep_requests_get_short_errors() {
        let long = refused(&format!(r#"{{"{}": 1}}"#, "x".repeat(100_000)));
        assert!(long.1.len() <= 4 * MAX_ERROR_CHARS, "{}", long.1.len());
        let deep = refused(&format!(r#"{{"command": {}"#, "[".repeat(100_000)));
        assert!(deep.1.len() <= 4 * MAX_ERROR_CHARS, "{deep:?}");
        refused("{} {}");
        refused("");
    }

    #[test]
    fn response_follows_the_mapping_of_protobuf() {
        let response = StartRunResponse {
            run: Some(codelia_proto::v1::Run {
                run_id: "x".into(),
                output_bytes: 7,
                ..Default::default()
            }),
        };
        let json = start_run().response_to_json(&response.encode_to_vec()).unwrap();
        assert_eq!(String::from_utf8(json).unwrap(), r#"{"run":{"runId":"x","outputBytes":"7"}}"#);
    }

    #[test]
    fn no_response_of_a_stream_looks_like_an_error() {
        let schema = Schema::load().unwrap();
        let streams: Vec<_> =
            schema.methods.values().filter(|method| method.is_server_streaming).collect();
        assert!(streams.len() >= 3, "{streams:?}");
        assert!(
            streams.iter().all(|method| method.response.get_field_by_json_name("error").is_none())
        );
    }
}
