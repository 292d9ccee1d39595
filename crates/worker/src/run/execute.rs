//! One run, from its slot to its committed outcome.

use std::{future::pending, pin::pin, sync::Arc, time::Duration};

use codelia_backends::{Launched, Prepared, Running};
use codelia_policy::Plan;
use codelia_store::{EventBody, EventKind, RunCommit};
use codelia_telemetry::{Step, metrics, task};
use codelia_types::{EndedRun, Outcome, Reason, Receipt, RunResult, Usage, Violation};
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    lease::keeper::Current,
    run::dispatch::{self, Slot},
    run::output_pacing::Release,
    run::stdio::{self, Ends, Terminal},
    run::streams::{Lost, Streams, insist},
    run::table::{ActiveRun, Control, Inlets, Phase, Started},
    run::violations,
    sandbox::backends::{Denial, denial, failed},
    worker::Worker,
};

const SIGTERM: i32 = 15;
/// Between two attempts to tell the store of a run that is given up.
const TRY_AGAIN: Duration = Duration::from_millis(200);
/// How long the reports of a sandbox may take to end after it.
const STRAY_REPORTS: Duration = Duration::from_secs(1);

/// A command that takes so long goes after younger ones, and is told how long its lease is, and each time that is renewed:
/// most have ended by then.
const FIRST_WORD: Duration = Duration::from_millis(100);

/// The session's next sandbox is prepared when the command has ended, or has taken so long: until then nobody competes
/// with its first output.
const HEAD_START: Duration = Duration::from_millis(50);

/// A run's result, before its output is added.
#[derive(Debug)]
struct Report {
    outcome: Outcome,
    usage: Usage,
    receipt: Receipt,
    started_at: Option<Instant>,
    setup_time: Option<Duration>,
    prepared: bool,
    unenforced: Vec<String>,
    /// The field of the request or policy that kept it from starting.
    field: Option<&'static str>,
}

impl From<Denial> for Report {
    fn from(Denial { refusal, field }: Denial) -> Self {
        Self { field, ..Self::unstarted(Outcome::Refused(refusal)) }
    }
}

impl Report {
    /// Of a run whose command never started.
    fn unstarted(outcome: Outcome) -> Self {
        Self {
            outcome,
            usage: Usage::default(),
            receipt: Receipt::default(),
            started_at: None,
            setup_time: None,
            prepared: false,
            unenforced: Vec::new(),
            field: None,
        }
    }
}

/// Why a run has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Undone {
    /// The lease is lost: what becomes of the run is not ours to say.
    Lost,
    /// Its command was not started, and its session is not held any more.
    NotHeld,
}

impl From<Lost> for Undone {
    fn from(Lost: Lost) -> Self {
        Self::Lost
    }
}

/// Executes a run that was activated. The slot is free again when its sandbox is gone; a run that
/// is canceled before it starts needs none.
pub(crate) async fn execute(worker: Arc<Worker>, run: Arc<ActiveRun>, inlets: Inlets, slot: Option<Slot>) {
    let done = carry_out(&worker, &run, inlets).await;
    run.output.close();
    drop(slot);
    // Who holds the lease no more has nothing to give out.
    run.fence.run_until_cancelled(Release::of(&run.assigned.spec.policy).time()).await;
    let committed = match done {
        Ok(report) => commit(&worker, &run, report).await.map_err(Undone::from),
        Err(undone) => Err(undone),
    };
    match committed {
        Ok(ended) => finish(&worker, &run, Phase::Committed(Arc::new(ended))),
        Err(Undone::Lost) => {
            metrics().fenced();
            tracing::warn!("the lease is lost: the result is dropped");
            abandon(&worker, &run).await;
            finish(&worker, &run, Phase::Dropped);
        }
        Err(Undone::NotHeld) => {
            finish(&worker, &run, Phase::Dropped);
            dispatch::hand_back(&worker, &worker.current(), run.id(), run.assigned.turn).await;
        }
    }
}

