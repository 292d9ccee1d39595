//! Changes that wait for a decision: stores it under the lease and carries it out.
//!
//! The store has the decision before any file is moved, so the next holder of the session finishes
//! what this worker began. Nothing else uses the workspace meanwhile.

use std::{sync::Arc, time::Duration};

use codelia_store::{ChangesDecision, Error};
use codelia_telemetry::{backoff::jittered, task};
use codelia_types::{ChangesState, LeaseEpoch};
use tokio::time::{sleep, timeout};

use super::transaction::{drop_changes, remove_in_background};
use crate::{
    core::Core, fault, file_work::blocking, session::table::Holding,
    workspace::transaction::Transaction,
};

/// How long a decision waits until nobody uses the workspace.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Between two attempts to apply changes.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Why a decision was not made or not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotDecided {
    /// The worker does not hold the session under this epoch.
    #[error("the session is not held")]
    NotHeld,
    /// Something else uses the workspace.
    #[error("a run uses the session")]
    Busy,
    /// The store may have the decision or not. The call can be repeated.
    #[error("it is not known whether the decision was stored")]
    Unknown,
}

/// Decides about the changes that a session holds. Does nothing if it holds none of this run: the
/// store has what became of them. In a task, since a caller that leaves must not interrupt it.
pub(crate) async fn decide(
    core: &Arc<Core>,
    decision: ChangesDecision,
    epoch: LeaseEpoch,
) -> Result<(), NotDecided> {
    let core = core.clone();
    let deciding = async move { decide_alone(&core, decision, epoch).await };
    task::background("decide about changes", deciding).await.unwrap_or(Err(NotDecided::Unknown))
}

/// Drops the changes that waited too long.
pub(crate) async fn drop_expired(core: &Arc<Core>) {
    for (session, epoch, run) in core.sessions.expired_holds() {
        let decision = ChangesDecision { session, run, apply: false, key: None };
        if let Err(reason) = decide(core, decision, epoch).await {
            tracing::warn!(%session, %run, %reason, "cannot drop held changes, retrying");
        }
    }
}

async fn decide_alone(
    core: &Core,
    decision: ChangesDecision,
    epoch: LeaseEpoch,
) -> Result<(), NotDecided> {
    let session = decision.session;
    let alone = core.sessions.workspace(session).write_owned();
    let _alone = timeout(MAX_WAIT, alone).await.map_err(|_| NotDecided::Busy)?;
    let current = core.lease.current();
    if core.sessions.holding(session) != (Holding::Held { epoch, closing: false })
        || !current.is_live()
    {
        return Err(NotDecided::NotHeld);
    }
    let Some(hold) = core.sessions.hold(session).filter(|hold| hold.run == decision.run) else {
        return Ok(());
    };
    fault::point("decide");
    let token = core.lease.token(current.incarnation, epoch);
    let state = match core.store.changes_decide(decision, &token).await {
        Ok(state) => state,
        Err(Error::Fenced) => return Err(NotDecided::NotHeld),
        Err(error) => {
            tracing::warn!(%error, run = %hold.run, "cannot store the decision about changes");
            return Err(NotDecided::Unknown);
        }
    };
    tracing::info!(run = %hold.run, state = state.map(ChangesState::as_str), "decided about held changes");
    fault::point("decided");
    let transaction = core.root.transaction(session, hold.run, hold.epoch);
    if state == Some(ChangesState::Applied) {
        if !apply_until(transaction, current.fence.cancelled()).await {
            return Err(NotDecided::NotHeld);
        }
    } else {
        drop_changes(transaction).await;
    }
    core.sessions.set_hold(session, epoch, None);
    Ok(())
}

/// Applies changes that the store has as applied. Retries until `stop`: nothing may see a part of
/// them. Returns whether all are applied.
pub(crate) async fn apply_until(transaction: Transaction, stop: impl Future<Output = ()>) -> bool {
    let mut stop = std::pin::pin!(stop);
    loop {
        let applied = transaction.clone();
        match blocking(move || applied.apply()).await {
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
