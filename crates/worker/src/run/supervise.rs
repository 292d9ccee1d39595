//! Stays with a started command until its sandbox is gone.

use std::{pin::pin, sync::Arc, time::Duration};

use codelia_backends::{IsolationCheck, Running};
use codelia_telemetry::{Step, metrics, task, trace};
use codelia_types::{LostReason, NearLimit, Outcome, Usage, Violation};
use futures::future::OptionFuture;
use tokio::{
    sync::mpsc,
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};

use super::{
    active::{ActiveRun, Control, InputReceivers, Phase},
    commit::Report,
    execute::StartedCommand,
    executor::{Executor, NoResult},
    io::{pacing::OutputPacing, stdio::Terminal, streams::Streams},
    live_usage::Meter,
    signs::{
        canary,
        escape::{self, EscapeLog, Indicator},
        operations,
    },
    watch::LimitWatches,
};
use crate::{core::Core, lease::worker_lease::LeaseHandle, session::spare_maker};

const SIGTERM: i32 = 15;
/// How long the violation reports of a sandbox may take to end after it.
const REPORTS_TIMEOUT: Duration = Duration::from_secs(1);

/// A command that runs this long gets a lower priority than newer ones, and its sandbox learns how
/// long the lease is. After each renewal it learns that from the lease keeper. Most commands have
/// ended by then.
const LONG_RUNNING: Duration = Duration::from_millis(100);

/// Between two checks of where the processes of a command are.
const ISOLATION_INTERVAL: Duration = Duration::from_secs(2);
/// Processes outside their sandbox that a check reports.
const MAX_DRIFTS: usize = 5;

/// The session's next sandbox is prepared when the command has ended or has run this long, so that
/// it does not compete with the first output.
const SPARE_DELAY: Duration = Duration::from_millis(50);

/// Why a command has ended, or must end.
#[derive(Debug)]
enum End {
    Own(Outcome, Usage),
    /// The worker ends it, with this outcome.
    Forced(Outcome),
    /// The command exceeded a limit: it is killed at once, since it may write until it is gone.
    Exceeded(Outcome),
    /// The command tried to leave its sandbox: it is killed at once.
    Escape,
    Fenced,
}

impl Executor {
    /// Supervises a command until its sandbox is gone.
    pub(super) async fn supervise(
        &self,
        run: &Arc<ActiveRun>,
        inputs: InputReceivers,
        command: StartedCommand,
    ) -> Result<Report, NoResult> {
        let StartedCommand { mut running, stdio, started, network, reads, watches, volumes } =
            command;
        let started_at = Instant::now();
        run.sandbox.get_or_init(|| running.remote());
        run.meter.get_or_init(|| Meter { started_at, reader: running.usage_reader() });
        run.phase.send_replace(Phase::Started(started.clone()));
        let stdin = stdio.stdin.map(|writer| (writer, inputs.stdin));
        let streams = Streams::start(&self.core.store, run, stdio.outputs, stdin);
        let signs = SignWatches::start(run, running.as_mut(), &self.core);

        let near_limits = running.near_limits();
        let mut reports = Reports { control: inputs.control, near_limits, watches };
        let terminal = stdio.terminal.as_ref();
        let waiting = wait(run, running.as_mut(), &self.core.lease, &mut reports, terminal);
        let end = then_after(SPARE_DELAY, waiting, || {
            spare_maker::refill(&self.core, run.assigned.session);
        })
        .await;
        let ended = self.stop(run, running.as_mut(), end).await;
        signs.stop_checks();
        reports.pass_last_near_limits(run);
        metrics().step(Step::Execute, started_at.elapsed());

        let ended_at = Instant::now();
        streams.finish(&run.output).await;
        // Before the sandbox is destroyed: its sockets keep its network namespace.
        let network = match (network, &ended) {
            (Some(network), Ok(_)) => Some(network.close().await),
            // A worker without the lease stores nothing.
            (Some(_), Err(_)) | (None, _) => None,
        };
        let operations = running.take_operations();
        let receipt = running.destroy().await;
        // The sandbox asks no more; what nobody decided about is withdrawn in the background.
        if let Some(reads) = reads {
            reads.detach();
        }
        self.core.receipts.record(receipt);
        // Nothing writes any more.
        drop(reports.watches);
        signs.collected().await;
        trace::step("clean up", ended_at.elapsed());

        let (outcome, mut usage) = ended?;
        let outcome = self.measure_volumes(&volumes, outcome).await;
        wait_for_owner(run, started_at).await;
        let pacing = OutputPacing::from_policy(&run.assigned.spec.policy);
        usage.cpu_time = pacing.round_up(usage.cpu_time);
        usage.wall_time = pacing.round_up(usage.wall_time);
        let options = &self.core.options.escape;
        let network = network.unwrap_or_default().with_direct_attempts(usage.network);
        usage.network = network.usage;
        run.escape.network(options, run.assigned.spec.network, usage.network.as_ref());
        canary::respond(&self.core).await;
        let outcome = run.escape.outcome(outcome);
        let logged = operations.map(|it| {
            operations::events(&it, started_at, &pacing, options.webhook_url().is_some())
        });
        let mut report = Report::of_started(outcome, usage, receipt, started_at, started);
        report.network = network.events;
        report.logged = logged.unwrap_or_default();
        Ok(report)
    }

