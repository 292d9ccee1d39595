//! Policies as text: JSON, YAML, TOML. Reading untrusted text is bounded and never panics.

use std::{fmt, path::Path, str::FromStr};

use serde::de::DeserializeOwned;

use crate::Policy;

/// The longest text that is read.
const MAX_TEXT: usize = 4 * 1024 * 1024;

/// How a policy is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// JSON.
    Json,
    /// YAML.
    Yaml,
    /// TOML.
    Toml,
}

/// A text that is no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Not the format it should be, or a field that no policy has.
    #[error("{}{message}", if field.is_empty() { String::new() } else { format!("{field}: ") })]
    Field {
        /// Where in the document; empty for the document itself.
        field: String,
        /// What is wrong there.
        message: String,
    },
    /// Too long to be read.
    #[error("is longer than {MAX_TEXT} bytes")]
    TooLong,
}

/// The name says no known format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is none of json, yaml, yml, toml")]
pub struct UnknownFormat(String);

/// A policy that cannot be written, such as a number that TOML does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot be written as {format}: {message}")]
pub struct WriteError {
    format: Format,
    message: String,
}

impl Format {
    /// The format that a file's extension names.
    ///
    /// # Errors
    /// If it names none.
    pub fn of(path: &Path) -> Result<Self, UnknownFormat> {
        path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().parse()
    }
}

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Self, UnknownFormat> {
        match text {
            "json" => Ok(Self::Json),
            "yaml" | "yml" => Ok(Self::Yaml),
            "toml" => Ok(Self::Toml),
            other => Err(UnknownFormat(other.to_owned())),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Json => "JSON",
            Self::Yaml => "YAML",
            Self::Toml => "TOML",
        })
    }
}

impl Policy {
    /// Reads a policy. It may still be one that cannot be meant: see [`Policy::validate`].
    ///
    /// # Errors
    /// Names the field that no policy has, or that has another type.
    pub fn parse(text: &str, format: Format) -> Result<Self, ParseError> {
        if text.len() > MAX_TEXT {
            return Err(ParseError::TooLong);
        }
        match format {
            Format::Json => read(&mut serde_json::Deserializer::from_str(text)),
            Format::Yaml if text.trim().is_empty() => Ok(Self::default()),
            Format::Yaml => read(serde_yaml_ng::Deserializer::from_str(text)),
            Format::Toml => read(toml::Deserializer::parse(text).map_err(|error| document(&error))?),
        }
    }

    /// Writes a policy.
    ///
    /// # Errors
    /// If the format has no word for one of its values.
    pub fn write(&self, format: Format) -> Result<String, WriteError> {
        let written = match format {
            Format::Json => serde_json::to_string_pretty(self).map_err(|error| error.to_string()),
            Format::Yaml => serde_yaml_ng::to_string(self).map_err(|error| error.to_string()),
            Format::Toml => toml::to_string(self).map_err(|error| error.to_string()),
        };
        written.map_err(|message| WriteError { format, message })
    }
}

fn read<'de, D>(deserializer: D) -> Result<Policy, ParseError>
where
    D: serde::Deserializer<'de>,
    D::Error: fmt::Display,
    Policy: DeserializeOwned,
{
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let field = error.path().to_string();
        // The path of the document itself is written as a dot.
        let field = if field == "." { String::new() } else { field };
        ParseError::Field { field, message: error.into_inner().to_string() }
    })
}

fn document(error: &impl fmt::Display) -> ParseError {
    ParseError::Field { field: String::new(), message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_field_is_refused_by_its_path() {
        for (text, format) in [
            (r#"{"filesystem": {"denied": []}}"#, Format::Json),
            ("filesystem:\n  denied: []\n", Format::Yaml),
            ("[filesystem]\ndenied = []\n", Format::Toml),
        ] {
            let error = Policy::parse(text, format).unwrap_err();
            assert!(error.to_string().starts_with("filesystem.denied"), "{error}");
            assert!(error.to_string().contains("unknown field"), "{error}");
        }
    }

    #[test]
    fn a_value_of_another_type_is_refused_by_its_path() {
        let error = Policy::parse("filesystem: {denied_paths: [/a, [1]]}", Format::Yaml).unwrap_err();
        assert!(error.to_string().starts_with("filesystem.denied_paths[1]"), "{error}");
        let error = Policy::parse("isolation_level: LEVEL_3", Format::Yaml).unwrap_err();
        assert!(error.to_string().starts_with("isolation_level"), "{error}");
    }

    #[test]
    fn an_empty_document_says_nothing() {
        for format in [Format::Yaml, Format::Toml] {
            assert_eq!(Policy::parse("", format), Ok(Policy::default()));
        }
        assert_eq!(Policy::parse("{}", Format::Json), Ok(Policy::default()));
    }

    #[test]
    fn the_extension_names_the_format() {
        assert_eq!(Format::of(Path::new("a/p.yml")), Ok(Format::Yaml));
        assert!(Format::of(Path::new("a/policy")).is_err());
    }
}
