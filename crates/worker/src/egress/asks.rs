//! Hosts that a person decides about: requests an approval for each, and sends the decision to the
//! proxy.

use std::{collections::HashMap, sync::Arc, time::Duration};

use codelia_egress::control::Decision;
use codelia_store::{Approval, ApprovalKind, ApprovalRequest, ApprovalState, Error, Store};
use codelia_types::{ApprovalId, RunId};
use tokio::{sync::mpsc, time::sleep};

use super::{Egress, Subject};

/// How often pending approvals are looked up.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A connection of a sandbox waits for a decision.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) subject: Subject,
    pub(super) host: String,
    pub(super) port: u16,
}

/// The hosts and ports that were allowed for the session of a run before.
pub(super) async fn grants(store: &Store, subject: &Subject) -> Result<Vec<(String, u16)>, Error> {
    let grants = store.approval_grants(&subject.tenant, subject.session).await?;
    let hosts = grants.into_iter().filter(|grant| grant.kind == ApprovalKind::EgressHost);
    Ok(hosts.map(|grant| (grant.host, grant.port)).collect())
}

impl Egress {
    /// Has people decide about hosts, until the worker stops.
    pub(crate) async fn ask(self: Arc<Self>) {
        let asked = self.asked.lock().take();
        let Some(mut asked) = asked else { return std::future::pending().await };
        let mut pending = HashMap::<ApprovalId, RunId>::new();
        loop {
            self.next(&mut asked, &mut pending).await;
        }
    }

    async fn next(
        &self,
        asked: &mut mpsc::Receiver<Ask>,
        pending: &mut HashMap<ApprovalId, RunId>,
    ) {
        tokio::select! {
            // Never closed: `self` holds a sender.
            Some(ask) = asked.recv() => {
                if let Some(approval) = self.request(ask).await {
                    self.settle(approval, pending);
                }
            }
            () = sleep(POLL_INTERVAL), if !pending.is_empty() => self.poll(pending).await,
        }
    }

    /// Requests an approval; `None` if the connection cannot be asked about, which is refused then.
    async fn request(&self, ask: Ask) -> Option<Approval> {
        let Ask { subject, host, port } = ask;
        let request = ApprovalRequest {
            tenant: subject.tenant,
            session: subject.session,
            run: subject.run,
            kind: ApprovalKind::EgressHost,
            message: format!("connect to {host}:{port}"),
            host,
            port,
            path: String::new(),
            reader: Default::default(),
            timeout: self.config.options.ask_timeout,
        };
        match self.store.approval_request(&request).await {
            Ok(approval) => Some(approval),
            Err(error) => {
                tracing::warn!(%error, run = %request.run, "cannot request an approval, connection refused");
                self.decide(request.run, request.host, request.port, Decision::Deny);
                None
            }
        }
    }

    async fn poll(&self, pending: &mut HashMap<ApprovalId, RunId>) {
        self.withdraw(pending).await;
        let ids: Vec<ApprovalId> = pending.keys().copied().collect();
        match self.store.approvals_decided(&ids).await {
            Ok(decided) => decided.into_iter().for_each(|approval| self.settle(approval, pending)),
            Err(error) => tracing::warn!(%error, "cannot read approvals, retrying"),
        }
    }

    /// Forgets the approvals of runs that have ended: nobody needs to decide about them.
    async fn withdraw(&self, pending: &mut HashMap<ApprovalId, RunId>) {
        let ended: Vec<RunId> =
            pending.values().copied().filter(|run| self.sandbox(*run).is_none()).collect();
        for run in ended {
            pending.retain(|_, of| *of != run);
            if let Err(error) = self.store.approval_withdraw(run).await {
                tracing::warn!(%error, %run, "cannot withdraw approvals, they expire");
            }
        }
    }

    /// Sends a decision to the proxy, or remembers that there is none yet. What is allowed once is
    /// allowed to the run, and so to its sandbox.
    fn settle(&self, approval: Approval, pending: &mut HashMap<ApprovalId, RunId>) {
        let Some(run) = pending.get(&approval.id).copied().or(approval.run) else { return };
        let decision = match approval.state {
            ApprovalState::Pending => {
                pending.insert(approval.id, run);
                return;
            }
            ApprovalState::Allowed => Decision::Always,
            ApprovalState::Denied | ApprovalState::Expired => Decision::Deny,
        };
        pending.remove(&approval.id);
        self.decide(run, approval.host, approval.port, decision);
    }

    fn decide(&self, run: RunId, host: String, port: u16, decision: Decision) {
        if let Some(sandbox) = self.sandbox(run) {
            sandbox.decide(host, port, decision);
            self.mark(run);
        }
    }
}
