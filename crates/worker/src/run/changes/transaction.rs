//! Transactional runs: who may use the workspace, and what becomes of the changes.
//!
//! In order: the sandbox is gone, the changes are listed and prepared, the run is committed, the
//! changes are applied. The commit decides, under the lease's fence, so a worker without the lease
//! never applies anything. See [`crate::workspace::transaction`].

use std::time::Duration;

use codelia_policy::Plan;
use codelia_telemetry::task;
use codelia_types::{
    Changes, ChangesState, Outcome, Reason, Refusal, RunId, RunResult, TransactionMode,
};
use futures::future::Either;
use tokio::{
    sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard},
    time::{Instant, timeout},
};

use super::held;
use crate::{
    file_work::blocking,
    run::{
        active::ActiveRun,
        commit::Report,
        executor::{Executor, NoResult},
    },
    sandbox::backends::{Denial, failed},
    session::table::Hold,
    workspace::transaction::{ScanError, Transaction},
};

/// How long a run waits until it may use the workspace. It has a slot meanwhile.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The use of a workspace by a run, until this is dropped: shared, or of a transactional run alone.
pub(crate) type WorkspaceUse = Either<OwnedRwLockReadGuard<()>, OwnedRwLockWriteGuard<()>>;

impl Executor {
    /// Waits until the run may use the workspace. `None` if it is not to start any more.
    pub(crate) async fn enter_workspace(
        &self,
        run: &ActiveRun,
    ) -> Result<Option<WorkspaceUse>, Denial> {
        let lock = self.core.sessions.workspace(run.assigned.session);
        let is_alone = run.assigned.spec.transaction.is_some();
        let enter = async {
            if is_alone {
                Either::Right(lock.write_owned().await)
            } else {
                Either::Left(lock.read_owned().await)
            }
        };
        let entered = tokio::select! {
            biased;
            entered = timeout(MAX_WAIT.min(run.assigned.spec.timeout()), enter) => entered,
            // The caller checks all of them again.
            () = run.fence.cancelled() => return Ok(None),
            () = run.cancel.cancelled() => return Ok(None),
            () = run.drain_deadline.cancelled() => return Ok(None),
        };
        let entered = entered.map_err(|_| session_busy(is_alone, self.user_of_workspace(run)))?;
        match self.core.sessions.hold(run.assigned.session) {
            Some(hold) => Err(holds_changes(&hold)),
            None => Ok(Some(entered)),
        }
    }

    /// The run that has used the workspace for longest.
    fn user_of_workspace(&self, waiting: &ActiveRun) -> Option<RunId> {
        let runs = self.core.runs.all_active();
        let others = runs.iter().filter(|run| run.assigned.session == waiting.assigned.session);
        others.filter(|run| run.sandbox.get().is_some()).map(|run| run.id()).min()
    }

    /// The plan with a directory for the changes, if the run is transactional.
    pub(crate) async fn with_transaction(
        &self,
        run: &ActiveRun,
        plan: Plan,
    ) -> Result<Plan, Denial> {
        let Some(transaction) = self.transaction(run) else { return Ok(plan) };
        let plan = plan.with_transaction(&transaction.layer());
        blocking(move || transaction.create()).await.map_err(|error| failed(&error))?;
        Ok(plan)
    }

