//! The periodic work of the installation. One process does it: the owner of the row `upkeep_owner`.
//!
//! Ownership saves work; nothing depends on it. Every statement is also right while two processes
//! execute it, so an owner that was replaced without knowing does no harm.

mod objects;
mod output;
mod owner;
mod partitions;
mod purge;
mod retention;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::time::sleep;
use uuid::Uuid;

pub use self::retention::{Retention, TenantRetention};
use crate::{Error, Queue, Store, SweepReport, TrippedFlag};

/// An owner that has not renewed its claim for this long is replaced.
const TTL: Duration = Duration::from_secs(3);
/// Time between two passes of the owner.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum rows that one statement of a pass changes, so that it never holds many locks.
const MAX_ROWS: i64 = 500;
/// Maximum changes of stored output that one pass adds up.
const MAX_CHANGES: i64 = 10_000;
/// Time between two looks for old rows.
const PURGE_INTERVAL: Duration = Duration::from_secs(30);
/// How long a pass deletes old rows. The next one continues.
const PURGE_TIME: Duration = Duration::from_secs(1);
/// Maximum runs, sessions or events that one purge deletes.
const MAX_PURGED_ROWS: i64 = 1000;
/// Time between two looks at the partitions.
const PARTITION_INTERVAL: Duration = Duration::from_secs(600);

/// The work of a pass, or, in a process that is not the owner, what it read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UpkeepPass {
    /// Whether this process is the owner.
    pub is_owner: bool,
    /// Queued runs of all tenants.
    pub queue_depth: i64,
    /// Since the oldest of them was created, as the previous pass of the owner saw it.
    pub queue_age: Duration,
    /// Leases of dead workers that ended.
    pub swept: SweepReport,
    /// Runs that waited too long for a worker.
    pub refused: u64,
    /// Approvals that nobody decided about in time.
    pub undecided: u64,
    /// Sessions that expired or were idle for too long.
    pub expired: u64,
    /// Rows in partitions that should be empty, if they were counted.
    pub misplaced: Option<i64>,
    /// Mode flags that rolled themselves back.
    pub tripped: Vec<TrippedFlag>,
}

impl UpkeepPass {
    fn log(&self) {
        let swept = self.swept;
        if swept != SweepReport::default() {
            tracing::warn!(
                swept.sessions,
                swept.retried,
                swept.lost,
                "ended leases of lost workers"
            );
        }
        if self.refused > 0 {
            tracing::info!(refused = self.refused, "ended runs that waited too long for a worker");
        }
        if self.undecided > 0 {
            tracing::info!(
                undecided = self.undecided,
                "expired approvals that nobody decided about"
            );
        }
        if self.expired > 0 {
            tracing::info!(expired = self.expired, "expired sessions");
        }
        for TrippedFlag { id, why } in &self.tripped {
            tracing::warn!(flag = %id, why, "mode flag exceeded its limits and was rolled back");
        }
        if let Some(rows @ 1..) = self.misplaced {
            tracing::warn!(
                rows,
                "runs are in a default partition: a clock was wrong, or a run took days"
            );
        }
    }
}

/// Does the periodic work while this process is the owner, and else waits to become the owner.
#[derive(Debug)]
pub struct Upkeep {
    store: Store,
    retention: Retention,
    holder: Uuid,
    purge: Purge,
    partitions_at: Option<Instant>,
    /// The count of the last pass, to be stored with the next renewal.
    queue: Option<Queue>,
    /// Whether the clock was set back and sessions may wait for a time that has become far.
    is_set_back: bool,
    /// The finding of the last pass, for the loop that removes objects.
    is_owner: Arc<AtomicBool>,
}

impl Upkeep {
    /// A process that may become the owner.
    #[must_use]
    pub fn new(store: Store, retention: Retention) -> Self {
        Self {
            store,
            retention,
            holder: Uuid::now_v7(),
            purge: Purge::default(),
            partitions_at: None,
            queue: None,
            is_set_back: false,
            is_owner: Arc::default(),
        }
    }

    /// Makes passes until it is dropped, and reports each.
    pub async fn run(&mut self, observe: impl Fn(&UpkeepPass)) {
        let removal = objects::run(self.store.clone(), self.retention, self.is_owner.clone());
        tokio::join!(self.passes(observe), removal);
    }

