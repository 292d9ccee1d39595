//! `codelia approvals …`.

mod watch;

use anyhow::Result;
use codelia_proto::v1::{
    Approval, ApprovalDecision, ApprovalFilter, ApprovalReach, ApprovalScope, ApprovalState,
    DecideApprovalRequest, ListApprovalsRequest, RevokeApprovalRequest,
};

use crate::{
    args::{self, ApprovalsCommand, ListApprovals},
    client::Client,
    ids,
    output::Output,
    resolve, units,
    words::Word,
};

#[cfg(unix)]
pub(crate) use watch::follow;

/// Executes `codelia approvals`.
pub(crate) async fn approvals(
    client: &Client,
    args: args::Approvals,
    output: Output,
) -> Result<()> {
    let decided = match args.command {
        None => return list(client, &args.list, output).await,
        Some(ApprovalsCommand::List(args)) => return list(client, &args, output).await,
        Some(ApprovalsCommand::Watch { session }) => {
            let parent = resolve::parent(client, session.as_deref()).await?;
            return watch::watch(client, &parent, output).await;
        }
        Some(ApprovalsCommand::Allow { approval, scope, directory, reason }) => {
            let name = resolve::approval(client, &approval).await?;
            let decision = Decision { allow: Some(scope_to_proto(scope)), reach: reach(directory) };
            decide(client, name, decision, reason).await?
        }
        Some(ApprovalsCommand::Deny { approval, directory, reason }) => {
            let name = resolve::approval(client, &approval).await?;
            let decision = Decision { allow: None, reach: reach(directory) };
            decide(client, name, decision, reason).await?
        }
        Some(ApprovalsCommand::Revoke { approval, reason }) => {
            let name = resolve::approval(client, &approval).await?;
            client.call(RevokeApprovalRequest { name, reason }).await?
        }
    };
    output.print_message_as(&decided, &decision(&decided))
}

async fn list(client: &Client, args: &ListApprovals, output: Output) -> Result<()> {
    let parent = resolve::parent(client, args.session.as_deref()).await?;
    let filter = match (args.all, args.granted) {
        (true, _) => ApprovalFilter::All,
        (false, true) => ApprovalFilter::Granted,
        (false, false) => ApprovalFilter::Pending,
    };
    let filter = filter.into();
    let request = ListApprovalsRequest { parent, filter, ..Default::default() };
    let approvals = client.list(request, args.limit).await?;
    let id = ids::short(approvals.iter().map(|approval| approval.approval_id.as_str()));
    let run = ids::short(approvals.iter().map(|approval| approval.run_id.as_str()));
    let header = ["APPROVAL", "STATE", "RUN", "EXPIRES", "WHAT", "MESSAGE"];
    output.print_list(&header, &approvals, |approval| {
        let expires = match approval.state() {
            ApprovalState::Pending => units::age(approval.expire_time.as_ref()),
            _ => String::new(),
        };
        vec![
            id(&approval.approval_id),
            state(approval),
            run(&approval.run_id),
            expires,
            what(approval),
            approval.message.clone(),
        ]
    })
}

/// A decision about an approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decision {
    /// The runs that it allows; `None` denies.
    pub(crate) allow: Option<ApprovalScope>,
    pub(crate) reach: ApprovalReach,
}

/// Decides about an approval: allows it for a scope, or denies it.
pub(crate) async fn decide(
    client: &Client,
    name: String,
    Decision { allow, reach }: Decision,
    reason: String,
) -> Result<Approval> {
    let decision = if allow.is_some() { ApprovalDecision::Allow } else { ApprovalDecision::Deny };
    let request = DecideApprovalRequest {
        name,
        decision: decision.into(),
        scope: allow.unwrap_or(ApprovalScope::Unspecified).into(),
        reason,
        reach: reach.into(),
    };
    client.call(request).await
}

/// Unspecified means the file, and is all that other kinds accept.
fn reach(directory: bool) -> ApprovalReach {
    if directory { ApprovalReach::Directory } else { ApprovalReach::Unspecified }
}

/// The state in a few words, such as `allowed for session`.
fn state(approval: &Approval) -> String {
    let state = approval.state().word();
    match (approval.revoke_time.is_some(), approval.scope()) {
        (true, _) => "revoked".to_owned(),
        (false, ApprovalScope::Once) => format!("{state} once"),
        (false, ApprovalScope::Unspecified) => state,
        (false, ApprovalScope::Project) => format!("{state} for project {}", approval.subject),
        (false, scope) => format!("{state} for {}", scope.word()),
    }
}

/// The kind and object of a request, such as `egress_host example.com:443`.
fn what(approval: &Approval) -> String {
    let kind = approval.kind().word();
    match (approval.host.as_str(), approval.port) {
        ("", _) if !approval.path.is_empty() => format!("{kind} {}", approval.path),
        ("", _) => kind,
        (host, 0) => format!("{kind} {host}"),
        (host, port) => format!("{kind} {host}:{port}"),
    }
}

/// One line about a decision.
fn decision(approval: &Approval) -> String {
    let (by, reason) = match approval.revoke_time {
        Some(_) => (&approval.revoked_by, &approval.revoke_reason),
        None => (&approval.decided_by, &approval.reason),
    };
    let by = if by.is_empty() { String::new() } else { format!(" by key {by}") };
    let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    format!("approval {} {}{by}{reason}", approval.approval_id, state(approval))
}

fn scope_to_proto(scope: args::ApprovalScope) -> ApprovalScope {
    match scope {
        args::ApprovalScope::Once => ApprovalScope::Once,
        args::ApprovalScope::Session => ApprovalScope::Session,
        args::ApprovalScope::User => ApprovalScope::User,
        args::ApprovalScope::Project => ApprovalScope::Project,
        args::ApprovalScope::Tenant => ApprovalScope::Tenant,
    }
}

#[cfg(test)]
mod tests {
    use codelia_proto::v1::ApprovalKind;

    use super::*;

    fn approval() -> Approval {
        Approval {
            approval_id: "id".into(),
            kind: ApprovalKind::EgressHost.into(),
            host: "example.com".into(),
            port: 443,
            state: ApprovalState::Allowed.into(),
            scope: ApprovalScope::Session.into(),
            decided_by: "key".into(),
            reason: "builds".into(),
            ..Approval::default()
        }
    }

    #[test]
    fn decision_says_who_and_why() {
        assert_eq!(decision(&approval()), "approval id allowed for session by key key: builds");
        let expired = Approval { state: ApprovalState::Expired.into(), ..Approval::default() };
        assert_eq!(decision(&expired), "approval  expired");
        let revoked = Approval {
            revoke_time: Some(Default::default()),
            revoked_by: "other".into(),
            ..approval()
        };
        assert_eq!(decision(&revoked), "approval id revoked by key other");
        assert_eq!(what(&approval()), "egress_host example.com:443");
        let kind = ApprovalKind::FileRead.into();
        let read = Approval { kind, path: "/opt/file".into(), ..Approval::default() };
        assert_eq!(what(&read), "file_read /opt/file");
    }
}
