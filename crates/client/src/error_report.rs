//! Error messages: `error: …` on stderr, with the reason and field that the server named.

use anyhow::Result;
use serde_json::{Value, json};
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    args::SessionPath,
    client::KeyRejected,
    output::{self, Output},
};

/// Fields of requests that a flag sets.
const FLAGS: [(&str, &str); 11] = [
    ("mode", "--mode"),
    ("network", "--network"),
    ("limits.timeout", "--timeout"),
    ("limits.memory_bytes", "--memory"),
    ("limits.cpu_millicores", "--cpus"),
    ("limits.pids", "--pids"),
    ("limits.disk_bytes", "--disk"),
    ("limits.inodes", "--inodes"),
    ("ttl", "--ttl"),
    ("idle_ttl", "--idle-ttl"),
    ("alias", "--alias"),
];

/// Adds the name of a file, as the user wrote it, to an error of the server. The name replaces the
/// field in the server's message. Other errors stay as they are.
pub trait AboutFile<T> {
    fn about_file(self, file: &SessionPath) -> Result<T>;
}

impl<T, E: Into<anyhow::Error>> AboutFile<T> for Result<T, E> {
    fn about_file(self, file: &SessionPath) -> Result<T> {
        self.map_err(|error| {
            let error = error.into();
            if error.is::<tonic::Status>() { error.context(file.clone()) } else { error }
        })
    }
}

/// An error as it is printed.
#[derive(Debug, PartialEq, Eq)]
struct ErrorReport {
    message: String,
    reason: Option<String>,
    field: Option<String>,
}

/// Prints an error to stderr and, with `--json`, as an object to stdout.
pub fn print(error: &anyhow::Error, output: Output) {
    let report = ErrorReport::new(error);
    let text = report.text();
    // A message of the server is one line, whatever names are in it.
    if error.is::<tonic::Status>() {
        output::write_error(&text)
    } else {
        output::write_error_lines(&text)
    }
    if output.is_json() {
        // The error is on stderr already: ignore a closed stdout.
        let _ = output::write_line(&json!({ "error": report.json() }).to_string());
    }
}

/// Prints the error of one of several arguments to stderr, on one line that names the argument.
pub fn print_about(argument: &str, error: &anyhow::Error) {
    let text = ErrorReport::new(error).text();
    let about = if text.contains(argument) { String::new() } else { format!("{argument}: ") };
    output::write_error(&format!("{about}{text}"));
}

/// The error as in `--json`.
pub fn to_json(error: &anyhow::Error) -> Value {
    ErrorReport::new(error).json()
}

/// Joins an error and its causes with `: `. A cause that the previous text ends with already is
/// skipped: some libraries repeat the source in their message.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

impl ErrorReport {
    fn new(error: &anyhow::Error) -> Self {
        match error.downcast_ref::<tonic::Status>() {
            None => Self { message: chain(error), reason: None, field: None },
            Some(status) => {
                let mut report = Self::from_status(status, error.downcast_ref());
                if let Some(rejected) = error.downcast_ref::<KeyRejected>() {
                    report.message = rejected.to_string();
                }
                report
            }
        }
    }

    fn from_status(status: &tonic::Status, file: Option<&SessionPath>) -> Self {
        let details = status.get_error_details();
        let info = details.error_info();
        let metadata = |name| info.and_then(|info| info.metadata.get(name)).cloned();
        let violation = details.bad_request().and_then(|bad| bad.field_violations.first());
        let reason = info.map(|info| info.reason.clone());
        let field = metadata("field")
            .filter(|field| !field.is_empty())
            .or_else(|| violation.map(|v| v.field.clone()))
            .or_else(|| metadata("quota"));
        let message = if status.code() == Code::Unauthenticated {
            "API key rejected: check CODELIA_API_KEY or client.toml".to_owned()
        } else if status.message().is_empty() {
            status.code().description().to_owned()
        } else {
            name_argument(status.message(), field.as_deref(), file)
        };
        Self { message, reason, field }
    }

    fn json(&self) -> Value {
        json!({ "message": self.message, "reason": self.reason, "field": self.field })
    }

