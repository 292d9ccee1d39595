//! Responds to the system calls that the filter blocks: denies, reports and counts them.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use codelia_policy::Security;
use codelia_sys::{
    Errno, fd,
    seccomp::{self as listener, Notification, Response},
};
use codelia_telemetry::task;
use codelia_types::Violation;
use tokio::{
    io::unix::AsyncFd,
    sync::{Notify, mpsc},
    task::AbortHandle,
};

use super::executable_memory::ExecutableMemory;
use crate::{Error, sandbox::child::async_fd, seccomp};

/// The kind of violation that a blocked system call is.
const SYSCALL_BLOCKED: &str = "SYSCALL_BLOCKED";

/// Violations buffered for the receiver. More are counted but not reported.
const MAX_BUFFERED: usize = 256;

/// The supervisor of one sandbox. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Supervisor {
    task: AbortHandle,
    limit: Arc<ViolationLimit>,
    violations: Option<mpsc::Receiver<Violation>>,
}

/// Whether the limit of violations was exceeded.
#[derive(Debug, Default)]
struct ViolationLimit {
    is_exceeded: AtomicBool,
    exceeded: Notify,
}

impl Supervisor {
    /// Starts responding. The end of the launch socket shows that the command was executed: until
    /// then a call comes from `codelia-init`.
    pub(crate) fn start(
        listener: OwnedFd,
        launch: OwnedFd,
        security: &Security,
        limit: u32,
    ) -> Result<Self, Error> {
        let (sender, violations) = mpsc::channel(MAX_BUFFERED);
        let exceeded = Arc::new(ViolationLimit::default());
        let responder = Responder {
            listener: async_fd(listener).map_err(|(_, error)| error)?,
            launch,
            exec_allowed: security.exec,
            executable_memory: ExecutableMemory::of(security),
            remaining: limit.max(1),
            sender,
            unreported: 0,
            limit: Arc::clone(&exceeded),
        };
        let task = task::background("sandbox supervisor", responder.run()).abort_handle();
        Ok(Self { task, limit: exceeded, violations: Some(violations) })
    }

    /// The violations as they happen. `None` on the second call.
    pub(crate) fn violations(&mut self) -> Option<mpsc::Receiver<Violation>> {
        self.violations.take()
    }

    /// Waits until there are too many violations. The last call never gets a response.
    pub(crate) async fn exceeded(&self) {
        // `notify_one` stores a permit if nothing waits yet. The flag keeps later calls true.
        while !self.is_exceeded() {
            self.limit.exceeded.notified().await;
        }
    }

    pub(crate) fn is_exceeded(&self) -> bool {
        self.limit.is_exceeded.load(Ordering::Acquire)
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The task behind a [`Supervisor`].
struct Responder {
    listener: AsyncFd<OwnedFd>,
    launch: OwnedFd,
    /// Whether the command may call `execve`.
    exec_allowed: bool,
    /// Where the plan lists executables.
    executable_memory: Option<ExecutableMemory>,
    /// Violations until the limit is exceeded.
    remaining: u32,
    sender: mpsc::Sender<Violation>,
    /// Violations that did not fit into the buffer.
    unreported: u64,
    limit: Arc<ViolationLimit>,
}

impl Responder {
    /// Runs until the last process under the filter has ended or the limit is exceeded.
    async fn run(mut self) {
        while self.remaining > 0 {
            match self.next().await {
                Ok(Some(call)) => {
                    if let Err(errno) = self.handle(call) {
                        tracing::warn!(%errno, "no response to blocked system call sent");
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    // Fails closed: a call without a response does not pass.
                    tracing::error!(%error, "blocked system calls can no longer be received");
                    break;
                }
            }
        }
        if self.unreported > 0 {
            tracing::warn!(count = self.unreported, "violations dropped, buffer full");
        }
        if self.remaining == 0 {
            self.limit.is_exceeded.store(true, Ordering::Release);
            self.limit.exceeded.notify_one();
            // No more violations follow, so let the receiver end.
            drop(self.sender);
            // If the listener were closed, the kernel would let the pending call return. Keep it
            // open until the supervisor is dropped.
            let _open = self.listener;
            std::future::pending().await
        }
    }

    /// The next blocked call. `None` when no process is left that could make one.
    async fn next(&self) -> io::Result<Option<Notification>> {
        loop {
            let mut guard = self.listener.readable().await?;
            match fd::poll_readable(self.listener.get_ref())? {
                fd::Readiness::Readable => {}
                fd::Readiness::Pending => {
                    guard.clear_ready();
                    continue;
                }
                fd::Readiness::Closed => return Ok(None),
            }
            match listener::receive(self.listener.get_ref()) {
                Ok(call) => return Ok(Some(call)),
                // The calling process was killed in the meantime.
                Err(Errno::NOENT | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn handle(&mut self, call: Notification) -> Result<(), Errno> {
        let name = seccomp::name(call.nr);
        if self.is_launch(name.as_deref())? || self.is_permitted_mapping(name.as_deref(), &call) {
            return listener::respond(self.listener.get_ref(), call, Response::Continue);
        }
        // Unknown calls fail as on a kernel that does not have them.
        let errno = if name.is_some() { Errno::PERM } else { Errno::NOSYS };
        self.report(call, name.unwrap_or_else(|| format!("#{}", call.nr)));
        self.remaining -= 1;
        if self.remaining == 0 {
            Ok(())
        } else {
            listener::respond(self.listener.get_ref(), call, Response::Fail(errno))
        }
    }

    /// Whether this is the `execve` of the launch. Until then the process belongs to `codelia-init`
    /// and has one thread, so the arguments cannot change between our response and the kernel's
    /// reading of them.
    fn is_launch(&self, name: Option<&str>) -> Result<bool, Errno> {
        Ok(!self.exec_allowed && name == Some("execve") && !fd::is_eof(&self.launch)?)
    }

    fn is_permitted_mapping(&self, name: Option<&str>, call: &Notification) -> bool {
        let permits =
            |memory: &ExecutableMemory| name.is_some_and(|name| memory.permits(name, call.pid, &call.args));
        self.executable_memory.as_ref().is_some_and(permits)
    }

    fn report(&mut self, call: Notification, syscall: String) {
        let violation = Violation { kind: SYSCALL_BLOCKED.to_owned(), syscall, nr: call.nr, args: call.args };
        let args = violation.display_args();
        tracing::info!(syscall = violation.syscall, nr = call.nr, args, "system call blocked");
        if self.sender.try_send(violation).is_err() {
            self.unreported += 1;
        }
    }
}