    /// Decides about the changes of a run whose sandbox is gone.
    pub(crate) async fn settle_changes(
        &self,
        run: &ActiveRun,
        result: Result<Report, NoResult>,
    ) -> Result<Report, NoResult> {
        let Some(transaction) = self.transaction(run) else { return result };
        let mut report = match result {
            Ok(report) if report.is_started() => report,
            not_started => {
                drop_changes(transaction).await;
                return not_started;
            }
        };
        let kept = match run.assigned.spec.transaction {
            Some(TransactionMode::Apply) => Some(ChangesState::Applied),
            Some(TransactionMode::Hold { .. }) => Some(ChangesState::Held),
            Some(TransactionMode::Preview) | None => None,
        };
        let kept = kept.filter(|_| report.is_success() && run.violations.all().total == 0);
        let scanned = transaction.clone();
        let prepared = blocking(move || {
            let changes = scanned.scan()?;
            if kept.is_some() {
                scanned.prepare()?;
            }
            Ok(changes)
        });
        match (prepared.await, kept) {
            (Ok(changes), Some(state)) => {
                report.result.changes = Some(Changes { state, ..changes });
                return Ok(report);
            }
            (Ok(changes), None) => report.result.changes = Some(changes),
            (Err(error), _) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot prepare the changes of the run"
                );
                // A run that would have succeeded must not look so without its changes.
                if kept.is_some() {
                    report.result.outcome = unapplied(&error);
                }
            }
        }
        drop_changes(transaction).await;
        Ok(report)
    }

    /// Applies the changes of a committed run, or has its session hold them. If this worker loses
    /// the session first, its next holder does.
    pub(crate) async fn apply_changes(&self, run: &ActiveRun, result: &RunResult) {
        let Some(transaction) = self.transaction(run) else { return };
        match (result.changes.as_ref().map(|changes| changes.state), run.assigned.spec.transaction)
        {
            (Some(ChangesState::Applied), _) => {
                let stop = async {
                    tokio::select! {
                        () = run.fence.cancelled() => {}
                        () = run.drain_deadline.cancelled() => {}
                    }
                };
                held::apply_until(transaction, stop).await;
            }
            (Some(ChangesState::Held), Some(TransactionMode::Hold { timeout })) => {
                let epoch = run.assigned.epoch;
                let until = Instant::now() + timeout;
                let hold = Hold { run: run.id(), epoch, until };
                self.core.sessions.set_hold(run.assigned.session, epoch, Some(hold));
            }
            _ => {}
        }
    }

    /// Drops prepared changes of a run that this worker could not commit, if it still has the lease
    /// and the store has another result. Without the lease, they are the next holder's.
    pub(crate) async fn resolve_changes(&self, run: &ActiveRun) {
        let Some(transaction) = self.transaction(run) else { return };
        let stored =
            self.core.store.run_changes_state_any_tenant(run.id(), run.assigned.epoch).await;
        if !run.fence.is_cancelled() && matches!(stored, Ok(Some(ChangesState::Dropped))) {
            drop_changes(transaction).await;
        }
    }

    fn transaction(&self, run: &ActiveRun) -> Option<Transaction> {
        run.assigned.spec.transaction?;
        Some(self.core.root.transaction(run.assigned.session, run.id(), run.assigned.epoch))
    }
}

fn session_busy(is_alone: bool, user: Option<RunId>) -> Denial {
    let user =
        user.map_or_else(|| "another run or file call".to_owned(), |run| format!("run {run}"));
    let message = if is_alone {
        format!("a transactional run is alone in its session, and {user} did not end in time")
    } else {
        format!(
            "the session is in use by a transactional run, which is alone in it: {user} did not end in time"
        )
    };
    Refusal { reason: Reason::SessionBusy, message }.into()
}

fn holds_changes(hold: &Hold) -> Denial {
    let run = hold.run;
    let message = format!(
        "the session holds the changes of run {run}; apply or discard them (codelia apply {run}, codelia discard {run})"
    );
    Refusal { reason: Reason::SessionHoldsChanges, message }.into()
}

/// The outcome of a run that succeeded, but whose changes cannot be applied.
fn unapplied(error: &ScanError) -> Outcome {
    match error {
        ScanError::TooMany => Outcome::Limit("changed_files".to_owned()),
        ScanError::TooDeep => Outcome::Limit("directory_depth".to_owned()),
        ScanError::Device => Outcome::Violation("DEVICE_CREATED".to_owned()),
        ScanError::Io(_) => Outcome::Limit("disk".to_owned()),
    }
}

/// Drops changes. If that fails, the next holder of the session does: they are not prepared, or
/// their run is not committed.
pub(crate) async fn drop_changes(transaction: Transaction) {
    let discarded = transaction.clone();
    match blocking(move || discarded.discard()).await {
        Ok(()) => remove_in_background(transaction),
        Err(error) => {
            tracing::error!(error = &error as &dyn std::error::Error, "cannot drop the changes")
        }
    }
}

/// Removes what is left, which no run waits for. Upkeep does it if this fails.
pub(crate) fn remove_in_background(transaction: Transaction) {
    task::background("remove changes", async move {
        if let Err(error) = blocking(move || transaction.empty_trash()).await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot remove old changes, retrying later"
            );
        }
    });
}
