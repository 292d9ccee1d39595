//! Stays with a started command until its sandbox is gone.

use std::{pin::pin, sync::Arc, time::Duration};

use codelia_backends::{IsolationCheck, Running};
use codelia_policy::{EscapeOptions, VOLUME_BYTES};
use codelia_telemetry::{Step, metrics, task, trace};
use codelia_types::{LostReason, NearLimit, Outcome, Usage, Violation};
use tokio::{
    sync::mpsc,
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use crate::{
    disk::WatchedRun,
    lease::worker_lease::LeaseHandle,
    run::{
        active::{ActiveRun, Control, InputReceivers, Phase},
        commit::Report,
        directory_limits,
        escape::{self, EscapeLog, Indicator},
        execute::{Executor, StartedCommand},
        live_usage::Meter,
        operations,
        output_pacing::OutputPacing,
        retry::LeaseLost,
        size_watch::SizeWatch,
        stdio::Terminal,
        streams::Streams,
        volumes,
    },
};

const SIGTERM: i32 = 15;
/// The resource of a run that exceeded the limit of a directory.
const DISK_BYTES: &str = "disk_bytes";
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
    /// It exceeded a limit: it is killed at once, since it may write until it is gone.
    Exceeded(Outcome),
    /// It tried to leave its sandbox: it is killed at once.
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
    ) -> Result<Report, LeaseLost> {
        let StartedCommand { mut running, stdio, started, network, reads, disk, volumes } = command;
        let started_at = Instant::now();
        run.sandbox.get_or_init(|| running.remote());
        run.meter.get_or_init(|| Meter { started_at, reader: running.usage_reader() });
        disk.started(running.usage_reader());
        run.phase.send_replace(Phase::Started(started.clone()));
        let stdin = stdio.stdin.map(|writer| (writer, inputs.stdin));
        let streams = Streams::start(&self.store, run, stdio.outputs, stdin);
        let violations = running.violations().map(|reports| collect(run, reports, self.escape));
        let isolation = running.isolation_check().map(|check| watch_isolation(run, check, self.escape));

        let workspace = self.root.session(run.assigned.session);
        let directories = directory_limits::watch(workspace, &run.assigned.spec.policy);
        let volume_watch = volumes::watch(&volumes);
        let volume_full = volume_watch.exceeded.clone();
        let mut reports =
            Reports { control: inputs.control, near_limits: running.near_limits(), directories, volume_full };
        let waiting = wait(run, running.as_mut(), &self.lease, &mut reports, stdio.terminal.as_ref());
        let waiting = until_full(waiting, &disk);
        let end = then_after(SPARE_DELAY, waiting, || self.spares.refill(run.assigned.session)).await;
        let ended = self.stop(run, running.as_mut(), end).await;
        isolation.inspect(JoinHandle::abort);
        drop(volume_watch);
        reports.pass_last_near_limits(run);
        metrics().step(Step::Execute, started_at.elapsed());
        let ended_at = Instant::now();
        streams.finish(&run.output).await;
        // Before the sandbox is destroyed: its sockets keep its network namespace.
        let network = match (network, &ended) {
            (Some(network), Ok(_)) => Some(network.close().await),
            // A worker without the lease stores nothing.
            (Some(_), Err(LeaseLost)) | (None, _) => None,
        };
        let operations = running.take_operations();
        let receipt = running.destroy().await;
        // Its calls have ended; what nobody decided about is withdrawn in the background.
        if let Some(reads) = reads {
            reads.detach();
        }
        self.receipts.record(receipt);
        drop(disk);
        if let Some(violations) = violations {
            all_collected(violations).await;
        }
        trace::step("clean up", ended_at.elapsed());
        let (outcome, mut usage) = ended?;
        let outcome = self.measure_volumes(&volumes, outcome).await;
        let deadline = started_at + run.assigned.spec.timeout();
        let followed = run.fence.run_until_cancelled(timeout_at(deadline, run.output.followed()));
        // A canceled run, one without a lease, or one whose worker shuts down waits for no one.
        let followed = run.drain_deadline.run_until_cancelled(followed);
        let _ = run.cancel.run_until_cancelled(followed).await;
        let pacing = OutputPacing::of(&run.assigned.spec.policy);
        (usage.cpu_time, usage.wall_time) =
            (pacing.round_up(usage.cpu_time), pacing.round_up(usage.wall_time));
        let network = network.unwrap_or_default().with_direct_attempts(usage.network);
        usage.network = network.usage;
        run.escape.network(&self.escape, run.assigned.spec.network, usage.network.as_ref());
        if let Some(canaries) = self.backends.canaries() {
            canaries.respond(&self.runs, &self.escape).await;
        }
        let outcome = run.escape.outcome(outcome);
        let logged = operations.map(|it| operations::events(&it, started_at, &pacing, self.escape.webhook));
        let report = Report::of_started(outcome, usage, receipt, started_at, started);
        Ok(report.with_events(network.events).with_logged(logged.unwrap_or_default()))
    }

    /// Ends the command if it has not ended: asks it first, then kills it. Without a lease it is
    /// killed immediately.
    async fn stop(
        &self,
        run: &ActiveRun,
        running: &mut dyn Running,
        end: End,
    ) -> Result<(Outcome, Usage), LeaseLost> {
        let asks = matches!(end, End::Forced(_));
        let outcome = match end {
            End::Own(outcome, usage) => return Ok((outcome, usage)),
            End::Forced(outcome) | End::Exceeded(outcome) => Some(outcome),
            End::Escape => Some(EscapeLog::violation()),
            End::Fenced => None,
        };
        if asks && !run.escape.terminate.is_cancelled() {
            running.signal(SIGTERM).await;
            let ended = end_within_grace(run, running, self.kill_grace);
            if let Some(Some(usage)) = run.fence.run_until_cancelled(ended).await {
                return outcome.map(|outcome| (outcome, usage)).ok_or(LeaseLost);
            }
        }
        running.kill_tree().await;
        let (_, usage) = running.wait().await;
        outcome.map(|outcome| (outcome, usage)).ok_or(LeaseLost)
    }
}

