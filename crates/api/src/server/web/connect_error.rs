//! Errors as the Connect protocol writes them: a word, a message, and the details of gRPC.

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use http::StatusCode;
use prost::Message;
use serde_json::{Value, json};
use tonic::{Code, Status};

use super::schema::Schema;
use crate::server::grpc_code::code_name;

/// The error of a status.
pub(crate) fn to_json(schema: &Schema, status: &Status) -> Value {
    let mut error = json!({ "code": word(status.code()), "message": status.message() });
    let details = tonic_types::Status::decode(status.details()).map(|status| status.details);
    let details: Vec<_> =
        details.unwrap_or_default().iter().map(|any| detail(schema, any)).collect();
    if !details.is_empty() {
        error["details"] = details.into();
    }
    error
}

/// A detail. `debug` shows the content to people.
fn detail(schema: &Schema, any: &prost_types::Any) -> Value {
    let name = any.type_url.rsplit('/').next().unwrap_or_default();
    let mut detail = json!({ "type": name, "value": STANDARD_NO_PAD.encode(&any.value) });
    if let Some(content) = schema.any_to_json(name, &any.value) {
        detail["debug"] = content;
    }
    detail
}

/// The word of a code: its name in small letters, but for one.
fn word(code: Code) -> String {
    match code {
        Code::Cancelled => "canceled".to_owned(),
        other => code_name(other).to_ascii_lowercase(),
    }
}

/// The HTTP status that Connect gives a code.
pub(crate) fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        // 499, "client closed request", has no name.
        Code::Cancelled => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            StatusCode::BAD_REQUEST
        }
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::Unknown | Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ApiError;

    #[test]
    fn error_has_word_message_and_readable_details() {
        let status = Status::from(ApiError::invalid("command.argv", "must not be empty"));
        let error = to_json(&Schema::load().unwrap(), &status);
        assert_eq!(error["code"], "invalid_argument");
        assert_eq!(error["message"], "command.argv: must not be empty");
        let details = error["details"].as_array().unwrap();
        let info = details.iter().find(|detail| detail["type"] == "google.rpc.ErrorInfo").unwrap();
        assert_eq!(info["debug"]["reason"], "INVALID_FIELD");
        let value = STANDARD_NO_PAD.decode(info["value"].as_str().unwrap()).unwrap();
        assert_eq!(
            tonic_types::pb::ErrorInfo::decode(value.as_slice()).unwrap().reason,
            "INVALID_FIELD"
        );
    }
}
