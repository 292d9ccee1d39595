//! A run that is being executed: its state, input and output.

use std::{
    sync::{Arc, OnceLock, atomic::AtomicBool},
    time::Duration,
};

use bytes::Bytes;
use codelia_backends::SandboxRemote;
use codelia_store::AssignedRun;
use codelia_types::{CommittedRun, LeaseToken, RunId, TerminalSize};
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    io::{output::OutputLog, pacing::OutputPacing},
    live_usage::Meter,
    signs::{escape::EscapeLog, violations::ViolationLog},
    watch::near_limits::NearLimitLog,
};
use crate::egress::Subject;

/// How long a run that ends with its caller waits for the caller to attach.
const OWNER_TIMEOUT: Duration = Duration::from_secs(10);
/// Messages of a caller that wait for the command.
const INPUT_CAPACITY: usize = 16;

/// How far a run has come.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// The worker has it.
    Assigned,
    /// The command was started.
    Started(Started),
    /// The result is in the store.
    Committed(Arc<CommittedRun>),
    /// This worker has no result; the store decides what becomes of the run.
    Dropped,
}

/// How a command was started.
#[derive(Debug, Clone)]
pub(crate) struct Started {
    pub(crate) setup_time: Duration,
    /// Whether its sandbox was ready before the run came.
    pub(crate) prepared: bool,
    /// Fields of limits that are not enforced, and of those that are only watched.
    pub(crate) unenforced: Vec<String>,
    pub(crate) watched: Vec<String>,
}

/// Requests of a caller to a command, other than input.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Control {
    Signal(i32),
    Resize(TerminalSize),
}

/// The receiving ends of a run's input.
#[derive(Debug)]
pub(crate) struct InputReceivers {
    pub(crate) stdin: mpsc::Receiver<Bytes>,
    pub(crate) control: mpsc::Receiver<Control>,
}

/// A run that is being executed.
#[derive(Debug)]
pub(crate) struct ActiveRun {
    pub(crate) assigned: AssignedRun,
    /// The session lease that the run is assigned under.
    pub(crate) lease: LeaseToken,
    /// Cancelled when the worker loses its lease.
    pub(crate) fence: CancellationToken,
    /// Cancelled when the run is to be canceled.
    pub(crate) cancel: CancellationToken,
    /// Cancelled when a worker that shuts down cannot wait longer for the run.
    pub(crate) drain_deadline: CancellationToken,
    /// From SIGTERM to SIGKILL; `None` takes the worker's setting.
    pub(crate) cancel_grace: watch::Sender<Option<Duration>>,
    pub(crate) phase: watch::Sender<Phase>,
    pub(crate) output: Arc<OutputLog>,
    pub(crate) violations: ViolationLog,
    pub(crate) escape: EscapeLog,
    pub(crate) near_limits: NearLimitLog,
    pub(crate) control: mpsc::Sender<Control>,
    /// Set when the command was started.
    pub(crate) sandbox: OnceLock<Arc<dyn SandboxRemote>>,
    /// Set when the command was started.
    pub(crate) meter: OnceLock<Meter>,
    /// Set before the command is launched.
    pub(crate) launched: AtomicBool,
    stdin: Mutex<Option<mpsc::Sender<Bytes>>>,
    owner: Mutex<Owner>,
    pub(crate) owner_deadline: Instant,
}

/// The callers that a run ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The run does not depend on a caller.
    None,
    /// The caller has not attached yet.
    Awaited,
    /// This many streams of the caller are attached.
    Attached(usize),
}

impl ActiveRun {
    pub(crate) fn new(
        assigned: AssignedRun,
        lease: LeaseToken,
        fence: &CancellationToken,
    ) -> (Arc<Self>, InputReceivers) {
        let (stdin, stdin_receiver) = mpsc::channel(INPUT_CAPACITY);
        let (control, control_receiver) = mpsc::channel(INPUT_CAPACITY);
        let spec = &assigned.spec;
        let run = Self {
            lease,
            fence: fence.child_token(),
            cancel: CancellationToken::new(),
            drain_deadline: CancellationToken::new(),
            cancel_grace: watch::Sender::new(None),
            phase: watch::Sender::new(Phase::Assigned),
            output: Arc::new(OutputLog::new(spec.limits.output_bytes)),
            violations: ViolationLog::default(),
            escape: EscapeLog::default(),
            near_limits: NearLimitLog::new(OutputPacing::from_policy(&spec.policy).is_immediate()),
            control,
            sandbox: OnceLock::new(),
            meter: OnceLock::new(),
            launched: AtomicBool::new(false),
            stdin: Mutex::new(spec.command.stdin.then_some(stdin)),
            owner: Mutex::new(if spec.ends_with_caller { Owner::Awaited } else { Owner::None }),
            owner_deadline: Instant::now() + OWNER_TIMEOUT,
            assigned,
        };
        if run.assigned.cancel_requested {
            run.cancel_within(run.assigned.cancel_grace);
        }
        (Arc::new(run), InputReceivers { stdin: stdin_receiver, control: control_receiver })
    }