    fn text(&self) -> String {
        // `session "x" not found (NOT_FOUND)` would say it twice.
        let reason = self.reason.iter().filter(|reason| *reason != "NOT_FOUND").cloned();
        let field = self.field.as_ref().map(|field| format!("field {field}"));
        let details: Vec<String> = reason.chain(field).collect();
        if details.is_empty() {
            self.message.clone()
        } else {
            format!("{} ({})", self.message, details.join(", "))
        }
    }
}

/// Replaces the field at the start of a message by what the user typed: the flag or the file.
fn name_argument(message: &str, field: Option<&str>, file: Option<&SessionPath>) -> String {
    let Some(field) = field else { return message.to_owned() };
    let Some(problem) = message.strip_prefix(field).and_then(|rest| rest.strip_prefix(": ")) else {
        return message.to_owned();
    };
    let name = field.strip_prefix("start.").unwrap_or(field);
    let name = name.strip_prefix("new_session.").unwrap_or(name);
    let flag = FLAGS.into_iter().find(|(flag_field, _)| *flag_field == name).map(|(_, flag)| flag);
    match (flag, file) {
        (Some(flag), _) => format!("{flag}: {problem}"),
        (None, Some(file)) if field == "path" => format!("{file}: {problem}"),
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tonic_types::ErrorDetails;

    use super::*;

    fn status(code: Code, reason: &str, message: &str, field: Option<&str>) -> tonic::Status {
        let metadata = field.map(|field| ("field".to_owned(), field.to_owned()));
        let metadata: HashMap<_, _> = metadata.into_iter().collect();
        let details = ErrorDetails::with_error_info(reason, "codelia.dev", metadata);
        tonic::Status::with_error_details(code, message, details)
    }

    fn text(error: impl Into<anyhow::Error>) -> String {
        ErrorReport::new(&error.into()).text()
    }

    #[test]
    fn refusal_shows_reason_and_field() {
        let refused = status(Code::InvalidArgument, "INVALID_FIELD", "env: too long", Some("env"));
        assert_eq!(text(refused), "env: too long (INVALID_FIELD, field env)");
    }

    #[test]
    fn refused_limit_names_the_flag() {
        for field in [
            "limits.memory_bytes",
            "start.limits.memory_bytes",
            "start.new_session.limits.memory_bytes",
        ] {
            let message = format!("{field}: maximum is 2 GiB");
            let refused = status(Code::InvalidArgument, "INVALID_FIELD", &message, Some(field));
            assert_eq!(
                text(refused),
                format!("--memory: maximum is 2 GiB (INVALID_FIELD, field {field})")
            );
        }
    }

    #[test]
    fn missing_object_has_no_reason() {
        let missing = status(Code::NotFound, "NOT_FOUND", "session \"nosuch\" not found", None);
        assert_eq!(text(missing), "session \"nosuch\" not found");
    }

    #[test]
    fn file_error_names_the_file() {
        let missing = || {
            status(
                Code::NotFound,
                "FILE_NOT_FOUND",
                "path: no such file or directory",
                Some("path"),
            )
        };
        let file: SessionPath = "work:a".parse().unwrap();
        let about = Err::<(), _>(missing()).about_file(&file).unwrap_err();
        assert_eq!(text(about), "work:a: no such file or directory (FILE_NOT_FOUND, field path)");
        let local = Err::<(), _>(anyhow::anyhow!("cannot read /a")).about_file(&file).unwrap_err();
        assert_eq!(text(local), "cannot read /a");
    }

    #[test]
    fn rejected_key_says_where_to_look() {
        let rejected = status(Code::Unauthenticated, "KEY_INVALID", "no valid key", None);
        assert_eq!(
            text(rejected),
            "API key rejected: check CODELIA_API_KEY or client.toml (KEY_INVALID)"
        );
    }

    #[test]
    fn local_error_shows_its_causes() {
        let error = anyhow::anyhow!("no route").context("cannot reach the server");
        assert_eq!(text(error), "cannot reach the server: no route");
    }

    #[test]
    fn repeated_cause_is_printed_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot open the file: {source}")]
        struct Repeating {
            source: std::io::Error,
        }
        let source = std::io::Error::other("disk on fire");
        let error = anyhow::Error::from(Repeating { source }).context("cannot start");
        assert_eq!(text(error), "cannot start: cannot open the file: disk on fire");
    }
}
