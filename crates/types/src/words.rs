//! Enums of words: one list declares the values, their words, and how they are read and written.

/// The text is not one of the allowed values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown value {value:?} (expected one of {allowed})")]
pub struct UnknownValue {
    /// The text that was given.
    pub value: String,
    /// The values that are allowed, separated by commas.
    pub allowed: &'static str,
}

/// Declares an enum whose values are words. A row is a value and its word, which documents, the
/// API, metrics and the database share: `as_str`, `Display`, `FromStr` and serde use no other.
#[macro_export]
macro_rules! words {
    (
        $(#[$meta:meta])+
        $vis:vis enum $name:ident {
            $(
                $(#[$value_meta:meta])+
                $value:ident = $word:literal,
            )+
        }
    ) => {
        $(#[$meta])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, ::serde::Serialize, ::serde::Deserialize)]
        $vis enum $name {
            $(
                $(#[$value_meta])+
                #[serde(rename = $word)]
                $value,
            )+
        }

        impl $name {
            /// Every value, in the order of the declaration.
            $vis const ALL: [Self; [$($word),+].len()] = [$(Self::$value),+];

            /// The word for the value.
            #[must_use]
            $vis const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$value => $word,)+
                }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl ::std::str::FromStr for $name {
            type Err = $crate::UnknownValue;

            fn from_str(text: &str) -> Result<Self, $crate::UnknownValue> {
                let found = Self::ALL.into_iter().find(|value| value.as_str() == text);
                found.ok_or_else(|| $crate::UnknownValue {
                    value: text.to_owned(),
                    allowed: concat!($($word, ", "),+).trim_end_matches(", "),
                })
            }
        }
    };
}

#[cfg(test)]
mod tests {
    crate::words! {
        /// A colour.
        enum Colour {
            /// A colour whose word has two parts.
            DarkRed = "dark_red",
            /// A colour whose word has one.
            Blue = "blue",
        }
    }

    #[test]
    fn word_is_same_everywhere() {
        for colour in Colour::ALL {
            let word = colour.as_str();
            assert_eq!(colour.to_string(), word);
            assert_eq!(word.parse(), Ok(colour));
            assert_eq!(serde_json::to_string(&colour).unwrap(), format!("{word:?}"));
            assert_eq!(serde_json::from_str::<Colour>(&format!("{word:?}")).unwrap(), colour);
        }
    }

    #[test]
    fn unknown_word_is_refused_with_known_ones() {
        let error = "green".parse::<Colour>().unwrap_err();
        assert_eq!(error.to_string(), "unknown value \"green\" (expected one of dark_red, blue)");
    }
}
