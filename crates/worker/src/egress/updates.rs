//! Changes of a session's lists, for its runs that are being executed.

use std::{collections::HashMap, sync::Arc, time::Duration};

use codelia_policy::NetworkPolicy;
use codelia_store::Error;
use codelia_types::SessionId;
use tokio::time::sleep;

use super::{Egress, sandbox::Sandbox};

/// How often the lists of sessions are read while a sandbox is open.
const POLL_INTERVAL: Duration = Duration::from_millis(400);

impl Egress {
    /// Follows the lists of sessions, until the worker stops.
    pub(crate) async fn follow_sessions(self: Arc<Self>) {
        loop {
            sleep(POLL_INTERVAL).await;
            if let Err(error) = self.update_once().await {
                tracing::warn!(%error, "cannot read the lists of sessions, retrying");
            }
        }
    }

    async fn update_once(&self) -> Result<(), Error> {
        let open = self.all();
        if open.is_empty() {
            return Ok(());
        }
        let mut sessions: Vec<SessionId> = open.iter().map(|sandbox| sandbox.subject.session).collect();
        sessions.sort_unstable();
        sessions.dedup();
        let changed: HashMap<_, _> = self.store.session_networks(&sessions).await?.into_iter().collect();
        for sandbox in open {
            if let Some(network) = changed.get(&sandbox.subject.session) {
                self.update(&sandbox, network);
            }
        }
        Ok(())
    }

    fn update(&self, sandbox: &Sandbox, network: &NetworkPolicy) {
        let run = sandbox.subject.run;
        match sandbox.base.under(Some(network)) {
            Ok(rules) => {
                if sandbox.set_rules(rules) {
                    self.mark(run);
                }
            }
            Err(error) => tracing::warn!(%error, %run, "lists of a session not applied"),
        }
    }
}
