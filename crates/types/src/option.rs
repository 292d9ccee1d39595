//! Options that are sections of the configuration, and how their fields are read and written.

use std::fmt::Display;

use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// Declares the options of a component, which are a section of the configuration: a struct that
/// serde reads. A field is a key: its comment, which is also its documentation, its type and its
/// default. After `Default:`, the comment says what applies without a value.
#[macro_export]
macro_rules! options {
    (
        $(#[$meta:meta])+
        $vis:vis struct $name:ident {
            $(
                $(#[doc = $comment:literal])+
                $(#[serde($($serde:tt)+)])?
                $field_vis:vis $field:ident: $type:ty = $default:expr,
            )+
        }
    ) => {
        $(#[$meta])+
        #[derive(Debug, Clone, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        $vis struct $name {
            $(
                $(#[doc = $comment])+
                $(#[serde($($serde)+)])?
                $field_vis $field: $type,
            )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl $name {
            /// The keys of the section.
            $vis const KEYS: &[$crate::option::Key] = &[$(
                $crate::option::Key {
                    name: stringify!($field),
                    kind: stringify!($type),
                    comment: concat!($($comment),+),
                },
            )+];
        }
    };
}

/// A key of a section.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// The name of its field.
    pub name: &'static str,
    /// The type of its field.
    pub kind: &'static str,
    /// The comment of its field.
    pub comment: &'static str,
}

impl Key {
    /// The meaning of the key.
    #[must_use]
    pub fn meaning(&self) -> &'static str {
        self.parts().0
    }

    /// The effect of having no value; empty if its default says it.
    #[must_use]
    pub fn unset(&self) -> &'static str {
        self.parts().1
    }

    fn parts(&self) -> (&'static str, &'static str) {
        let (meaning, unset) = self.comment.split_once("Default: ").unwrap_or((self.comment, ""));
        (meaning.trim().trim_end_matches('.'), unset.trim_end_matches('.'))
    }
}

/// A value of the configuration that does not fit the others.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {message}")]
pub struct InvalidOption {
    /// The path of its key, such as `retention.runs`.
    pub key: String,
    /// The rule that its value breaks.
    pub message: String,
}

impl InvalidOption {
    /// The key, and what its value must be.
    pub fn new(key: impl Into<String>, message: impl Display) -> Self {
        Self { key: key.into(), message: message.to_string() }
    }
}

/// The text that is written instead of a secret.
const MASK: &str = "********";

/// Writes a secret without its value.
///
/// # Errors
/// If the serializer fails.
pub fn masked<T, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(_) => serializer.serialize_some(MASK),
        None => serializer.serialize_none(),
    }
}

/// Reads a value that is not zero.
///
/// # Errors
/// If it is zero, or not a value of the type.
pub fn positive<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default + PartialEq,
{
    let value = T::deserialize(deserializer)?;
    if value == T::default() { Err(D::Error::custom("must be more than 0")) } else { Ok(value) }
}

/// A value that is written as text.
pub mod text {
    use std::{fmt::Display, str::FromStr};

    use super::{Deserialize, Deserializer, Error, Serializer};

    /// Writes the text.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<T: Display, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    /// Reads the text.
    ///
    /// # Errors
    /// If it is not such a value.
    pub fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A value that is written as text and may be missing.
pub mod optional_text {
    use std::{fmt::Display, str::FromStr};

    use super::{Deserialize, Deserializer, Error, Serializer};

    /// Writes the text.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }

    /// Reads the text.
    ///
    /// # Errors
    /// If it is not such a value.
    pub fn deserialize<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

/// Values with commas between them.
pub mod comma_list {
    use std::{fmt::Display, str::FromStr};

    use super::{Deserialize, Deserializer, Error, Serializer};

    /// Writes the list.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<T: Display, S: Serializer>(
        values: &[T],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let texts: Vec<String> = values.iter().map(ToString::to_string).collect();
        serializer.serialize_str(&texts.join(","))
    }

    /// Reads the list; the empty text is an empty one.
    ///
    /// # Errors
    /// With the first value that is not one.
    pub fn deserialize<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        let text = String::deserialize(deserializer)?;
        parts(&text).map(|part| part.parse().map_err(D::Error::custom)).collect()
    }

    /// The values that are not empty.
    pub(super) fn parts(text: &str) -> impl Iterator<Item = &str> {
        text.split(',').map(str::trim).filter(|part| !part.is_empty())
    }
}

/// Values by name, as `NAME=VALUE` with commas between them.
pub mod comma_map {
    use std::{collections::BTreeMap, fmt::Display, str::FromStr};

    use super::{Deserialize, Deserializer, Error, Serializer, comma_list::parts};

    /// Writes the pairs.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<K: Display, V: Display, S: Serializer>(
        pairs: &BTreeMap<K, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let pairs: Vec<String> =
            pairs.iter().map(|(name, value)| format!("{name}={value}")).collect();
        serializer.serialize_str(&pairs.join(","))
    }

    /// Reads the pairs. Errors name no value, which may have a password.
    ///
    /// # Errors
    /// With the first part that is not a pair, or names another one's name.
    pub fn deserialize<'de, D, K, V>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
    where
        D: Deserializer<'de>,
        K: FromStr<Err: Display> + Ord,
        V: FromStr<Err: Display>,
    {
        let text = String::deserialize(deserializer)?;
        let mut pairs = BTreeMap::new();
        for part in parts(&text) {
            let pair =
                part.split_once('=').filter(|(name, value)| !name.is_empty() && !value.is_empty());
            let Some((name, value)) = pair else {
                return Err(D::Error::custom("expected NAME=VALUE with commas between them"));
            };
            let refused = |error: &dyn Display| D::Error::custom(format!("{name}: {error}"));
            let key = name.parse().map_err(|error| refused(&error))?;
            let value = value.parse().map_err(|error| refused(&error))?;
            if pairs.insert(key, value).is_some() {
                return Err(refused(&"has two values"));
            }
        }
        Ok(pairs)
    }
}
