//! Why a policy is not valid.

use crate::TooLarge;

/// A policy that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct PolicyError {
    /// The path of the field in the document, such as `filesystem.denied_paths[2]`. Empty for the
    /// whole document.
    pub field: String,
    /// What is wrong with the field.
    pub message: String,
}

impl From<TooLarge> for PolicyError {
    fn from(error: TooLarge) -> Self {
        Self { message: error.to_string(), field: error.field }
    }
}

/// Refuses a field.
pub(crate) fn fail<T>(
    field: impl Into<String>,
    message: impl Into<String>,
) -> Result<T, PolicyError> {
    Err(PolicyError { field: field.into(), message: message.into() })
}
