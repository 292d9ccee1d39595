//! Errors of other crates as [`ApiError`]s.

use std::error::Error;

use codelia_policy::{LimitError, PlanError, PolicyError};
use codelia_store::ObjectProblem;
use codelia_telemetry::TenantBusy;

use super::{approval::ApprovalError, error::ApiError, file::FileError};

impl From<codelia_store::Error> for ApiError {
    fn from(error: codelia_store::Error) -> Self {
        use codelia_store::Error as E;
        let detail = with_sources(&error);
        match error {
            // A row that is missing was deleted concurrently; a retry sees the new state.
            E::Unavailable(_) | E::PoolExhausted | E::LockTimeout(_) | E::RowMissing { .. } => {
                Self::Unavailable { detail }
            }
            E::StatementTimeout(_) => Self::QueryTimeout,
            E::TooManyApprovals { .. } => {
                Self::Approval(ApprovalError::TooMany { message: error.to_string() })
            }
            E::Object { name, problem } => match problem {
                ObjectProblem::Missing | ObjectProblem::Shortened { .. } => {
                    Self::OutputDataLost { object: name, problem: problem.to_string() }
                }
                ObjectProblem::Timeout | ObjectProblem::Failed(_) => Self::Unavailable { detail },
                ObjectProblem::NotConfigured => Self::Internal { detail },
            },
            E::InvalidUrl
            | E::TooFewConnections { .. }
            | E::MigrateThroughPooler
            | E::Statement(_)
            | E::UnknownValue { .. }
            | E::Migrate(_)
            | E::NotMigrated
            | E::AlreadyExists { .. }
            | E::OutputStore { .. }
            | E::Fenced => Self::Internal { detail },
        }
    }
}

/// The error and its causes in one line.
fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

impl From<LimitError> for ApiError {
    fn from(error: LimitError) -> Self {
        Self::invalid(error.field(), error.to_string())
    }
}

impl From<PolicyError> for ApiError {
    fn from(error: PolicyError) -> Self {
        let field =
            if error.field.is_empty() { "policy".to_owned() } else { format!("policy.{}", error.field) };
        Self::invalid(field, error.message)
    }
}

impl From<TenantBusy> for ApiError {
    fn from(busy: TenantBusy) -> Self {
        Self::TooManyPolicyChecks { max_waiting: busy.max_waiting }
    }
}

impl From<PlanError> for ApiError {
    fn from(error: PlanError) -> Self {
        let remedy = error.remedy.unwrap_or("choose another mode");
        Self::invalid(error.field, format!("cannot be enforced in mode {}; {remedy}", error.mode))
    }
}

impl From<FileError> for ApiError {
    fn from(error: FileError) -> Self {
        if error.is_invalid_field() {
            return Self::invalid(error.field.clone(), error.message());
        }
        Self::File(error)
    }
}