    pub(crate) fn id(&self) -> RunId {
        self.assigned.id
    }

    /// The names that its approvals and connections belong to.
    pub(crate) fn subject(&self) -> Subject {
        let AssignedRun { id, session, tenant, .. } = &self.assigned;
        Subject { run: *id, session: *session, tenant: tenant.clone() }
    }

    /// Cancels the run. A repeated request can only shorten the grace.
    pub(crate) fn cancel_within(&self, grace: Option<Duration>) {
        let is_first = !self.cancel.is_cancelled();
        self.cancel_grace.send_if_modified(|current| {
            let is_shorter =
                grace.is_some_and(|grace| current.is_none_or(|current| grace < current));
            if is_first || is_shorter {
                *current = grace;
            }
            is_first || is_shorter
        });
        self.cancel.cancel();
    }

    /// Waits until the command has started, or the run is over, for no longer than this.
    pub(crate) async fn started_within(&self, time: Duration) {
        let mut phase = self.phase.subscribe();
        // Either way the caller sees the phase.
        let _ = timeout(time, phase.wait_for(|phase| !matches!(phase, Phase::Assigned))).await;
    }

    /// The sender of its standard input, while that is open.
    pub(crate) fn stdin(&self) -> Option<mpsc::Sender<Bytes>> {
        self.stdin.lock().clone()
    }

    pub(crate) fn close_stdin(&self) {
        drop(self.stdin.lock().take());
    }

    /// A caller that the run ends with attached.
    pub(crate) fn owner_attached(&self) {
        let mut owner = self.owner();
        *owner = match *owner {
            Owner::None => Owner::None,
            Owner::Awaited => Owner::Attached(1),
            Owner::Attached(n) => Owner::Attached(n + 1),
        };
    }

    /// A caller that the run ends with left; the last one cancels the run.
    pub(crate) fn owner_left(&self) {
        let mut owner = self.owner();
        if let Owner::Attached(n) = *owner {
            *owner = Owner::Attached(n.saturating_sub(1));
            if n <= 1 {
                self.cancel.cancel();
            }
        }
    }

    /// The run no longer ends with its caller.
    pub(crate) fn detach(&self) {
        *self.owner() = Owner::None;
    }

    /// Whether the caller that the run ends with has not attached yet.
    pub(crate) fn awaits_owner(&self) -> bool {
        *self.owner() == Owner::Awaited
    }

    fn owner(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use codelia_policy::{Limits, LimitsRequest, RunSpec};
    use codelia_types::{CommandSpec, Incarnation, LeaseEpoch, Mode, SessionId};

    use super::*;

    pub(crate) fn assigned(ends_with_caller: bool) -> AssignedRun {
        let spec = RunSpec {
            command: CommandSpec { stdin: true, ..CommandSpec::new(["true"]) },
            mode: Mode::Logical,
            network: None,
            limits: Limits::default(),
            requested_limits: LimitsRequest::default(),
            policy: codelia_policy::Policy::default(),
            ends_with_caller,
            tool: None,
            transaction: None,
        };
        AssignedRun {
            id: RunId::generate(),
            session: SessionId::generate(),
            tenant: "team".parse().unwrap(),
            spec,
            epoch: LeaseEpoch(1),
            attempt: 1,
            turn: 0,
            cancel_requested: false,
            cancel_grace: None,
            secret_env: None,
            traceparent: None,
        }
    }

    pub(crate) fn active(ends_with_caller: bool, incarnation: Incarnation) -> Arc<ActiveRun> {
        activate(assigned(ends_with_caller), incarnation)
    }

    pub(crate) fn activate(assigned: AssignedRun, incarnation: Incarnation) -> Arc<ActiveRun> {
        let lease = LeaseToken { worker: "w".parse().unwrap(), incarnation, epoch: assigned.epoch };
        ActiveRun::new(assigned, lease, &CancellationToken::new()).0
    }

    #[tokio::test]
    async fn run_ends_with_last_owner_unless_detached() {
        let incarnation = Incarnation::generate();
        let run = active(true, incarnation);
        assert!(run.awaits_owner());
        run.owner_attached();
        run.owner_attached();
        run.owner_left();
        assert!(!run.cancel.is_cancelled());
        run.owner_left();
        assert!(run.cancel.is_cancelled());

        let run = active(true, incarnation);
        run.owner_attached();
        run.detach();
        run.owner_left();
        assert!(!run.cancel.is_cancelled() && !run.awaits_owner());
    }

    #[tokio::test]
    async fn ordinary_run_outlives_its_callers() {
        let run = active(false, Incarnation::generate());
        run.owner_attached();
        run.owner_left();
        assert!(!run.cancel.is_cancelled());
    }
}
