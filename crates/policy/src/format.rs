//! Policies as text in JSON, YAML or TOML. Parsing untrusted text is bounded and never panics.

use std::{fmt, path::Path, str::FromStr};

use serde::de::DeserializeOwned;

use crate::{Policy, TooLarge, size::check_bytes};

/// The format of a policy document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// JSON.
    Json,
    /// YAML.
    Yaml,
    /// TOML.
    Toml,
}

/// A text that is not a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The text is malformed, or a field is unknown or has a wrong type.
    #[error("{}{message}", if field.is_empty() { String::new() } else { format!("{field}: ") })]
    Field {
        /// The path of the field in the document. Empty for the document itself.
        field: String,
        /// The error of the parser.
        message: String,
    },
    /// The text is too long.
    #[error("policy {0}")]
    TooLarge(#[from] TooLarge),
}

/// The name is not that of a known format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy format {0:?} (expected json, yaml, yml or toml)")]
pub struct UnknownFormat(String);

/// A policy that the format cannot represent, such as a number above the range of TOML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot write policy as {format}: {message}")]
pub struct WriteError {
    format: Format,
    message: String,
}

impl Format {
    /// The format of a file, by its extension.
    ///
    /// # Errors
    /// If the extension is not that of a known format.
    pub fn from_path(path: &Path) -> Result<Self, UnknownFormat> {
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
    /// Parses a policy. It may still be invalid: see [`Policy::validate`].
    ///
    /// # Errors
    /// Names the field that is unknown or has a wrong type.
    pub fn parse(text: &str, format: Format) -> Result<Self, ParseError> {
        if format == Format::Yaml && text.trim().is_empty() {
            return Ok(Self::default());
        }
        parse(text, format)
    }

    /// Writes a policy as text.
    ///
    /// # Errors
    /// If the format cannot represent one of the values.
    pub fn write(&self, format: Format) -> Result<String, WriteError> {
        let written = match format {
            Format::Json => serde_json::to_string_pretty(self).map_err(|error| error.to_string()),
            Format::Yaml => serde_yaml_ng::to_string(self).map_err(|error| error.to_string()),
            Format::Toml => toml::to_string(self).map_err(|error| error.to_string()),
        };
        written.map_err(|message| WriteError { format, message })
    }
}

/// Parses a document of bounded length.
pub(crate) fn parse<T: DeserializeOwned>(text: &str, format: Format) -> Result<T, ParseError> {
    check_bytes(text.len())?;
    match format {
        Format::Json => read(&mut serde_json::Deserializer::from_str(text)),
        Format::Yaml => read(serde_yaml_ng::Deserializer::from_str(text)),
        Format::Toml => read(toml::Deserializer::parse(text).map_err(|error| document(&error))?),
    }
}

fn read<'de, D, T>(deserializer: D) -> Result<T, ParseError>
where
    D: serde::Deserializer<'de>,
    D::Error: fmt::Display,
    T: DeserializeOwned,
{
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let field = error.path().to_string();
        // `serde_path_to_error` writes the path of the document itself as a dot.
        let field = if field == "." { String::new() } else { field };
        ParseError::Field { field, message: error.into_inner().to_string() }
    })
}

fn document(error: &impl fmt::Display) -> ParseError {
    ParseError::Field { field: String::new(), message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn unknown_field_is_refused_by_path() {
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
    fn wrong_type_is_refused_by_path() {
        let error =
            Policy::parse("filesystem: {denied_paths: [/a, [1]]}", Format::Yaml).unwrap_err();
        assert!(error.to_string().starts_with("filesystem.denied_paths[1]"), "{error}");
        let error = Policy::parse("isolation_level: LEVEL_3", Format::Yaml).unwrap_err();
        assert!(error.to_string().starts_with("isolation_level"), "{error}");
    }

    #[test]
    fn empty_document_is_default_policy() {
        for format in [Format::Yaml, Format::Toml] {
            assert_eq!(Policy::parse("", format), Ok(Policy::default()));
        }
        assert_eq!(Policy::parse("{}", Format::Json), Ok(Policy::default()));
    }

    #[test]
    fn duration_is_written_with_its_unit() {
        for (text, micros, written) in [
            ("10s", 10_000_000, "10s"),
            ("500ms", 500_000, "500ms"),
            ("1m 30s", 90_000_000, "90s"),
            ("2h", 7_200_000_000, "2h"),
            ("1500us", 1500, "1500us"),
        ] {
            let policy = format!("resources: {{max_wall_time: {text}}}");
            let policy = Policy::parse(&policy, Format::Yaml).unwrap();
            assert_eq!(policy.resources.max_wall_time, Some(Duration::from_micros(micros)));
            for format in [Format::Json, Format::Yaml, Format::Toml] {
                let document = policy.write(format).unwrap();
                assert!(document.contains(written), "{document}");
                assert_eq!(Policy::parse(&document, format), Ok(policy.clone()));
            }
        }
    }

    #[test]
    fn duration_without_unit_is_refused_by_field() {
        for text in ["10", "'10'", "-1s", "soon", "''"] {
            let error =
                Policy::parse(&format!("resources: {{max_cpu_time: {text}}}"), Format::Yaml)
                    .unwrap_err();
            assert!(error.to_string().starts_with("resources.max_cpu_time: "), "{error}");
        }
    }

    #[test]
    fn file_extension_selects_format() {
        assert_eq!(Format::from_path(Path::new("a/p.yml")), Ok(Format::Yaml));
        assert!(Format::from_path(Path::new("a/policy")).is_err());
    }
}
