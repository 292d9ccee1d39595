//! The end of a run: its result is committed, or dropped if the lease is lost.

use std::{sync::Arc, time::Duration};

use codelia_store::{AssignedRun, EventBody, EventKind, RunCommit};
use codelia_telemetry::{Step, backoff::jittered, metrics, trace};
use codelia_types::{
    Changes, ChangesState, CommittedRun, LostReason, Outcome, Reason, Receipt, Refusal, RunResult,
    TransactionMode, Usage,
};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{
    active::{ActiveRun, Phase, Started},
    executor::{Executor, NoResult},
    io::pacing::OutputPacing,
    retry::retry_until_fenced,
    signs::{
        escape::{self, TraceParts},
        violations,
    },
    watch::near_limits,
};
use crate::{fault, sandbox::backends::Denial, session::table::Holding};

/// Between two attempts to abandon a run in the store.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// The end of a run in this worker, before it is stored.
#[derive(Debug)]
pub(crate) struct Report {
    /// The result, without the output and the violations.
    pub(super) result: RunResult,
    /// When the command was started; `None` if it was not.
    started_at: Option<Instant>,
    /// The field of the request or policy that kept the command from starting.
    field: Option<&'static str>,
    /// Connections and refusals of the run.
    pub(super) network: Vec<EventBody>,
    /// Operations of the run, where its policy logs them.
    pub(super) logged: Vec<EventBody>,
}

impl From<Denial> for Report {
    fn from(Denial { refusal, field }: Denial) -> Self {
        Self { field, ..Self::not_started(Outcome::Refused(refusal), Receipt::default()) }
    }
}

impl Report {
    /// The report of a run whose command never started, with the receipt of its sandbox.
    pub(crate) fn not_started(outcome: Outcome, receipt: Receipt) -> Self {
        let usage = Some(Usage::default());
        Self {
            result: RunResult { usage, receipt: Some(receipt), ..outcome.into() },
            started_at: None,
            field: None,
            network: Vec::new(),
            logged: Vec::new(),
        }
    }

    pub(crate) fn of_started(
        outcome: Outcome,
        usage: Usage,
        receipt: Receipt,
        started_at: Instant,
        started: Started,
    ) -> Self {
        let Started { setup_time, prepared, unenforced, watched } = started;
        let not_started = Self::not_started(outcome, receipt);
        let result = RunResult {
            usage: Some(usage),
            setup_time: Some(setup_time),
            prepared,
            unenforced,
            watched,
            ..not_started.result
        };
        Self { result, started_at: Some(started_at), ..not_started }
    }

    /// Whether the changes of the run may be applied. Nothing may be left that could still change
    /// them.
    pub(super) fn is_success(&self) -> bool {
        self.result.outcome == Outcome::Exited(0) && self.is_clean()
    }

    pub(super) fn is_started(&self) -> bool {
        self.started_at.is_some()
    }

    fn is_clean(&self) -> bool {
        self.result.receipt.is_none_or(|receipt| receipt.is_clean())
    }
}

impl Executor {
    /// Commits the result of a run whose sandbox is gone. Returns whether the run did not begin and
    /// must be handed back.
    pub(crate) async fn conclude(&self, run: &ActiveRun, result: Result<Report, NoResult>) -> bool {
        // Without a lease there is no outcome to give out.
        run.fence
            .run_until_cancelled(OutputPacing::from_policy(&run.assigned.spec.policy).wait())
            .await;
        if let Ok(report) = &result
            && report.result.outcome == Outcome::Lost(LostReason::DrainDeadline)
            && let Ok(true) =
                retry_until_fenced("retry", run, || self.core.store.run_retry(run.id(), &run.lease))
                    .await
        {
            tracing::info!("worker shuts down, run handed back");
            self.finish(run, Phase::Dropped);
            return false;
        }
        let committed = match result {
            Ok(report) => self.commit(run, report).await,
            Err(no_result) => Err(no_result),
        };
        match committed {
            Ok(committed) => {
                fault::point("committed");
                // Before anyone learns of the result.
                self.apply_changes(run, &committed.end.result).await;
                if run.escape.quarantines_session() {
                    self.end_session_runs(run).await;
                }
                self.finish(run, Phase::Committed(Arc::new(committed)));
                false
            }
            Err(NoResult::LeaseLost) => {
                metrics().fenced();
                tracing::warn!("lease lost, result dropped");
                self.abandon(run).await;
                self.resolve_changes(run).await;
                self.finish(run, Phase::Dropped);
                false
            }
            Err(NoResult::NotHeld) => {
                self.finish(run, Phase::Dropped);
                true
            }
        }
    }

    /// Ends the other runs of a session that was quarantined: those that run here, and those that
    /// the store has assigned to this worker and that it has not heard of.
    async fn end_session_runs(&self, run: &ActiveRun) {
        let AssignedRun { session, tenant, .. } = &run.assigned;
        for other in self.core.runs.all_active() {
            if other.assigned.session == *session && other.id() != run.id() {
                other.cancel_within(Some(Duration::ZERO));
            }
        }
        let cancel = || self.core.store.session_cancel_runs(tenant, *session);
        if retry_until_fenced("end runs of a quarantined session", run, cancel).await.is_ok() {
            self.core.wakeups.poll.notify_one();
        }
    }

