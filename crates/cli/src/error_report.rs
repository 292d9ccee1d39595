//! How a failure is told: `error: …` on stderr, with the reason and the field the server named.

use serde_json::json;
use tonic_types::StatusExt;

use crate::output::{self, Output};

/// A failure in the words of its cause.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    message: String,
    reason: Option<String>,
    field: Option<String>,
}

/// Tells a failure: on stderr, and with `--json` also as an object on stdout.
pub(crate) fn tell(error: &anyhow::Error, output: Output) {
    let told = told(error);
    eprintln!("error: {}", told.text());
    if output.is_json() {
        let json =
            json!({ "error": { "message": told.message, "reason": told.reason, "field": told.field } });
        // It was told on stderr already: a stdout that is gone changes nothing.
        let _ = output::line(&json.to_string());
    }
}

impl Told {
    fn text(&self) -> String {
        let field = self.field.as_ref().map(|field| format!("field {field}"));
        let details: Vec<String> = self.reason.iter().cloned().chain(field).collect();
        if details.is_empty() {
            self.message.clone()
        } else {
            format!("{} ({})", self.message, details.join(", "))
        }
    }
}

fn told(error: &anyhow::Error) -> Told {
    match error.downcast_ref::<tonic::Status>() {
        None => Told { message: format!("{error:#}"), reason: None, field: None },
        Some(status) => told_by_server(status),
    }
}

fn told_by_server(status: &tonic::Status) -> Told {
    let details = status.get_error_details();
    let info = details.error_info();
    let metadata = |name| info.and_then(|info| info.metadata.get(name)).cloned();
    let violation = details.bad_request().and_then(|bad| bad.field_violations.first());
    let message = if status.message().is_empty() { status.code().description() } else { status.message() };
    Told {
        message: message.to_owned(),
        reason: info.map(|info| info.reason.clone()),
        field: metadata("field").or_else(|| violation.map(|v| v.field.clone())).or_else(|| metadata("quota")),
    }
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn a_refusal_is_told_with_its_reason_and_field() {
        let metadata = [("field".to_owned(), "limits.pids".to_owned())];
        let details = ErrorDetails::with_error_info("LIMIT_TOO_HIGH", "codelia", metadata);
        let status =
            tonic::Status::with_error_details(tonic::Code::InvalidArgument, "is above the ceiling", details);
        assert_eq!(told(&status.into()).text(), "is above the ceiling (LIMIT_TOO_HIGH, field limits.pids)");
    }

    #[test]
    fn any_other_failure_is_told_with_its_causes() {
        let error = anyhow::anyhow!("no route").context("cannot reach the server");
        assert_eq!(told(&error).text(), "cannot reach the server: no route");
    }
}
