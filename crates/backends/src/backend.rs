//! The traits that every mode implements.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use async_trait::async_trait;
use codelia_policy::{Enforceable, Plan};
use codelia_types::{
    CommandSpec, Mode, NearLimit, Outcome, Receipt, SessionId, TerminalSize, Usage, Violation,
};
use tokio::sync::mpsc;

use crate::{AskedReads, Error, IsolationCheck, Operations, UsageReader};

/// One mode of isolation. To add a mode, implement this trait and run the conformance suite
/// (`tests/conformance`) against it.
///
/// The worker calls, in this order:
///
/// 1. [`probe`](Backend::probe), once at start: may this mode be offered, and what can it enforce?
/// 2. [`upkeep`](Backend::upkeep) at start and then periodically, concurrently with everything else.
/// 3. For each run: [`prepare`](Backend::prepare), then either [`Prepared::launch`],
///    [`Running::wait`] and [`Running::destroy`], or [`Prepared::discard`].
/// 4. [`shutdown`](Backend::shutdown), once, after the last sandbox was destroyed.
///
/// After an error nothing of the sandbox is left: neither `prepare` nor `launch` needs cleanup by
/// the caller. A failing command is not an error but an [`Outcome`].
///
/// # Example
///
/// Run one command in a mode, or report why this host cannot:
///
/// ```no_run
/// use codelia_backends::{Backend, Error, Stdio};
/// use codelia_policy::Plan;
/// use codelia_types::{CommandSpec, Outcome};
///
/// async fn run_once(
///     backend: &dyn Backend,
///     plan: &Plan,
///     argv: &[&str],
///     stdio: Stdio,
/// ) -> Result<Outcome, Error> {
///     let capabilities = backend.probe().await;
///     for gap in &capabilities.gaps {
///         eprintln!("{}: missing {} ({})", capabilities.mode, gap.missing, gap.remedy);
///     }
///
///     // Namespaces, mounts, limits and filters are in place when this returns.
///     let prepared = backend.prepare(plan).await?;
///     // Only hands the command over. Consumes the sandbox; it is gone after an error.
///     let launched = prepared.launch(&CommandSpec::new(argv.iter().copied()), stdio).await?;
///     println!("setup took {:?}", launched.setup_time);
///
///     let mut running = launched.running;
///     let (outcome, usage) = running.wait().await;
///     println!("{outcome:?} after {:?}", usage.wall_time);
///
///     // Every process of the run is dead by now. The receipt counts what could not be removed.
///     let receipt = running.destroy().await;
///     assert!(receipt.is_clean(), "{receipt:?}");
///     Ok(outcome)
/// }
/// ```
#[async_trait]
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// The mode that this backend implements.
    fn mode(&self) -> Mode;

    /// Finds out by trying what this host can enforce. Does not fail: what is missing is part of
    /// the result.
    async fn probe(&self) -> Capabilities;

    /// Removes what the sandboxes of killed workers left on this host and returns how many items it
    /// removed. Idempotent.
    ///
    /// # Errors
    /// The leftovers could not be listed or removed. Call again later.
    async fn upkeep(&self) -> Result<usize, Error>;

    /// Removes what is kept for the next run of a session. Call it when the session is gone or its
    /// lease is; a run of it may come later nevertheless.
    fn forget_session(&self, _: SessionId) {}

    /// Removes what the sandboxes of this process share on the host, such as a parent control
    /// group. Call it when no sandbox is left.
    fn shutdown(&self) {}

    /// Creates a sandbox that enforces the whole plan, with `codelia-init` waiting inside for its
    /// command.
    ///
    /// # Errors
    /// [`Error::Unenforceable`] if this mode or host cannot enforce the plan. After any error
    /// nothing of the sandbox is left.
    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error>;
}

/// A sandbox that waits for its command. End it with `launch` or `discard`; dropping it destroys it
/// in the background.
#[async_trait]
pub trait Prepared: Send + Sync + std::fmt::Debug {
    /// Hands the command over. Returns once its `execve` has succeeded.
    ///
    /// # Errors
    /// [`Error::Refused`] if the command cannot be executed (not found, not executable, invalid
    /// working directory): an outcome for the caller. After any error nothing of the sandbox is
    /// left.
    async fn launch(
        self: Box<Self>,
        command: &CommandSpec,
        stdio: Stdio,
    ) -> Result<Launched, Error>;

    /// Whether the sandbox can still be launched. One that died while waiting can only be
    /// discarded.
    fn is_alive(&self) -> bool {
        true
    }

    /// Takes the sockets that the egress proxy serves. `None` unless the plan's network is `proxy`,
    /// and on the second call.
    fn take_egress(&mut self) -> Option<EgressSockets> {
        None
    }

    /// Takes the reads that wait for decisions. `None` unless the plan has reads that are asked
    /// for, and on the second call. If nobody decides, such reads wait until the command is killed.
    fn take_reads(&mut self) -> Option<AskedReads> {
        None
    }

    /// Destroys the sandbox unused.
    async fn discard(self: Box<Self>) -> Receipt;
}

