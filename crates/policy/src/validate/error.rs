//! Why a policy is not valid.

use std::{fmt, ops::RangeInclusive};

use crate::TooLarge;

/// A policy that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct PolicyError {
    /// The path of the field in the document, such as `filesystem.denied_paths[2]`. Empty for the
    /// whole document.
    pub field: String,
    /// The rule that the field breaks.
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

/// Refuses the entry of a list with this index, if there is one.
pub(crate) fn fail_at(
    field: &str,
    at: Option<usize>,
    message: impl Into<String>,
) -> Result<(), PolicyError> {
    at.map_or(Ok(()), |at| fail(format!("{field}[{at}]"), message))
}

/// Refuses a value that is set and outside a range.
pub(crate) fn check_range<T: PartialOrd + fmt::Display>(
    field: &str,
    value: Option<T>,
    range: &RangeInclusive<T>,
) -> Result<(), PolicyError> {
    if value.is_some_and(|value| !range.contains(&value)) {
        return fail(field, format!("must be from {} to {}", range.start(), range.end()));
    }
    Ok(())
}
