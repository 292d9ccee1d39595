//! Why an approval was neither decided nor revoked, as the caller reads it.

use codelia_policy::Field;
use codelia_store::{ApprovalScope, NotDecided, Withdrawn};
use codelia_types::{ApprovalId, Reason};

use crate::error::ApiError;

pub(super) fn error(id: ApprovalId, why: &NotDecided) -> ApiError {
    match why {
        NotDecided::NotFound => ApiError::not_found("approval", id),
        NotDecided::OwnRequest => ApiError::new(
            Reason::ApprovalOwnRequest,
            "this key requested the approval; decide with another key that has the scope `approve`",
        ),
        NotDecided::NotPermitted(withdrawn) => {
            let now = match withdrawn {
                Withdrawn::Network(most) => format!("at most network {most}"),
                Withdrawn::Isolation(least) => format!("no isolation below {least}"),
            };
            let message = format!(
                "approval {id} cannot be allowed: {now} is permitted now; deny it, or ask an operator"
            );
            ApiError::new(Reason::ApprovalNotPermitted, message)
        }
        NotDecided::OnceOnly => ApiError::invalid(
            "scope",
            "the host's network is allowed for one run at a time; use once",
        ),
        NotDecided::NoPath => {
            ApiError::invalid("reach", "this approval is about no file; leave it unset")
        }
        NotDecided::NoSubject(scope) => ApiError::invalid("scope", no_subject(*scope)),
        NotDecided::NotDelegated { field, scope } => {
            ApiError::invalid("scope", not_delegated(field, *scope))
        }
        NotDecided::Before(approval) => {
            let state = approval.state;
            let message = match approval.decided_by {
                Some(key) => format!("approval {id} was {state} by key {key}"),
                None => {
                    format!("approval {id} has {state}: nobody decided in time, or its run ended")
                }
            };
            let error =
                ApiError::new(Reason::ApprovalDecided, message).with("state", state.as_str());
            match approval.decided_by {
                Some(key) => error.with("decided_by", key),
                None => error,
            }
        }
        NotDecided::NotGranted(approval) => {
            let state = approval.state.as_str();
            let shown = if approval.revoked.is_some() { "revoked" } else { state };
            let message = format!(
                "approval {id} is {shown} and does not hold for later runs: nothing to revoke"
            );
            ApiError::new(Reason::ApprovalNotGranted, message).with("state", state)
        }
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
    if Field::find_delegable(field).is_none() {
        return format!(
            "{field} cannot be delegated to a {scope}; allow it for the session or the tenant"
        );
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
