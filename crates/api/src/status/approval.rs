//! [`ApprovalError`]: why an approval is not requested, decided or revoked.

use std::collections::HashMap;

use codelia_policy::DELEGABLE_FIELDS;
use codelia_store::{Approval, ApprovalScope, ApprovalState, NotDecided, Withdrawn};
use codelia_types::{ApprovalId, KeyId, Reason};
use tonic::Code;

use super::error::ApiError;

/// Why an approval is not requested, decided or revoked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ApprovalError {
    /// A run, a session or a tenant has as many as it may.
    TooMany { message: String },
    /// It is not pending any more.
    Decided { id: ApprovalId, state: ApprovalState, decided_by: Option<KeyId> },
    /// The deciding key requested it.
    OwnRequest,
    /// An operator withdrew the permission that it needs.
    NotPermitted { id: ApprovalId, withdrawn: Withdrawn },
    /// It does not hold for later runs.
    NotGranted { id: ApprovalId, state: ApprovalState, is_revoked: bool },
}

impl ApprovalError {
    /// The text for the caller.
    pub(super) fn text(&self) -> String {
        match self {
            Self::TooMany { message } => {
                format!("{message}; decide about some, or revoke what is not needed any more")
            }
            Self::Decided { id, state, decided_by: Some(key) } => {
                format!("approval {id} was {state} by key {key}")
            }
            Self::Decided { id, state, decided_by: None } => {
                format!("approval {id} has {state}: nobody decided in time, or its run ended")
            }
            Self::OwnRequest => {
                "this key requested the approval; decide with another key that has the scope `approve`".into()
            }
            Self::NotPermitted { id, withdrawn } => {
                let now = match withdrawn {
                    Withdrawn::Network(most) => format!("at most network {most}"),
                    Withdrawn::Isolation(least) => format!("no isolation below {least}"),
                };
                format!(
                    "approval {id} cannot be allowed: {now} is permitted now; deny it, or ask an operator"
                )
            }
            Self::NotGranted { id, state, is_revoked } => {
                let state = if *is_revoked { "revoked" } else { state.as_str() };
                format!("approval {id} is {state} and does not hold for later runs: nothing to revoke")
            }
        }
    }

    pub(super) fn code_and_reason(&self) -> (Code, Reason) {
        match self {
            Self::TooMany { .. } => (Code::ResourceExhausted, Reason::TooManyApprovals),
            Self::Decided { .. } => (Code::FailedPrecondition, Reason::ApprovalDecided),
            Self::OwnRequest => (Code::PermissionDenied, Reason::ApprovalOwnRequest),
            Self::NotPermitted { .. } => (Code::FailedPrecondition, Reason::ApprovalNotPermitted),
            Self::NotGranted { .. } => (Code::FailedPrecondition, Reason::ApprovalNotGranted),
        }
    }

    /// The state of the approval, and which key decided.
    pub(super) fn metadata(&self) -> HashMap<String, String> {
        let (state, decided_by) = match self {
            Self::TooMany { .. } | Self::OwnRequest | Self::NotPermitted { .. } => return HashMap::new(),
            Self::Decided { state, decided_by, .. } => (state, *decided_by),
            Self::NotGranted { state, .. } => (state, None),
        };
        let key = decided_by.map(|key| ("decided_by".to_owned(), key.to_string()));
        [("state".to_owned(), state.as_str().to_owned())].into_iter().chain(key).collect()
    }
}

impl ApiError {
    /// Why an approval was neither decided nor revoked.
    pub(crate) fn not_decided(id: ApprovalId, why: &NotDecided) -> Self {
        Self::Approval(match why {
            NotDecided::NotFound => return Self::not_found("approval", id),
            NotDecided::OwnRequest => ApprovalError::OwnRequest,
            NotDecided::NotPermitted(withdrawn) => ApprovalError::NotPermitted { id, withdrawn: *withdrawn },
            NotDecided::OnceOnly => {
                return Self::invalid(
                    "scope",
                    "the host's network is allowed for one run at a time; use once",
                );
            }
            NotDecided::NoPath => {
                return Self::invalid("reach", "this approval is about no file; leave it unset");
            }
            NotDecided::NoSubject(scope) => return Self::invalid("scope", no_subject(*scope)),
            NotDecided::NotDelegated { field, scope } => {
                return Self::invalid("scope", not_delegated(field, *scope));
            }
            NotDecided::Before(approval) => {
                let Approval { state, decided_by, .. } = **approval;
                ApprovalError::Decided { id, state, decided_by }
            }
            NotDecided::NotGranted(approval) => ApprovalError::NotGranted {
                id,
                state: approval.state,
                is_revoked: approval.revoked.is_some(),
            },
        })
    }
}

fn no_subject(scope: ApprovalScope) -> String {
    let missing = match scope {
        ApprovalScope::Project => "has no project",
        _ => "does not exist any more, or its user is not known",
    };
    format!("the session {missing}; allow it once, for the session or for the tenant")
}

fn not_delegated(field: &str, scope: ApprovalScope) -> String {
    if !DELEGABLE_FIELDS.contains(&field) {
        return format!("{field} cannot be delegated to a {scope}; allow it for the session or the tenant");
    }
    let above = match scope {
        ApprovalScope::User => "the organisation, and of the session's project if it has one,",
        _ => "the organisation",
    };
    format!(
        "the policy of {above} must delegate {field} to each {scope} first; else allow it for the session or \
         the tenant"
    )
}
