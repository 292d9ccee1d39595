//! Why a tool or a profile is not valid.

use crate::{ParseError, PolicyError};

/// A tool or profile that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", if field.is_empty() { String::new() } else { format!("{field}: ") })]
pub struct DeclarationError {
    /// The path of the field in the declaration. Empty for the declaration itself.
    pub field: String,
    /// The rule that the field breaks.
    pub message: String,
}

/// Refuses a field.
pub(crate) fn fail<T>(
    field: impl Into<String>,
    message: impl Into<String>,
) -> Result<T, DeclarationError> {
    Err(DeclarationError { field: field.into(), message: message.into() })
}

impl From<ParseError> for DeclarationError {
    fn from(error: ParseError) -> Self {
        match error {
            ParseError::Field { field, message } => Self { field, message },
            ParseError::TooLarge(error) => {
                Self { field: String::new(), message: error.to_string() }
            }
        }
    }
}

impl From<PolicyError> for DeclarationError {
    fn from(PolicyError { field, message }: PolicyError) -> Self {
        let field = if field.is_empty() { "policy".to_owned() } else { format!("policy.{field}") };
        Self { field, message }
    }
}