/// A result that the store refuses for good, under a lease that lives on, is lost: else nobody would
/// ever end the run.
async fn abandon(worker: &Worker, run: &ActiveRun) {
    let current = worker.current();
    while current.incarnation == run.lease.incarnation && !current.fence.is_cancelled() {
        match worker.store.run_abandon(run.id(), &run.lease).await {
            Ok(()) => return,
            Err(error) => tracing::warn!(%error, "a run cannot be given up; trying again"),
        }
        sleep(TRY_AGAIN).await;
    }
}

fn finish(worker: &Worker, run: &ActiveRun, phase: Phase) {
    worker.runs.end(run);
    run.phase.send_replace(phase);
    worker.run_ended(run.assigned.session);
}

async fn carry_out(worker: &Arc<Worker>, run: &Arc<ActiveRun>, inlets: Inlets) -> Result<Report, Undone> {
    worker.may_start(run)?;
    if run.cancel.is_cancelled() {
        return Ok(Report::unstarted(Outcome::Canceled));
    }
    let plan = match plan(worker, run)? {
        Ok(plan) => plan,
        Err(denial) => return Ok(denial.into()),
    };
    let asked = Instant::now();
    let (sandbox, prepared) = match sandbox(worker, run, &plan).await {
        Ok(sandbox) => sandbox,
        Err(denial) => return Ok(denial.into()),
    };
    if let Err(undone) = worker.may_start(run) {
        worker.receipts.judge(sandbox.discard().await);
        return Err(undone);
    }
    if run.cancel.is_cancelled() {
        let receipt = sandbox.discard().await;
        worker.receipts.judge(receipt);
        return Ok(Report { receipt, ..Report::unstarted(Outcome::Canceled) });
    }
    let waited = asked.elapsed();
    match launch(worker, run, sandbox).await {
        Ok((mut launched, ends)) => {
            // What was not prepared before is part of the setup.
            launched.setup_time += waited;
            Ok(supervise(worker, run, inlets, plan, prepared, launched, ends).await?)
        }
        Err(denial) => Ok(denial.into()),
    }
}

fn plan(worker: &Worker, run: &ActiveRun) -> Result<Result<Plan, Denial>, Undone> {
    let (id, session, spec) = (run.id(), run.assigned.session, &run.assigned.spec);
    let ids = worker.sessions.ids(session).ok_or(Undone::NotHeld)?;
    Ok(worker.modes.plan(id, session, worker.root.session(session), spec, ids))
}

/// The session's spare sandbox if it serves, else a new one; and whether it was prepared before.
async fn sandbox(worker: &Worker, run: &ActiveRun, plan: &Plan) -> Result<(Box<dyn Prepared>, bool), Denial> {
    let asked = Instant::now();
    if let Some(spare) = worker.sessions.take_spare(run.assigned.session, plan) {
        let ready = spare.is_ready();
        match spare.into_sandbox().await {
            Some(sandbox) if sandbox.is_alive() => return Ok((sandbox, ready)),
            Some(sandbox) => worker.receipts.judge(sandbox.discard().await),
            None => {}
        }
    }
    let sandbox = worker.modes.prepare(plan).await?;
    metrics().step(Step::Prepare, asked.elapsed());
    Ok((sandbox, false))
}

async fn launch(
    worker: &Worker,
    run: &ActiveRun,
    sandbox: Box<dyn Prepared>,
) -> Result<(Launched, Ends), Denial> {
    let command = &run.assigned.spec.command;
    let (stdio, ends) = match stdio::open(command) {
        Ok(streams) => streams,
        Err(error) => {
            worker.receipts.judge(sandbox.discard().await);
            return Err(failed(&error).into());
        }
    };
    let launched = sandbox.launch(command, stdio).await.map_err(denial)?;
    Ok((launched, ends))
}

