//! Approvals as JSON.

use codelia_proto::v1;
use serde_json::{Value, json};

use super::{non_empty, timestamp};

/// An approval.
pub(crate) fn approval(approval: &v1::Approval) -> Value {
    json!({
        "approval_id": approval.approval_id,
        "session_id": approval.session_id,
        "run_id": non_empty(&approval.run_id),
        "kind": approval_kind(approval),
        "host": non_empty(&approval.host),
        "port": Some(approval.port).filter(|port| *port != 0),
        "path": non_empty(&approval.path),
        "pid": Some(approval.pid).filter(|pid| *pid != 0),
        "exe": non_empty(&approval.exe),
        "cwd": non_empty(&approval.cwd),
        "reach": approval_reach(approval),
        "message": approval.message,
        "state": approval_state(approval),
        "scope": approval_scope(approval),
        "subject": non_empty(&approval.subject),
        "requested_by": approval.requested_by,
        "decided_by": non_empty(&approval.decided_by),
        "reason": non_empty(&approval.reason),
        "create_time": timestamp(approval.create_time.as_ref()),
        "expire_time": timestamp(approval.expire_time.as_ref()),
        "decide_time": timestamp(approval.decide_time.as_ref()),
        "revoke_time": timestamp(approval.revoke_time.as_ref()),
        "revoked_by": non_empty(&approval.revoked_by),
        "revoke_reason": non_empty(&approval.revoke_reason),
    })
}

/// Name of what an approval is about.
pub(crate) fn approval_kind(approval: &v1::Approval) -> &'static str {
    match approval.kind() {
        v1::ApprovalKind::Unspecified => "unknown",
        v1::ApprovalKind::NetworkProxy => "network_proxy",
        v1::ApprovalKind::NetworkHost => "network_host",
        v1::ApprovalKind::EgressHost => "egress_host",
        v1::ApprovalKind::Isolation => "isolation",
        v1::ApprovalKind::FileRead => "file_read",
    }
}

/// Name of an approval's state.
pub(crate) fn approval_state(approval: &v1::Approval) -> &'static str {
    match approval.state() {
        v1::ApprovalState::Unspecified => "unknown",
        v1::ApprovalState::Pending => "pending",
        v1::ApprovalState::Allowed => "allowed",
        v1::ApprovalState::Denied => "denied",
        v1::ApprovalState::Expired => "expired",
    }
}

/// Name of the files that an approval is decided for; `None` unless it is about one and decided.
fn approval_reach(approval: &v1::Approval) -> Option<&'static str> {
    match approval.reach() {
        v1::ApprovalReach::Unspecified => None,
        v1::ApprovalReach::File => Some("file"),
        v1::ApprovalReach::Directory => Some("directory"),
    }
}

/// Name of what an approval holds for; `None` unless it is allowed.
pub(crate) fn approval_scope(approval: &v1::Approval) -> Option<&'static str> {
    match approval.scope() {
        v1::ApprovalScope::Unspecified => None,
        v1::ApprovalScope::Once => Some("once"),
        v1::ApprovalScope::Session => Some("session"),
        v1::ApprovalScope::User => Some("user"),
        v1::ApprovalScope::Project => Some("project"),
        v1::ApprovalScope::Tenant => Some("tenant"),
    }
}
