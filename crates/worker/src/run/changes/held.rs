//! Changes that wait for a decision: stores it under the lease and carries it out.
//!
//! The store has the decision before any file is moved, so the next holder of the session finishes
//! what this worker began. Nothing else uses the workspace meanwhile.

use std::{sync::Arc, time::Duration};

use codelia_store::{ChangesDecision, Error};
use codelia_telemetry::{backoff::jittered, task};
use codelia_types::{ChangesState, LeaseEpoch};
use tokio::time::{sleep, timeout};

use super::transaction::{drop_changes, file_work, remove_in_background};
use crate::{core::Core, fault, session::table::Holding, workspace::transaction::Transaction};

/// How long a decision waits until nobody uses the workspace.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Between two attempts to apply changes.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Decides about the changes that sessions of this worker hold.
#[derive(Debug)]
pub(crate) struct Decider {
    pub(crate) core: Arc<Core>,
}

/// Why a decision was not made or not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotDecided {
    /// The worker does not hold the session under this epoch.
    #[error("the session is not held")]
    NotHeld,
    /// Something else uses the workspace.
    #[error("a run uses the session")]
    Busy,
    /// It is not known whether the store has the decision. The call can be repeated.
    #[error("it is not known whether the decision was stored")]
    Unknown,
}

impl Decider {
    /// Decides about the changes that a session holds. Does nothing if it holds none of this run:
    /// the store has what became of them. In a task, since a caller that leaves must not interrupt
    /// it.
    pub(crate) async fn decide(
        self: &Arc<Self>,
        decision: ChangesDecision,
        epoch: LeaseEpoch,
    ) -> Result<(), NotDecided> {
        let decider = self.clone();
        let deciding = async move { decider.decide_alone(decision, epoch).await };
        task::background("decide about changes", deciding).await.unwrap_or(Err(NotDecided::Unknown))
    }

    /// Drops the changes that waited too long.
    pub(crate) async fn drop_expired(self: &Arc<Self>) {
        for (session, epoch, run) in self.core.sessions.expired_holds() {
            let decision = ChangesDecision { session, run, apply: false, key: None };
            if let Err(reason) = self.decide(decision, epoch).await {
                tracing::warn!(%session, %run, %reason, "cannot drop held changes, retrying");
            }
        }
    }

    async fn decide_alone(
        &self,
        decision: ChangesDecision,
        epoch: LeaseEpoch,
    ) -> Result<(), NotDecided> {
        let session = decision.session;
        let alone = self.core.sessions.workspace(session).write_owned();
        let _alone = timeout(MAX_WAIT, alone).await.map_err(|_| NotDecided::Busy)?;
        let current = self.core.lease.current();
        if self.core.sessions.holding(session) != (Holding::Held { epoch, closing: false })
            || !current.is_live()
        {
            return Err(NotDecided::NotHeld);
        }
        let Some(hold) = self.core.sessions.hold(session).filter(|hold| hold.run == decision.run)
        else {
            return Ok(());
        };
        fault::point("decide");
        let token = self.core.lease.token(current.incarnation, epoch);
        let state = match self.core.store.changes_decide(decision, &token).await {
            Ok(state) => state,
            Err(Error::Fenced) => return Err(NotDecided::NotHeld),
            Err(error) => {
                tracing::warn!(%error, run = %hold.run, "cannot store the decision about changes");
                return Err(NotDecided::Unknown);
            }
        };
        tracing::info!(run = %hold.run, state = state.map(ChangesState::as_str), "decided about held changes");
        fault::point("decided");
        let transaction = self.core.root.transaction(session, hold.run, hold.epoch);
        if state == Some(ChangesState::Applied) {
            if !apply_until(transaction, current.fence.cancelled()).await {
                return Err(NotDecided::NotHeld);
            }
        } else {
            drop_changes(transaction).await;
        }
        self.core.sessions.set_hold(session, epoch, None);
        Ok(())
    }
}

/// Applies changes that the store has as applied. Retries until `stop`: nothing may see a part of
/// them. Returns whether all are applied.
pub(crate) async fn apply_until(transaction: Transaction, stop: impl Future<Output = ()>) -> bool {
    let mut stop = std::pin::pin!(stop);
    loop {
        let applied = transaction.clone();
        match file_work(move || applied.apply()).await {
            Ok(()) => {
                remove_in_background(transaction);
                return true;
            }
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "cannot apply the changes, retrying"
                );
            }
        }
        tokio::select! {
            () = sleep(jittered(RETRY_DELAY)) => {}
            () = &mut stop => return false,
        }
    }
}
