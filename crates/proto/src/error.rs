//! The error of a message that cannot be converted, and the checks that raise it.

/// A field of a received message is missing or has a value that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct InvalidField {
    /// The path of the field in the message, such as `limits.memory_bytes`.
    pub field: String,
    /// The rule that the field breaks.
    pub message: String,
}

impl InvalidField {
    pub(crate) fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

/// Converts an integer to a narrower or unsigned type.
pub(crate) fn integer<T, U>(field: &str, value: T) -> Result<U, InvalidField>
where
    T: Copy + std::fmt::Display,
    U: TryFrom<T>,
{
    U::try_from(value).map_err(|_| InvalidField::new(field, format!("{value} is out of range")))
}

/// Reads a value of a generated enum.
pub(crate) fn enum_value<E: TryFrom<i32>>(field: &str, value: i32) -> Result<E, InvalidField> {
    E::try_from(value).map_err(|_| InvalidField::new(field, format!("unknown value {value}")))
}
