//! Follows the approvals of a tenant for one client: the pending ones first, then each change.
//! Reads the table at an interval, so that it needs no memory of what other processes did.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};

use codelia_proto::v1;
use codelia_store::{
    Approval, ApprovalFilter, ApprovalState, ApprovalStatus, Caller, MAX_PENDING_OF_TENANT,
};
use codelia_types::{ApprovalId, SessionId};
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tonic::Status;

use crate::{
    context::Context,
    server::request::Deadline,
    stream::{StreamError, send_final_error, stopped},
    wire::to_proto,
};

/// Responses buffered for a slow client.
pub(super) const BUFFER: usize = 16;
/// Between two reads of what changed.
const INTERVAL: Duration = Duration::from_millis(500);
/// A change becomes visible at most this long after its time: what its transaction takes.
const MAX_COMMIT_TIME: time::Duration = time::Duration::seconds(10);
/// Changes read at once.
const MAX_CHANGES: i64 = 1000;

/// One client's view of the approvals.
#[derive(Debug)]
pub(super) struct Watch {
    context: Arc<Context>,
    caller: Caller,
    session: Option<SessionId>,
    /// When the client called: later changes are sent.
    began: OffsetDateTime,
    responses: mpsc::Sender<Result<v1::WatchApprovalsResponse, Status>>,
    /// What was sent of each approval that is pending or changed lately.
    sent: Sent,
}

impl Watch {
    pub(super) fn new(
        context: Arc<Context>,
        caller: Caller,
        session: Option<SessionId>,
        began: OffsetDateTime,
        responses: mpsc::Sender<Result<v1::WatchApprovalsResponse, Status>>,
    ) -> Self {
        Self { context, caller, session, began, responses, sent: Sent::default() }
    }

    /// Sends until the client disconnects, its deadline passes or the server stops.
    pub(super) async fn run(mut self, deadline: Deadline) {
        let context = self.context.clone();
        let responses = self.responses.clone();
        let Err(error) = tokio::select! {
            ended = self.follow() => ended,
            error = stopped(&context, &responses, deadline) => Err(error),
        };
        send_final_error(&responses, error).await;
    }

    async fn follow(&mut self) -> Result<Infallible, StreamError> {
        self.pending().await?;
        let mut since = self.began - MAX_COMMIT_TIME;
        loop {
            tokio::time::sleep(INTERVAL).await;
            // Very many watches of one tenant read less often.
            if self.context.list_turn(&self.caller).await.is_err() {
                continue;
            }
            let changes =
                self.context.store.approval_changes(&self.caller.tenant, since, MAX_CHANGES).await;
            match changes {
                Ok(changes) => since = self.send_changes(changes, since).await?,
                // The next read finds the same changes.
                Err(error) if error.is_transient() => {
                    tracing::debug!(%error, "cannot read approvals")
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn pending(&mut self) -> Result<(), StreamError> {
        let filter =
            ApprovalFilter { status: ApprovalStatus::Pending, session: self.session, before: None };
        self.context.list_turn(&self.caller).await?;
        let store = &self.context.store;
        let pending =
            store.approval_list(&self.caller.tenant, &filter, 2 * MAX_PENDING_OF_TENANT).await?;
        for approval in pending.into_iter().rev() {
            self.sent.is_new(&approval, true);
            self.send(approval).await?;
        }
        Ok(())
    }

    /// Sends what is new, and returns where the next read begins.
    async fn send_changes(
        &mut self,
        changes: Vec<(OffsetDateTime, Approval)>,
        since: OffsetDateTime,
    ) -> Result<OffsetDateTime, StreamError> {
        let is_full = i64::try_from(changes.len()).is_ok_and(|count| count >= MAX_CHANGES);
        let Some(last) = changes.last().map(|(at, _)| *at) else { return Ok(since) };
        let seen: HashSet<ApprovalId> = changes.iter().map(|(_, approval)| approval.id).collect();
        for (at, approval) in changes {
            let is_watched = self.session.is_none_or(|session| session == approval.session);
            if is_watched && self.sent.is_new(&approval, at >= self.began) {
                self.send(approval).await?;
            }
        }
        self.sent.forget_others(&seen);
        // With very many changes, go on after the last one.
        Ok(if is_full { last } else { since.max(last - MAX_COMMIT_TIME) })
    }

    async fn send(&self, approval: Approval) -> Result<(), StreamError> {
        let response = v1::WatchApprovalsResponse { approval: Some(to_proto::approval(approval)) };
        self.responses.send(Ok(response)).await.map_err(|_| StreamError::ClientGone)
    }
}

/// What a client knows of each approval: its state, and whether it is revoked.
#[derive(Debug, Default)]
struct Sent(HashMap<ApprovalId, (ApprovalState, bool)>);

impl Sent {
    /// Whether the client does not know this. It need not know what was decided before it came,
    /// unless it was told that the approval is pending.
    fn is_new(&mut self, approval: &Approval, is_recent: bool) -> bool {
        let now = (approval.state, approval.revoked.is_some());
        let before = self.0.insert(approval.id, now);
        match before {
            Some(before) => before != now,
            None => is_recent || approval.state == ApprovalState::Pending,
        }
    }

    /// Forgets what is decided and was not read this time: it does not come again.
    fn forget_others(&mut self, seen: &HashSet<ApprovalId>) {
        self.0.retain(|id, (state, _)| *state == ApprovalState::Pending || seen.contains(id));
    }
}

#[cfg(test)]
mod tests {
    use codelia_store::ApprovalKind;
    use codelia_types::KeyId;

    use super::*;

    fn approval(state: ApprovalState) -> Approval {
        Approval {
            id: ApprovalId(uuid::Uuid::nil()),
            tenant: "a".parse().unwrap(),
            session: SessionId::generate(),
            run: None,
            kind: ApprovalKind::NetworkProxy,
            host: String::new(),
            port: 0,
            path: String::new(),
            reach: None,
            reader: Default::default(),
            subject: None,
            requested_by: KeyId::generate(),
            message: "m".into(),
            state,
            scope: None,
            decided_by: None,
            reason: None,
            created_at: OffsetDateTime::UNIX_EPOCH,
            expires_at: OffsetDateTime::UNIX_EPOCH,
            decided_at: None,
            revoked: None,
            revoke_reason: None,
        }
    }

    #[test]
    fn each_change_is_sent_once() {
        let (pending, denied) = (approval(ApprovalState::Pending), approval(ApprovalState::Denied));
        let mut sent = Sent::default();
        assert!(sent.is_new(&pending, false));
        assert!(!sent.is_new(&pending, true));
        assert!(sent.is_new(&denied, false), "the client knew it as pending");
        assert!(!sent.is_new(&denied, true));
        let mut later = Sent::default();
        assert!(!later.is_new(&denied, false), "decided before the client came");
        let mut short = Sent::default();
        assert!(short.is_new(&denied, true), "requested and decided between two reads");
    }

    #[test]
    fn only_pending_and_recent_are_remembered() {
        let mut sent = Sent::default();
        sent.is_new(&approval(ApprovalState::Pending), true);
        sent.forget_others(&HashSet::new());
        assert_eq!(sent.0.len(), 1);
        sent.is_new(&approval(ApprovalState::Denied), true);
        sent.forget_others(&HashSet::new());
        assert!(sent.0.is_empty());
    }
}
