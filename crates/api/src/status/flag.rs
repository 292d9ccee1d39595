//! [`FlagError`]: why a mode flag is not set or rolled back.

use std::collections::HashMap;

use codelia_store::MAX_FLAGS;
use codelia_types::{FlagId, Mode, Reason};
use tonic::Code;

/// Why a mode flag is not set or rolled back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FlagError {
    /// No live worker can serve the mode of the rule.
    ModeUnavailable { mode: Mode },
    /// The installation has as many flags as it may.
    TooMany,
    /// The flag is off, so there is no rule to roll back.
    IsOff { id: FlagId },
}

impl FlagError {
    /// The text for the caller.
    pub(super) fn text(&self) -> String {
        match self {
            Self::ModeUnavailable { mode } => format!(
                "rule.mode: no live worker can serve {mode}; start one (`codelia doctor` says what the mode \
                 needs), or set `force`"
            ),
            Self::TooMany => {
                format!("the installation has {MAX_FLAGS} flags; use one again that is off")
            }
            Self::IsOff { id } => {
                format!("flag {id} is off: nothing to roll back; name a revision to restore it")
            }
        }
    }

    pub(super) fn code_and_reason(&self) -> (Code, Reason) {
        match self {
            Self::ModeUnavailable { .. } => (Code::FailedPrecondition, Reason::ModeUnavailable),
            Self::TooMany => (Code::ResourceExhausted, Reason::TooManyFlags),
            Self::IsOff { .. } => (Code::FailedPrecondition, Reason::FlagOff),
        }
    }

    /// The field at fault.
    pub(super) fn metadata(&self) -> HashMap<String, String> {
        match self {
            Self::ModeUnavailable { mode } => HashMap::from([
                ("field".to_owned(), "rule.mode".to_owned()),
                ("mode".to_owned(), mode.to_string()),
            ]),
            Self::TooMany | Self::IsOff { .. } => HashMap::new(),
        }
    }
}