    /// Abandons a run whose result the store rejects although the lease is live: otherwise the run
    /// would never end.
    async fn abandon(&self, run: &ActiveRun) {
        let current = self.core.lease.current();
        while current.incarnation == run.lease.incarnation && !current.fence.is_cancelled() {
            match self.core.store.run_abandon(run.assigned.names(), &run.lease).await {
                Ok(is_ended) => {
                    if is_ended {
                        metrics().runs_lost(LostReason::ResultRejected.as_str(), 1);
                    }
                    return;
                }
                Err(error) => tracing::warn!(%error, "cannot abandon run, retrying"),
            }
            sleep(jittered(RETRY_DELAY)).await;
        }
    }

    fn finish(&self, run: &ActiveRun, phase: Phase) {
        self.core.runs.end(run);
        run.phase.send_replace(phase);
        // Upkeep removes an ended session when its last run has ended.
        if let Holding::Held { closing: true, .. } =
            self.core.sessions.holding(run.assigned.session)
        {
            self.core.wakeups.upkeep.notify_one();
        }
    }

    /// Stores the result with the rest of the output.
    async fn commit(&self, run: &ActiveRun, report: Report) -> Result<CommittedRun, NoResult> {
        let requested_at = Instant::now();
        let assigned = &run.assigned;
        let outcome = report.result.outcome.kind();
        let mode = assigned.spec.mode.as_str();
        let started_at = report.started_at;
        let committed = self.committed(run, report);
        let attempt = || {
            let committed =
                RunCommit { started_ago: started_at.map(|at| at.elapsed()), ..committed.clone() };
            async move { self.core.store.run_commit(assigned.names(), &run.lease, &committed).await }
        };
        let ended = retry_until_fenced("commit", run, attempt).await?;
        run.output.stored();
        metrics().step(Step::Commit, requested_at.elapsed());
        metrics().run_ended(outcome, mode);
        trace::end("outcome", outcome);
        if let Outcome::Lost(reason) = committed.result.outcome {
            metrics().runs_lost(reason.as_str(), 1);
        }
        if let Some(used) = &committed.result.usage {
            metrics().run_used(mode, used.cpu_time, used.read_bytes, used.written_bytes);
        }
        self.count(run, &committed.result);
        tracing::info!(
            outcome,
            seconds = started_at.map(|at| at.elapsed().as_secs_f64()),
            "run ended"
        );
        Ok(ended)
    }

    /// Counts a run in the mode that a flag chose, unless its request was at fault.
    fn count(&self, run: &ActiveRun, result: &RunResult) {
        let Some((flag, mode)) = self.core.sessions.flag(run.assigned.session) else { return };
        let counted = match &result.outcome {
            _ if mode != run.assigned.spec.mode => return,
            Outcome::Refused(Refusal { reason: Reason::SandboxFailed, .. }) => "failed",
            Outcome::Refused(Refusal {
                reason: Reason::Unenforceable | Reason::ModeUnavailable,
                ..
            }) => "refused",
            _ if result.setup_time.is_some() => "started",
            _ => return,
        };
        self.core.flags.count(&flag, |numbers| {
            numbers.runs += 1;
            numbers.failed_runs += u64::from(counted == "failed");
            numbers.refused_runs += u64::from(counted == "refused");
            if let Some(time) = result.setup_time {
                numbers.add_setup(time);
            }
        });
        metrics().flags.run(flag.id.as_str(), counted);
    }

    fn committed(&self, run: &ActiveRun, report: Report) -> RunCommit {
        let totals = run.output.totals();
        let violations = run.violations.all();
        let near_limits = run.near_limits.all();
        let seen = violations::events(&violations).chain(near_limits::events(&near_limits));
        let tail = run.output.unflushed().chunks;
        let output =
            if run.escape.is_empty() { Vec::new() } else { run.output.tail(escape::MAX_TAIL) };
        let parts = TraceParts {
            spec: &run.assigned.spec,
            network: &report.network,
            violations: &violations,
            output: &output,
        };
        let escape = run.escape.events(&self.core.options.escape, parts);
        let ended = events(&report);
        let Report { result, network, logged, .. } = report;
        let events = seen.chain(network).chain(logged).chain(escape).chain(ended).collect();
        let result = RunResult {
            sandbox_root: Some(self.core.root.session(run.assigned.session).display().to_string()),
            output_bytes: totals.stored,
            output_truncated: totals.is_truncated(),
            output_total: Some(totals.written),
            violations,
            ..result
        };
        let held_for = match (&result.changes, run.assigned.spec.transaction) {
            (
                Some(Changes { state: ChangesState::Held, .. }),
                Some(TransactionMode::Hold { timeout }),
            ) => Some(timeout),
            _ => None,
        };
        RunCommit { result, started_ago: None, tail, events, held_for }
    }
}

/// The events that say how the run ended.
fn events(report: &Report) -> Vec<EventBody> {
    let mut events = Vec::new();
    if let Outcome::Refused(refusal) = &report.result.outcome
        && !is_callers_mistake(refusal.reason)
    {
        let detail = json!({ "reason": refusal.reason, "message": refusal.message });
        let field = report.field.map(str::to_owned);
        events.push(EventBody { kind: EventKind::RunRefused, field, detail });
    }
    if !report.is_clean() {
        let detail = json!({ "receipt": report.result.receipt });
        events.push(EventBody { kind: EventKind::SandboxReceiptUnclean, field: None, detail });
    }
    events
}

/// A missing program or directory is a mistake in the request, not a refusal to record.
fn is_callers_mistake(reason: Reason) -> bool {
    matches!(reason, Reason::ExecutableNotFound | Reason::WorkingDirectoryInvalid)
}
