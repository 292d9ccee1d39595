//! Responds to the system calls that the filter blocks: denies, reports and counts them. Where reads
//! wait for decisions, it does so on a thread of its own.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use codelia_policy::{Ids, Security};
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

use super::{
    executable_memory::ExecutableMemory,
    executions::Executions,
    reads::{AskedReads, ReadGate, Wake},
};
use crate::{Error, sandbox::child::async_fd, seccomp};

/// Violations buffered for the receiver. More are counted but not reported.
const MAX_BUFFERED: usize = 256;

/// The supervisor of one sandbox. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Supervisor {
    worker: Worker,
    reads: Option<AskedReads>,
    limit: Arc<ViolationLimit>,
    violations: Option<mpsc::Receiver<Violation>>,
}

/// What responds.
#[derive(Debug)]
enum Worker {
    Task(AbortHandle),
    Thread(Wake),
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
        (security, ids): (&Security, Ids),
        limit: u32,
    ) -> Result<Self, Error> {
        let (sender, violations) = mpsc::channel(MAX_BUFFERED);
        let exceeded = Arc::new(ViolationLimit::default());
        let listener = Arc::new(listener);
        let asks = !security.asked_reads.is_empty();
        let gate = asks.then(|| ReadGate::new(listener.clone(), security, ids)).transpose()?;
        let (gate, reads) = gate.unzip();
        let responder = Responder {
            listener,
            gate,
            launch,
            exec_allowed: security.exec,
            executable_memory: ExecutableMemory::of(security),
            executions: Executions::of(security),
            remaining: limit.max(1),
            sender: Some(sender),
            unreported: 0,
            limit: Arc::clone(&exceeded),
        };
        Ok(Self { worker: responder.start()?, reads, limit: exceeded, violations: Some(violations) })
    }

    /// The reads that wait for decisions. `None` if none do, and on the second call.
    pub(crate) fn take_reads(&mut self) -> Option<AskedReads> {
        self.reads.take()
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
        match &self.worker {
            Worker::Task(task) => task.abort(),
            Worker::Thread(wake) => wake.stop(),
        }
    }
}

/// The task or thread behind a [`Supervisor`].
struct Responder {
    listener: Arc<OwnedFd>,
    /// Where reads wait for decisions.
    gate: Option<ReadGate>,
    launch: OwnedFd,
    /// Whether the command may call `execve`.
    exec_allowed: bool,
    /// Where the plan lists executables.
    executable_memory: Option<ExecutableMemory>,
    /// The same, to report programs that are not listed.
    executions: Option<Executions>,
    /// Violations until the limit is exceeded.
    remaining: u32,
    /// `None` at the end.
    sender: Option<mpsc::Sender<Violation>>,
    /// Violations that did not fit into the buffer.
    unreported: u64,
    limit: Arc<ViolationLimit>,
}

impl Responder {
    /// Starts responding, until the last process under the filter has ended or the limit is exceeded.
    fn start(self) -> Result<Worker, Error> {
        match &self.gate {
            Some(gate) => {
                let wake = gate.wake();
                let thread = thread::Builder::new().name("sandbox reads".to_owned());
                thread.spawn(move || self.run_blocking())?;
                Ok(Worker::Thread(wake))
            }
            None => {
                let listener = async_fd(self.listener.clone()).map_err(|(_, error)| error)?;
                Ok(Worker::Task(task::background("sandbox supervisor", self.run(listener)).abort_handle()))
            }
        }
    }

    async fn run(mut self, listener: AsyncFd<Arc<OwnedFd>>) {
        while self.remaining > 0 {
            match next(&listener).await {
                Ok(Some(call)) => self.handle_logged(call),
                Ok(None) => break,
                Err(error) => {
                    log_end(&error);
                    break;
                }
            }
        }
        if self.finish() {
            // If the listener were closed, the kernel would let the pending call return. Keep it
            // open until the supervisor is dropped.
            let _open = (listener, self);
            std::future::pending().await
        }
    }

    /// The same on a thread.
    fn run_blocking(mut self) {
        listener::wake_on_same_processor(&self.listener);
        while self.remaining > 0 {
            match self.next_blocking() {
                Ok(Some(call)) => self.handle_logged(call),
                Ok(None) => break,
                Err(errno) => {
                    log_end(&errno.into());
                    break;
                }
            }
        }
        if self.finish() {
            self.wait_until_stopped();
        }
    }

    /// Logs what was not reported. Returns whether the limit of violations is exceeded.
    fn finish(&mut self) -> bool {
        if self.unreported > 0 {
            tracing::warn!(count = self.unreported, "violations dropped, buffer full");
        }
        // No more violations follow, so let the receiver end.
        self.sender = None;
        let is_exceeded = self.remaining == 0;
        if is_exceeded {
            self.limit.is_exceeded.store(true, Ordering::Release);
            self.limit.exceeded.notify_one();
        }
        is_exceeded
    }