    /// Ends the command if it has not ended: asks it first, then kills it. Without a lease it is
    /// killed immediately.
    async fn stop(
        &self,
        run: &ActiveRun,
        running: &mut dyn Running,
        end: End,
    ) -> Result<(Outcome, Usage), NoResult> {
        let asks = matches!(end, End::Forced(_));
        let outcome = match end {
            End::Own(outcome, usage) => return Ok((outcome, usage)),
            End::Forced(outcome) | End::Exceeded(outcome) => Some(outcome),
            End::Escape => Some(EscapeLog::violation()),
            End::Fenced => None,
        };
        if asks && !run.escape.terminate.is_cancelled() {
            running.signal(SIGTERM).await;
            let ended = end_within_grace(run, running, self.core.options.kill_grace);
            if let Some(Some(usage)) = run.fence.run_until_cancelled(ended).await {
                return outcome.map(|outcome| (outcome, usage)).ok_or(NoResult::LeaseLost);
            }
        }
        running.kill_tree().await;
        let (_, usage) = running.wait().await;
        outcome.map(|outcome| (outcome, usage)).ok_or(NoResult::LeaseLost)
    }
}

/// Waits until the command has ended, or `None` when its grace is over. A later request may shorten
/// the grace.
async fn end_within_grace(
    run: &ActiveRun,
    running: &mut dyn Running,
    default: Duration,
) -> Option<Usage> {
    let asked_at = Instant::now();
    let mut requested = run.cancel_grace.subscribe();
    let mut grace = requested.borrow_and_update().unwrap_or(default);
    loop {
        tokio::select! {
            biased;
            (_, usage) = running.wait() => return Some(usage),
            () = sleep_until(asked_at + grace) => return None,
            // Fails only if the sender is dropped, which lives as long as the run.
            Ok(()) = requested.changed() => grace = grace.min(requested.borrow_and_update().unwrap_or(default)),
        }
    }
}

/// Messages that arrive while a command runs.
struct Reports {
    control: mpsc::Receiver<Control>,
    near_limits: Option<mpsc::Receiver<NearLimit>>,
    watches: LimitWatches,
}

impl Reports {
    /// Takes what was seen at the end of the command.
    fn pass_last_near_limits(&mut self, run: &ActiveRun) {
        while let Some(Ok(near)) = self.near_limits.as_mut().map(mpsc::Receiver::try_recv) {
            run.near_limits.add(near);
        }
    }
}

