//! Ids. Each kind has its own type, so that one cannot be passed for another.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The text is not an id of this kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a valid {kind} id")]
pub struct InvalidId {
    /// The kind that was expected.
    pub kind: &'static str,
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A new id that sorts after earlier ones.
            #[must_use]
            pub fn generate() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Uuid::try_parse(text).map(Self).map_err(|_| InvalidId { kind: $kind })
            }
        }
    };
}

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                if is_label(text) { Ok(Self(text.to_owned())) } else { Err(InvalidId { kind: $kind }) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;

            fn try_from(text: String) -> Result<Self, InvalidId> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

uuid_id!(/// A session.
    SessionId, "session");
uuid_id!(/// One command in a session.
    RunId, "run");
uuid_id!(/// A request for a person's decision.
    ApprovalId, "approval");
uuid_id!(/// A volume of a tenant. A later volume of the same name has another id.
    VolumeId, "volume");
uuid_id!(/// An API key. Not its secret.
    KeyId, "key");
uuid_id!(/// One start of a worker process. A restarted worker keeps its id and gets a new incarnation.
    Incarnation, "incarnation");

name_id!(/// A tenant: `[a-z0-9-]{1,63}`.
    TenantId, "tenant");
name_id!(/// A mode flag: `[a-z0-9-]{1,63}`.
    FlagId, "flag");
name_id!(/// A tool of a tenant: `[a-z0-9-]{1,63}`.
    ToolId, "tool");
name_id!(/// The name of a volume of a tenant: `[a-z0-9-]{1,63}`.
    VolumeName, "volume");
name_id!(/// A worker. It keeps its id across restarts: `[a-z0-9-]{1,63}`.
    WorkerId, "worker");

/// The epoch of a session's lease. Each acquisition raises it; a worker with an older epoch cannot
/// commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseEpoch(pub i64);

impl fmt::Display for LeaseEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Whether a text can be the name of something: `[a-z0-9-]{1,63}`.
#[must_use]
pub fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_names_are_refused() {
        for bad in ["", "A", "a_b", "a/b", "a\0", &"a".repeat(64)] {
            assert!(bad.parse::<TenantId>().is_err(), "{bad:?}");
        }
        assert!("team-7".parse::<TenantId>().is_ok());
    }
}