    /// The next blocked call. Applies decisions meanwhile. `None` when no process is left that could
    /// make one, or when the supervisor is dropped.
    fn next_blocking(&mut self) -> Result<Option<Notification>, Errno> {
        loop {
            let Some(gate) = &mut self.gate else { return Ok(None) };
            let [called, woken] = match fd::wait_readable(&self.listener, gate.woken()) {
                Err(Errno::INTR) => continue,
                ready => ready?,
            };
            if gate.is_stopped() || called == fd::Readiness::Closed {
                return Ok(None);
            }
            if woken != fd::Readiness::Pending {
                gate.apply_decisions()?;
            }
            if called == fd::Readiness::Readable
                && let Some(call) = receive(&self.listener)?
            {
                return Ok(Some(call));
            }
        }
    }

    fn wait_until_stopped(&mut self) {
        let Some(gate) = &mut self.gate else { return };
        while !gate.is_stopped() {
            if fd::wait_readable(gate.woken(), gate.woken()).is_err() || gate.apply_decisions().is_err() {
                return;
            }
        }
    }

    fn handle_logged(&mut self, call: Notification) {
        if let Err(errno) = self.handle(call) {
            tracing::warn!(%errno, "no response to blocked system call sent");
        }
    }

    fn handle(&mut self, call: Notification) -> Result<(), Errno> {
        if let Some(gate) = self.gate.as_mut().filter(|gate| gate.handles(call)) {
            return gate.handle(call);
        }
        let name = seccomp::name(call.nr);
        if let (Some(executions), Some(name)) = (&mut self.executions, &name)
            && executions.handles(name)
        {
            return self.observe_exec(call, name.clone());
        }
        if self.is_launch(name.as_deref())? || self.is_permitted_mapping(name.as_deref(), &call) {
            return listener::respond(&self.listener, call, Response::Continue);
        }
        // Unknown calls fail as on a kernel that does not have them.
        let errno = if name.is_some() { Errno::PERM } else { Errno::NOSYS };
        let syscall = name.unwrap_or_else(|| format!("#{}", call.nr));
        self.report(call, Violation::SYSCALL_BLOCKED, syscall, None);
        self.remaining -= 1;
        if self.remaining == 0 {
            Ok(())
        } else {
            listener::respond(&self.listener, call, Response::Fail(errno))
        }
    }

    /// Lets the kernel decide about a program, which denies those that are not listed, and reports these.
    fn observe_exec(&mut self, call: Notification, syscall: String) -> Result<(), Errno> {
        let is_launched = fd::is_eof(&self.launch)?;
        let denied = self.executions.as_mut().filter(|_| is_launched);
        let denied = denied.and_then(|executions| executions.denied(&self.listener, call));
        if let Some(path) = denied {
            self.report(call, Violation::EXEC_DENIED, syscall, Some(path));
        }
        listener::respond(&self.listener, call, Response::Continue)
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

    fn report(&mut self, call: Notification, kind: &str, syscall: String, path: Option<String>) {
        let Notification { nr, args, .. } = call;
        let violation = Violation { kind: kind.to_owned(), syscall, nr, args, path };
        let (path, args) = (violation.path.as_deref(), violation.display_args());
        tracing::info!(syscall = violation.syscall, nr, args, path, "system call blocked");
        if self.sender.as_ref().is_none_or(|sender| sender.try_send(violation).is_err()) {
            self.unreported += 1;
        }
    }
}

/// The next blocked call. `None` when no process is left that could make one.
async fn next(listener: &AsyncFd<Arc<OwnedFd>>) -> io::Result<Option<Notification>> {
    loop {
        let mut guard = listener.readable().await?;
        match fd::poll_readable(listener.get_ref())? {
            fd::Readiness::Readable => {}
            fd::Readiness::Pending => {
                guard.clear_ready();
                continue;
            }
            fd::Readiness::Closed => return Ok(None),
        }
        if let Some(call) = receive(listener.get_ref())? {
            return Ok(Some(call));
        }
    }
}

/// Receives a call. `None` if the calling process was killed in the meantime.
fn receive(listener: &Arc<OwnedFd>) -> Result<Option<Notification>, Errno> {
    match listener::receive(listener) {
        Ok(call) => Ok(Some(call)),
        Err(Errno::NOENT | Errno::INTR) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Fails closed: a call without a response does not pass.
fn log_end(error: &io::Error) {
    tracing::error!(%error, "blocked system calls can no longer be received");
}