/// Sockets in a sandbox's network namespace. The only way out of it: the worker hands them to the
/// egress proxy.
#[derive(Debug)]
pub struct EgressSockets {
    /// Listens where `HTTPS_PROXY` points to.
    pub proxy: OwnedFd,
    /// The resolver's UDP socket.
    pub resolver_udp: OwnedFd,
    /// The resolver's TCP listener.
    pub resolver_tcp: OwnedFd,
    /// Stream sockets that are not bound yet. The proxy binds each to the address of a name.
    pub targets: Vec<OwnedFd>,
}

/// A command that was started.
#[derive(Debug)]
pub struct Launched {
    /// The sandbox it runs in.
    pub running: Box<dyn Running>,
    /// Time from the call of [`Prepared::launch`] to the command's `execve`.
    pub setup_time: Duration,
    /// The side of the terminal emulator, for [`Stdio::Terminal`].
    pub terminal: Option<OwnedFd>,
}

/// A sandbox whose command was started. Call `wait`, then `destroy`; dropping it kills the command
/// and destroys the sandbox in the background.
#[async_trait]
pub trait Running: Send + Sync + std::fmt::Debug {
    /// Waits until the command ends. When this returns every process it left behind is dead, so
    /// its pipes are at their end. Cancel-safe; further calls return the same result.
    async fn wait(&mut self) -> (Outcome, Usage);

    /// Sends a signal to the command's process group.
    async fn signal(&self, signal: i32);

    /// Reaches the sandbox from any thread, as long as it exists.
    fn remote(&self) -> Arc<dyn SandboxRemote>;

    /// Lowers the command's CPU weight, so that commands that started later run first when
    /// processors are short. Has no effect on containers: their engine sets the weight.
    fn lower_priority(&self);

    /// The violations of the policy as they happen: a bounded channel that closes when the command
    /// ends. `None` on the second call, and in modes that do not report violations (`logical`).
    fn violations(&mut self) -> Option<mpsc::Receiver<Violation>> {
        None
    }

    /// Takes what was logged of the command. Complete once [`wait`](Running::wait) has returned.
    /// `None` if the plan logs nothing, and on the second call.
    fn take_operations(&mut self) -> Option<Operations> {
        None
    }

    /// The limits that the command gets near to, as [`wait`](Running::wait) sees that: a bounded
    /// channel with each limit at most once. `None` on the second call.
    fn near_limits(&mut self) -> Option<mpsc::Receiver<NearLimit>> {
        None
    }

    /// Reads what the command uses. `None` if nothing counts it: mode `logical` without a control
    /// group.
    fn usage_reader(&self) -> Option<UsageReader> {
        None
    }

    /// Checks that the processes of the command stay in their sandbox. `None` in modes in which
    /// they have no common ancestor on the host (`container`), or no sandbox (`logical`).
    fn isolation_check(&self) -> Option<IsolationCheck> {
        None
    }

    /// Kills every process of the sandbox; `wait` then returns.
    async fn kill_tree(&self);

    /// Removes the sandbox and counts what could not be removed.
    async fn destroy(self: Box<Self>) -> Receipt;
}

/// Reaches a running sandbox from any thread and without the async runtime, so that a lease can be
/// extended and given up while the runtime is busy. Calls never block. They have no effect on a
/// sandbox that is gone.
pub trait SandboxRemote: Send + Sync + std::fmt::Debug {
    /// Lets the command run for at most `time` from now, until the next call. `codelia-init` kills
    /// it then, even if the worker hangs or is stopped. The deadline begins with the
    /// first call.
    fn keep_alive(&self, time: Duration);

    /// Has `codelia-init` kill every process of the sandbox; [`Running::wait`] then returns.
    fn kill(&self);
}

/// The command's standard streams.
#[derive(Debug)]
pub enum Stdio {
    /// One descriptor for each.
    Files {
        /// Standard input.
        stdin: OwnedFd,
        /// Standard output.
        stdout: OwnedFd,
        /// Standard error.
        stderr: OwnedFd,
    },
    /// A controlling terminal of this size, opened in the sandbox's own `/dev/pts` so that the
    /// command finds it by name. [`Launched::terminal`] is its other side.
    Terminal(TerminalSize),
}

/// The controls that this host can enforce in one mode.
#[derive(Debug, Clone)]
pub struct Capabilities {
    /// The mode.
    pub mode: Mode,
    /// Whether the probe could start and destroy a sandbox of this mode, and its limits are
    /// enforced or watched.
    pub usable: bool,
    /// The parts of a plan that can be enforced.
    pub enforceable: Enforceable,
    /// Things that are missing, and how to get them.
    pub gaps: Vec<Gap>,
}

impl Capabilities {
    /// Whether the mode isolates, but only watches limits of runs.
    #[must_use]
    pub fn watches_limits(&self) -> bool {
        self.usable && self.mode != Mode::Logical && !self.enforceable.limits()
    }

    /// The gaps with their remedies, in one line.
    #[must_use]
    pub fn problem(&self) -> String {
        let gaps = self.gaps.iter().map(|gap| format!("{} ({})", gap.missing, gap.remedy));
        gaps.collect::<Vec<_>>().join("; ")
    }
}

/// Something that this host lacks.
#[derive(Debug, Clone)]
pub struct Gap {
    /// The control or tool that is missing.
    pub missing: String,
    /// How to get it.
    pub remedy: String,
}

impl Gap {
    pub(crate) fn new(missing: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { missing: missing.into(), remedy: remedy.into() }
    }
}