/// Waits for the end of the command or a reason to end it. Meanwhile passes on signals, terminal
/// sizes and limits that are near.
async fn wait(
    run: &ActiveRun,
    running: &mut dyn Running,
    lease: &LeaseHandle,
    reports: &mut Reports,
    terminal: Option<&Terminal>,
) -> End {
    let deadline = Instant::now() + run.assigned.spec.timeout();
    let long_running_at = Instant::now() + LONG_RUNNING;
    let mut is_long_running = false;
    loop {
        let near_limit = reports.near_limits.as_mut().map(mpsc::Receiver::recv);
        let near_limit = OptionFuture::from(near_limit);
        let control = tokio::select! {
            biased;
            () = run.fence.cancelled() => return End::Fenced,
            (outcome, usage) = running.wait() => return End::Own(outcome, usage),
            () = run.escape.terminate.cancelled() => return End::Escape,
            () = run.cancel.cancelled() => return End::Forced(Outcome::Canceled),
            () = run.drain_deadline.cancelled() => return End::Forced(Outcome::Lost(LostReason::DrainDeadline)),
            limit = reports.watches.exceeded() => {
                tracing::info!(outcome = limit.kind(), "the command exceeds a limit, killing it");
                return End::Exceeded(limit);
            }
            () = sleep_until(deadline) => return End::Forced(Outcome::TimedOut),
            () = sleep_until(run.owner_deadline), if run.awaits_owner() => {
                // The caller may have attached since this wait began.
                if run.awaits_owner() {
                    tracing::info!("the caller that the run ends with did not attach, canceling");
                    run.cancel.cancel();
                }
                continue;
            }
            () = sleep_until(long_running_at), if !is_long_running => {
                is_long_running = true;
                running.lower_priority();
                running.remote().keep_alive(lease.borrow().left());
                continue;
            }
            Some(Some(near)) = near_limit => {
                run.near_limits.add(near);
                continue;
            }
            Some(control) = reports.control.recv() => control,
        };
        match (control, terminal) {
            (Control::Signal(signal), _) => running.signal(signal).await,
            (Control::Resize(size), Some(terminal)) => {
                if let Err(error) = terminal.resize(size) {
                    tracing::warn!(%error, "cannot resize the terminal");
                }
            }
            (Control::Resize(_), None) => {
                tracing::debug!("resize ignored: the run has no terminal")
            }
        }
    }
}

/// Waits until the caller that the run ends with has all output. A canceled run, one without a
/// lease, or one whose worker shuts down waits for no one.
async fn wait_for_owner(run: &ActiveRun, started_at: Instant) {
    let deadline = started_at + run.assigned.spec.timeout();
    let followed = run.fence.run_until_cancelled(timeout_at(deadline, run.output.followed()));
    let followed = run.drain_deadline.run_until_cancelled(followed);
    let _ = run.cancel.run_until_cancelled(followed).await;
}

/// Awaits `waiting`, and calls `then` when it is done or after `delay`, whichever is first.
async fn then_after<T>(
    delay: Duration,
    waiting: impl Future<Output = T>,
    then: impl FnOnce(),
) -> T {
    let mut waiting = pin!(waiting);
    let early = timeout(delay, &mut waiting).await;
    then();
    match early {
        Ok(done) => done,
        Err(_) => waiting.await,
    }
}

/// Collects the reports of the sandbox until they end.
fn collect(
    run: &Arc<ActiveRun>,
    mut reports: mpsc::Receiver<Violation>,
    core: Arc<Core>,
) -> JoinHandle<()> {
    let run = run.clone();
    task::background("violations", async move {
        while let Some(violation) = reports.recv().await {
            escape::respond(&run, &core.options.escape, Indicator::of_call(&violation)).await;
            run.violations.add(violation);
        }
    })
}

/// Checks from time to time that the processes of a command stay in their sandbox.
fn watch_isolation(run: &Arc<ActiveRun>, check: IsolationCheck, core: Arc<Core>) -> JoinHandle<()> {
    let run = run.clone();
    task::background("isolation check", async move {
        // The first look shows where init is, before anything could have moved it.
        sleep(LONG_RUNNING).await;
        loop {
            let look = check.clone();
            if let Ok(Ok(drifts)) = spawn_blocking(move || look.run()).await {
                for drift in drifts.iter().take(MAX_DRIFTS) {
                    escape::respond(&run, &core.options.escape, Indicator::of_drift(drift)).await;
                }
            }
            sleep(ISOLATION_INTERVAL).await;
        }
    })
}

/// Looks for signs of an escape while a command runs.
struct SignWatches {
    violations: Option<JoinHandle<()>>,
    isolation: Option<JoinHandle<()>>,
}

impl SignWatches {
    fn start(run: &Arc<ActiveRun>, running: &mut dyn Running, core: &Arc<Core>) -> Self {
        Self {
            violations: running.violations().map(|reports| collect(run, reports, core.clone())),
            isolation: running
                .isolation_check()
                .map(|check| watch_isolation(run, check, core.clone())),
        }
    }

    /// Checks no more where the processes are: they have ended.
    fn stop_checks(&self) {
        self.isolation.iter().for_each(JoinHandle::abort);
    }

    /// Waits for the last reports of a sandbox that is gone.
    async fn collected(self) {
        let Some(mut collecting) = self.violations else { return };
        if timeout(REPORTS_TIMEOUT, &mut collecting).await.is_err() {
            tracing::error!(
                timeout_seconds = REPORTS_TIMEOUT.as_secs_f64(),
                "violation reports did not end with their sandbox"
            );
            collecting.abort();
        }
    }
}