/// Stays with a command until its sandbox is gone.
async fn supervise(
    worker: &Arc<Worker>,
    run: &Arc<ActiveRun>,
    inlets: Inlets,
    plan: Plan,
    prepared: bool,
    launched: Launched,
    ends: Ends,
) -> Result<Report, Lost> {
    let Launched { mut running, setup_time } = launched;
    let started_at = Instant::now();
    metrics().setup(plan.mode.as_str(), prepared, setup_time);
    let started = Started { setup_time, prepared, unenforced: plan.unenforced_fields() };
    run.phase.send_replace(Phase::Started(started));
    let streams = Streams::start(worker, run, ends.outputs, ends.stdin.map(|writer| (writer, inlets.stdin)));
    let violations = running.violations().map(|reports| collect(run, reports));

    let lease = worker.current.subscribe();
    let waiting = wait(run, running.as_mut(), lease, inlets.control, ends.terminal.as_ref());
    let end = with_head_start(waiting, || worker.keep_spare(run.assigned.session)).await;
    let ended = stop(worker, run, running.as_mut(), end).await;
    metrics().step(Step::Execute, started_at.elapsed());
    streams.finish(&run.output).await;
    let receipt = running.destroy().await;
    worker.receipts.judge(receipt);
    if let Some(violations) = violations {
        all_collected(violations).await;
    }
    let (outcome, mut usage) = ended?;
    let release = Release::of(&run.assigned.spec.policy);
    (usage.cpu_time, usage.wall_time) = (release.rounded(usage.cpu_time), release.rounded(usage.wall_time));
    Ok(Report {
        outcome,
        usage,
        receipt,
        started_at: Some(started_at),
        setup_time: Some(setup_time),
        prepared,
        unenforced: plan.unenforced_fields(),
        field: None,
    })
}

/// Waits, and does something beside it as soon as that disturbs nobody.
async fn with_head_start<T>(waiting: impl Future<Output = T>, then: impl FnOnce()) -> T {
    let mut waiting = pin!(waiting);
    let soon = timeout(HEAD_START, &mut waiting).await;
    then();
    match soon {
        Ok(done) => done,
        Err(_) => waiting.await,
    }
}

fn collect(run: &Arc<ActiveRun>, reports: mpsc::Receiver<Violation>) -> JoinHandle<()> {
    let run = run.clone();
    task::background("violations", async move { run.violations.collect(reports).await })
}

/// The reports of a sandbox that is gone are at their end; if they are not, nobody waits for more.
async fn all_collected(mut collecting: JoinHandle<()>) {
    if timeout(STRAY_REPORTS, &mut collecting).await.is_err() {
        tracing::error!("the reports of a sandbox that is gone do not end");
        collecting.abort();
    }
}

/// Why a command is over, or has to be.
#[derive(Debug)]
enum End {
    Own(Outcome, Usage),
    /// We end it, with this outcome.
    Forced(Outcome),
    Fenced,
}

/// Waits for the command's end or for a reason to end it; passes signals, sizes and the time that is left on.
async fn wait(
    run: &ActiveRun,
    running: &mut dyn Running,
    mut lease: watch::Receiver<Current>,
    mut control: mpsc::Receiver<Control>,
    terminal: Option<&Terminal>,
) -> End {
    let deadline = Instant::now() + run.assigned.spec.timeout();
    let mut first_word = Some(Instant::now() + FIRST_WORD);
    loop {
        let control = tokio::select! {
            biased;
            () = run.fence.cancelled() => return End::Fenced,
            (outcome, usage) = running.wait() => return End::Own(outcome, usage),
            () = run.cancel.cancelled() => return End::Forced(Outcome::Canceled),
            () = sleep_until(deadline) => return End::Forced(Outcome::TimedOut),
            () = sleep_until(run.owner_deadline), if run.awaits_owner() => {
                // It may have come since this wait began.
                if run.awaits_owner() {
                    tracing::info!("the caller that the run ends with did not come");
                    run.cancel.cancel();
                }
                continue;
            }
            () = news(&mut lease, first_word) => {
                if first_word.take().is_some() {
                    running.lower_priority();
                }
                let left = lease.borrow_and_update().left();
                running.keep_alive(left).await;
                continue;
            }
            Some(control) = control.recv() => control,
        };
        match (control, terminal) {
            (Control::Signal(signal), _) => running.signal(signal).await,
            (Control::Resize(size), Some(terminal)) => {
                if let Err(error) = terminal.resize(size) {
                    tracing::warn!(%error, "the terminal cannot be resized");
                }
            }
            (Control::Resize(_), None) => tracing::debug!("a resize for a run without a terminal"),
        }
    }
}

