//! Changes of the lists of a session or its tenant, for runs that are being executed.

use std::{collections::HashMap, sync::Arc, time::Duration};

use codelia_store::Error;
use codelia_types::SessionId;
use tokio::time::sleep;

use super::{
    Egress,
    rules::{BaseRules, Lists},
    sandbox::{Sandbox, Subject},
};

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
        let mut sessions: Vec<SessionId> =
            open.iter().map(|sandbox| sandbox.subject.session).collect();
        sessions.sort_unstable();
        sessions.dedup();
        let changed = self.store.session_networks(&sessions).await?;
        let changed: HashMap<_, _> =
            changed.into_iter().map(|changed| (changed.session, changed)).collect();
        for sandbox in open {
            let Subject { session, tenant, .. } = &sandbox.subject;
            if let Some(changed) = changed.get(session) {
                let lists = self.tenants.lists(&self.store, tenant, changed.clone()).await?;
                self.update(&sandbox, &lists);
            }
        }
        Ok(())
    }

    fn update(&self, sandbox: &Sandbox, lists: &Lists) {
        let run = sandbox.subject.run;
        let rules = sandbox.base.under(lists).unwrap_or_else(|error| {
            tracing::warn!(%error, %run, "lists of a session cannot be applied, its connections are refused");
            BaseRules::nothing()
        });
        if sandbox.set_rules(rules) {
            self.mark(run);
        }
    }
}
