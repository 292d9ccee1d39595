//! The messages of the supervisor protocol, one JSON object for each line.
//!
//! ```text
//! event.fs_request { id, pid, exe, cwd, op, path, flags }   something waits for a decision
//! cmd.approve      { id, scope: "file"|"dir", persist }     allow it
//! cmd.deny         { id }                                   deny it
//! event.audit      { id, decision, scope, ts }              it was decided, by whomever
//! cmd.policy.save  { scope: "user"|"project"|"org" }        what a persistent decision holds for
//! event.error      { id, message }                          a command was not accepted
//! ```
//!
//! Programs ignore members and types that they do not know.

use codelia_proto::v1::{Approval, ApprovalReach, ApprovalScope, ApprovalState};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{units, words::Word};

/// A command of a program.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "type")]
pub(super) enum Command {
    /// Allow a request.
    #[serde(rename = "cmd.approve")]
    Approve {
        id: String,
        scope: PathScope,
        #[serde(default)]
        persist: bool,
    },
    /// Deny a request.
    #[serde(rename = "cmd.deny")]
    Deny { id: String },
    /// Choose what persistent decisions of this connection hold for.
    #[serde(rename = "cmd.policy.save")]
    Save { scope: SaveScope },
}

/// The part that an approval covers: the path of the request, or its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PathScope {
    File,
    Dir,
}

/// Where a policy is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SaveScope {
    User,
    Project,
    Org,
}

/// The object of a request: the file, or else the host and port.
fn path(approval: &Approval) -> String {
    match (approval.host.as_str(), approval.port) {
        _ if !approval.path.is_empty() => approval.path.clone(),
        (host, 0) => host.to_owned(),
        (host, port) => format!("{host}:{port}"),
    }
}

/// `event.fs_request`. `op` is the kind of the approval. The process is the first that waits; a
/// decision holds for all of a run.
pub(super) fn request(approval: &Approval) -> Value {
    json!({
        "type": "event.fs_request",
        "id": approval.approval_id,
        "pid": approval.pid,
        "exe": approval.exe,
        "cwd": approval.cwd,
        "op": approval.kind().word(),
        "path": path(approval),
        // Only reads are asked for.
        "flags": 0,
        "message": approval.message,
        "session_id": approval.session_id,
        "run_id": approval.run_id,
        "expire_time": units::timestamp(approval.expire_time.as_ref()),
    })
}

/// `event.audit`. Nobody's decision in time is `expired`, which denies.
pub(super) fn decision(approval: &Approval) -> Value {
    let decision = match approval.state() {
        ApprovalState::Allowed => "approve",
        ApprovalState::Expired => "expired",
        ApprovalState::Denied | ApprovalState::Pending | ApprovalState::Unspecified => "deny",
    };
    let scope = match approval.scope() {
        ApprovalScope::Once if approval.reach() == ApprovalReach::Directory => Some("dir"),
        ApprovalScope::Once => Some("file"),
        ApprovalScope::Session => Some("session"),
        ApprovalScope::User => Some("user"),
        ApprovalScope::Project => Some("project"),
        ApprovalScope::Tenant => Some("org"),
        ApprovalScope::Unspecified => None,
    };
    json!({
        "type": "event.audit",
        "id": approval.approval_id,
        "decision": decision,
        "scope": scope,
        "ts": units::timestamp(approval.decide_time.as_ref()),
    })
}

/// `event.error`: why a command was not accepted.
pub(super) fn error(id: Option<&str>, message: &str) -> Value {
    json!({ "type": "event.error", "id": id, "message": message })
}

#[cfg(test)]
mod tests {
    use codelia_proto::v1::ApprovalKind;

    use super::*;

    fn parse(text: &str) -> Option<Command> {
        serde_json::from_str(text).ok()
    }

    #[test]
    fn commands_are_parsed_strictly() {
        let approve = r#"{"type":"cmd.approve","id":"1","scope":"file","persist":true}"#;
        let expected = Command::Approve { id: "1".into(), scope: PathScope::File, persist: true };
        assert_eq!(parse(approve), Some(expected));
        assert_eq!(
            parse(r#"{"type":"cmd.deny","id":"1","more":2}"#),
            Some(Command::Deny { id: "1".into() })
        );
        let save = Command::Save { scope: SaveScope::Org };
        assert_eq!(parse(r#"{"type":"cmd.policy.save","scope":"org"}"#), Some(save));
        for bad in [
            "",
            "{}",
            "[]",
            r#"{"type":"cmd.approve","id":"1"}"#,
            r#"{"type":"cmd.approve","id":"1","scope":"all"}"#,
            r#"{"type":"cmd.approve","id":1,"scope":"file"}"#,
            r#"{"type":"cmd.approve","id":"1","scope":"file","persist":"no"}"#,
            r#"{"type":"event.audit","id":"1"}"#,
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn request_has_all_members() {
        let approval = Approval {
            approval_id: "1".into(),
            kind: ApprovalKind::EgressHost.into(),
            host: "example.com".into(),
            port: 443,
            ..Approval::default()
        };
        let request = request(&approval);
        for member in ["type", "id", "pid", "exe", "cwd", "op", "path", "flags"] {
            assert!(!request[member].is_null(), "{member}");
        }
        assert_eq!(
            (&request["op"], &request["path"]),
            (&json!("egress_host"), &json!("example.com:443"))
        );
    }
}