/// Waits until there is something to tell about the lease.
async fn news(lease: &mut watch::Receiver<Current>, first: Option<Instant>) {
    match first {
        Some(first) => sleep_until(first).await,
        // Without anybody to renew it there is nothing more to tell.
        None if lease.changed().await.is_err() => pending().await,
        None => {}
    }
}

/// Ends the command if it has not ended: first it is asked, then it is killed. Without a lease it
/// is killed at once.
async fn stop(
    worker: &Worker,
    run: &ActiveRun,
    running: &mut dyn Running,
    end: End,
) -> Result<(Outcome, Usage), Lost> {
    let outcome = match end {
        End::Own(outcome, usage) => return Ok((outcome, usage)),
        End::Forced(outcome) => Some(outcome),
        End::Fenced => None,
    };
    if outcome.is_some() {
        running.signal(SIGTERM).await;
        let grace = timeout(worker.options.kill_grace, running.wait());
        // Killing is right in every case that is not an end by itself.
        if let Some(Ok((_, usage))) = run.fence.run_until_cancelled(grace).await {
            return outcome.map(|outcome| (outcome, usage)).ok_or(Lost);
        }
    }
    running.kill_tree().await;
    let (_, usage) = running.wait().await;
    outcome.map(|outcome| (outcome, usage)).ok_or(Lost)
}

/// Stores the result with the end of the output.
async fn commit(worker: &Worker, run: &ActiveRun, report: Report) -> Result<EndedRun, Lost> {
    let asked = Instant::now();
    let assigned = &run.assigned;
    let (outcome, mode) = (report.outcome.kind(), assigned.spec.mode.as_str());
    let started_at = report.started_at;
    let committed = committed(worker, run, report);
    let attempt = || {
        let committed = RunCommit { started_ago: started_at.map(|at| at.elapsed()), ..committed.clone() };
        async move { worker.store.run_commit(assigned.id, &run.lease, &committed).await }
    };
    let ended = insist("commit", run, attempt).await?;
    run.output.stored();
    metrics().step(Step::Commit, asked.elapsed());
    metrics().run_ended(outcome, mode);
    let used = &committed.result.usage;
    metrics().run_used(mode, used.cpu_time, used.read_bytes, used.written_bytes);
    tracing::info!(outcome, took = ?started_at.map(|at| at.elapsed()), "run ended");
    Ok(ended)
}

fn committed(worker: &Worker, run: &ActiveRun, report: Report) -> RunCommit {
    let totals = run.output.totals();
    let violations = run.violations.all();
    let events = violations::happenings(&violations).chain(happenings(&report)).collect();
    let result = RunResult {
        outcome: report.outcome,
        usage: report.usage,
        receipt: report.receipt,
        sandbox_root: worker.root.session(run.assigned.session).display().to_string(),
        setup_time: report.setup_time,
        prepared: report.prepared,
        unenforced: report.unenforced,
        output_bytes: totals.bytes,
        output_truncated: totals.truncated,
        violations,
    };
    RunCommit { result, started_ago: None, tail: run.output.unflushed().chunks, events }
}

/// What must leave a trace beside the result itself.
fn happenings(report: &Report) -> impl Iterator<Item = EventBody> {
    let refused = match &report.outcome {
        Outcome::Refused(refusal) if !is_callers_mistake(refusal.reason) => {
            let detail = json!({ "reason": refusal.reason, "message": refusal.message });
            let field = report.field.map(str::to_owned);
            Some(EventBody { kind: EventKind::RunRefused, field, detail })
        }
        _ => None,
    };
    let unclean = (!report.receipt.is_clean()).then(|| EventBody {
        kind: EventKind::SandboxReceiptUnclean,
        field: None,
        detail: json!({ "receipt": report.receipt }),
    });
    refused.into_iter().chain(unclean)
}

/// A program or directory that is not there is nobody's refusal.
fn is_callers_mistake(reason: Reason) -> bool {
    matches!(reason, Reason::ExecutableNotFound | Reason::WorkingDirectoryInvalid)
}