/// Waits until the command has ended, or `None` when its grace is over. A later request may shorten
/// the grace.
async fn end_within_grace(run: &ActiveRun, running: &mut dyn Running, default: Duration) -> Option<Usage> {
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

/// What arrives while a command runs.
struct Reports {
    control: mpsc::Receiver<Control>,
    near_limits: Option<mpsc::Receiver<NearLimit>>,
    /// Of the limits of single directories.
    directories: SizeWatch,
    /// Canceled when a volume of the command is too large.
    volume_full: CancellationToken,
}

impl Reports {
    /// The next limit that the command is near to. Never ends after the last.
    async fn near_limit(near_limits: &mut Option<mpsc::Receiver<NearLimit>>) -> NearLimit {
        match near_limits {
            Some(receiver) => match receiver.recv().await {
                Some(near) => near,
                None => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }

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
        let control = tokio::select! {
            biased;
            () = run.fence.cancelled() => return End::Fenced,
            (outcome, usage) = running.wait() => return End::Own(outcome, usage),
            () = run.escape.terminate.cancelled() => return End::Escape,
            () = run.cancel.cancelled() => return End::Forced(Outcome::Canceled),
            () = run.drain_deadline.cancelled() => return End::Forced(Outcome::Lost(LostReason::DrainDeadline)),
            () = reports.directories.exceeded.cancelled() => {
                return End::Exceeded(Outcome::Limit(DISK_BYTES.to_owned()));
            }
            () = sleep_until(deadline) => return End::Forced(Outcome::TimedOut),
            () = reports.volume_full.cancelled() => return End::Exceeded(Outcome::Limit(VOLUME_BYTES.to_owned())),
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
            near = Reports::near_limit(&mut reports.near_limits) => {
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
            (Control::Resize(_), None) => tracing::debug!("resize ignored: the run has no terminal"),
        }
    }
}

/// Awaits `waiting`, or the moment when the session's files exceed a limit.
async fn until_full(waiting: impl Future<Output = End>, disk: &WatchedRun) -> End {
    tokio::select! {
        biased;
        end = waiting => end,
        limit = disk.exceeded() => {
            tracing::info!(%limit, "session exceeds its disk limit, killing the command");
            End::Exceeded(Outcome::Limit(limit.resource().to_owned()))
        }
    }
}

/// Awaits `waiting`, and calls `then` when it is done or after `delay`, whichever is first.
async fn then_after<T>(delay: Duration, waiting: impl Future<Output = T>, then: impl FnOnce()) -> T {
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
    escape: EscapeOptions,
) -> JoinHandle<()> {
    let run = run.clone();
    task::background("violations", async move {
        while let Some(violation) = reports.recv().await {
            escape::respond(&run, &escape, Indicator::of_call(&violation)).await;
            run.violations.add(violation);
        }
    })
}

/// Checks from time to time that the processes of a command stay in their sandbox.
fn watch_isolation(run: &Arc<ActiveRun>, check: IsolationCheck, options: EscapeOptions) -> JoinHandle<()> {
    let run = run.clone();
    task::background("isolation check", async move {
        // The first look shows where init is, before anything could have moved it.
        sleep(LONG_RUNNING).await;
        loop {
            let look = check.clone();
            if let Ok(Ok(drifts)) = spawn_blocking(move || look.run()).await {
                for drift in drifts.iter().take(MAX_DRIFTS) {
                    escape::respond(&run, &options, Indicator::of_drift(drift)).await;
                }
            }
            sleep(ISOLATION_INTERVAL).await;
        }
    })
}

/// Waits for the last reports of a sandbox that is gone.
async fn all_collected(mut collecting: JoinHandle<()>) {
    if timeout(REPORTS_TIMEOUT, &mut collecting).await.is_err() {
        tracing::error!(
            timeout_seconds = REPORTS_TIMEOUT.as_secs_f64(),
            "violation reports did not end with their sandbox"
        );
        collecting.abort();
    }
}