    async fn passes(&mut self, observe: impl Fn(&UpkeepPass)) {
        loop {
            let delay = match self.pass().await {
                Ok((pass, delay)) => {
                    pass.log();
                    observe(&pass);
                    delay
                }
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "upkeep failed, retrying"
                    );
                    INTERVAL
                }
            };
            sleep(delay + self.stagger()).await;
        }
    }

    /// Makes one pass, and returns the time until the next one.
    ///
    /// # Errors
    /// If a statement fails. The next pass repeats what is left.
    pub async fn pass(&mut self) -> Result<(UpkeepPass, Duration), Error> {
        let claim = self.store.upkeep_claim(self.holder, TTL, self.queue.take()).await?;
        self.is_owner.store(claim.is_owner, Ordering::Relaxed);
        if !claim.is_owner {
            let pass = UpkeepPass {
                queue_depth: claim.queue_depth,
                queue_age: claim.queue_age,
                ..UpkeepPass::default()
            };
            // When the owner has not renewed by then, it is gone.
            return Ok((pass, claim.expires_in.clamp(Duration::ZERO, TTL)));
        }
        let store = &self.store;
        self.is_set_back |= claim.is_set_back;
        if self.is_set_back {
            tracing::warn!(
                "the clock of the database was set back, checking expired sessions again"
            );
            while store.session_check_again_any_tenant(MAX_ROWS).await? >= MAX_ROWS.unsigned_abs() {
            }
            self.is_set_back = false;
        }
        let swept = store.lease_sweep_any_tenant(MAX_ROWS).await?;
        let refused = store.run_expire_queued_any_tenant(MAX_ROWS).await?;
        let undecided = store.approval_expire_any_tenant(MAX_ROWS).await?;
        let expired = store.session_expire_any_tenant(MAX_ROWS).await?;
        self.end_queues().await?;
        store.tenant_sweep_any_tenant(MAX_ROWS).await?;
        store.output_fold_any_tenant(MAX_CHANGES).await?;
        let tripped = store.flag_check_guards().await?;
        let queue = store.run_queue_any_tenant().await?;
        self.queue = Some(queue);
        let misplaced = self.partitions().await?;
        let has_more = self.purge.pass(&self.store, &self.retention).await?;
        let queue_age = claim.queue_age;
        let pass = UpkeepPass {
            is_owner: true,
            queue_depth: queue.depth,
            queue_age,
            swept,
            refused,
            undecided,
            expired,
            misplaced,
            tripped,
        };
        Ok((pass, if has_more { Duration::ZERO } else { INTERVAL }))
    }

    /// Ends the queues of ended sessions for a limited time. The next pass continues.
    async fn end_queues(&self) -> Result<(), Error> {
        let deadline = Instant::now() + PURGE_TIME;
        while self.store.run_end_queues_any_tenant(MAX_ROWS).await? >= MAX_ROWS.unsigned_abs()
            && Instant::now() < deadline
        {}
        Ok(())
    }

    /// Makes and drops partitions from time to time, and returns how many rows have none.
    async fn partitions(&mut self) -> Result<Option<i64>, Error> {
        if self.partitions_at.is_some_and(|at| at.elapsed() < PARTITION_INTERVAL) {
            return Ok(None);
        }
        // Without the locks, which runs come first for, the next pass tries again.
        for done in [
            self.store.run_partitions_create().await,
            self.store.run_partitions_drop(&self.retention).await,
        ] {
            match done {
                Ok(()) => {}
                Err(error @ Error::LockTimeout(_)) => {
                    tracing::info!(
                        error = &error as &dyn std::error::Error,
                        "partitions are in use, retrying"
                    );
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        self.partitions_at = Some(Instant::now());
        self.store.run_default_rows().await.map(Some)
    }

    /// Gives up the ownership, so that another process need not wait until it ends.
    ///
    /// # Errors
    /// If the database does not answer.
    pub async fn release(&self) -> Result<(), Error> {
        self.store.upkeep_release(self.holder).await
    }

    /// Keeps processes that wait for the same moment from waking at once.
    fn stagger(&self) -> Duration {
        Duration::from_millis(u64::from(self.holder.as_bytes()[15]))
    }
}

/// The rows that a purge deletes next.
#[derive(Debug, Clone, Copy, Default)]
enum Step {
    #[default]
    Runs,
    Output,
    Changes,
    Sessions,
    Approvals,
    Workers,
    Settings,
    Flags,
    Policies,
    Volumes,
}

/// Deletes old rows at an interval, and without a pause while there are more.
#[derive(Debug, Default)]
struct Purge {
    step: Step,
    done_at: Option<Instant>,
}

impl Purge {
    /// Deletes for a limited time, and returns whether there may be more.
    async fn pass(&mut self, store: &Store, keep: &Retention) -> Result<bool, Error> {
        if self.done_at.is_some_and(|at| at.elapsed() < PURGE_INTERVAL) {
            return Ok(false);
        }
        let deadline = Instant::now() + PURGE_TIME;
        while Instant::now() < deadline {
            if self.step(store, keep, deadline).await? {
                continue;
            }
            self.step = match self.step {
                Step::Runs => Step::Output,
                Step::Output => Step::Changes,
                Step::Changes => Step::Sessions,
                Step::Sessions => Step::Approvals,
                Step::Approvals => Step::Workers,
                Step::Workers => Step::Settings,
                Step::Settings => Step::Flags,
                Step::Flags => Step::Policies,
                Step::Policies => Step::Volumes,
                Step::Volumes => {
                    *self = Self { step: Step::Runs, done_at: Some(Instant::now()) };
                    return Ok(false);
                }
            };
        }
        self.done_at = None;
        Ok(true)
    }

    /// Deletes a batch, and returns whether there may be more of the kind.
    async fn step(
        &self,
        store: &Store,
        keep: &Retention,
        deadline: Instant,
    ) -> Result<bool, Error> {
        let is_full =
            |deleted: u64| i64::try_from(deleted).is_ok_and(|deleted| deleted >= MAX_PURGED_ROWS);
        match self.step {
            Step::Runs => store.run_purge_any_tenant(keep, MAX_PURGED_ROWS).await,
            Step::Output => store.output_purge_any_tenant(keep, MAX_PURGED_ROWS, deadline).await,
            Step::Changes => {
                store.changes_drop_ended_any_tenant(MAX_PURGED_ROWS).await.map(is_full)
            }
            Step::Sessions => {
                store.session_purge_any_tenant(keep.runs, MAX_PURGED_ROWS).await.map(is_full)
            }
            Step::Approvals => {
                store.approval_purge_any_tenant(keep, MAX_PURGED_ROWS).await.map(is_full)
            }
            Step::Workers => store.worker_forget_any_tenant(MAX_PURGED_ROWS).await.map(is_full),
            Step::Settings => store.settings_purge_any_tenant(MAX_PURGED_ROWS).await.map(is_full),
            Step::Flags => store.flag_purge(keep.audit).await.map(is_full),
            Step::Policies => {
                store.scope_policy_purge(keep.audit, MAX_PURGED_ROWS).await.map(is_full)
            }
            Step::Volumes => store.volume_purge_any_tenant(MAX_PURGED_ROWS).await.map(is_full),
        }
    }
}
