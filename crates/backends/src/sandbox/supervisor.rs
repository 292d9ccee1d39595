//! Responds to the system calls that the filter blocks: denies, reports and counts them. Where
//! reads wait for decisions or calls are logged, it does so on a thread of its own.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
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
    operations::{OperationLog, Operations},
    reads::{AskedReads, ReadGate},
    wake::{Wake, Woken},
};
use crate::{Error, sandbox::child::async_fd, seccomp};

/// Violations buffered for the receiver. More are counted but not reported.
const MAX_BUFFERED: usize = 256;

/// The supervisor of one sandbox. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Supervisor {
    worker: Worker,
    /// The reads that wait for decisions, until somebody takes them.
    pub(super) reads: Option<AskedReads>,
    operations: Option<Arc<Mutex<Operations>>>,
    limit: Arc<ViolationLimit>,
    /// The violations as they happen, until somebody takes them.
    pub(super) violations: Option<mpsc::Receiver<Violation>>,
}

/// The task or thread that responds.
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
        security: &Security,
        ids: Ids,
        limit: u32,
    ) -> Result<Self, Error> {
        let (sender, violations) = mpsc::channel(MAX_BUFFERED);
        let exceeded = Arc::new(ViolationLimit::default());
        let listener = Arc::new(listener);
        let log = security.logged.any().then(|| OperationLog::new(security));
        let operations = log.as_ref().map(OperationLog::operations);
        let asks = !security.asked_reads.is_empty();
        let woken = (asks || log.is_some()).then(Woken::new).transpose()?;
        let gate = woken.as_ref().filter(|_| asks);
        let gate = gate.map(|woken| ReadGate::new(listener.clone(), security, ids, woken.wake()));
        let (gate, reads) = gate.unzip();
        let responder = Responder {
            listener,
            woken,
            gate,
            log,
            launch,
            is_launched: false,
            exec_allowed: security.exec,
            executable_memory: ExecutableMemory::for_plan(security),
            executions: Executions::for_plan(security),
            remaining: limit.max(1),
            sender: Some(sender),
            unreported: 0,
            limit: Arc::clone(&exceeded),
        };
        Ok(Self {
            worker: responder.start()?,
            reads,
            operations,
            limit: exceeded,
            violations: Some(violations),
        })
    }

    /// Takes what was logged. `None` if nothing is.
    pub(crate) fn take_operations(&mut self) -> Option<Operations> {
        let operations = self.operations.take()?;
        let mut operations = operations.lock().unwrap_or_else(PoisonError::into_inner);
        Some(std::mem::take(&mut *operations))
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
    /// Wakes the thread. `None` for a task.
    woken: Option<Woken>,
    /// Where reads wait for decisions.
    gate: Option<ReadGate>,
    /// Where calls are logged.
    log: Option<OperationLog>,
    launch: OwnedFd,
    is_launched: bool,
    /// Whether the command may call `execve`.
    exec_allowed: bool,
    /// Where the plan lists executables.
    executable_memory: Option<ExecutableMemory>,
    /// Where the plan lists executables, to report programs that are not listed.
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
    /// Starts responding, until the last process under the filter has ended or the limit is
    /// exceeded.
    fn start(self) -> Result<Worker, Error> {
        match &self.woken {
            Some(woken) => {
                let wake = woken.wake();
                let thread = thread::Builder::new().name("sandbox calls".to_owned());
                thread.spawn(move || self.run_blocking())?;
                Ok(Worker::Thread(wake))
            }
            None => {
                let listener = async_fd(self.listener.clone()).map_err(|(_, error)| error)?;
                Ok(Worker::Task(
                    task::background("sandbox supervisor", self.run(listener)).abort_handle(),
                ))
            }
        }
    }

    async fn run(mut self, listener: AsyncFd<Arc<OwnedFd>>) {
        while self.remaining > 0 && self.handle_next(next(&listener).await) {}
        if self.finish() {
            // If the listener were closed, the kernel would let the pending call return. Keep it
            // open until the supervisor is dropped.
            let _open = (listener, self);
            std::future::pending().await
        }
    }

    /// As [`Responder::run`], on a thread.
    fn run_blocking(mut self) {
        listener::wake_on_same_processor(&self.listener);
        while self.remaining > 0 {
            let next = self.next_blocking().map_err(io::Error::from);
            if !self.handle_next(next) {
                break;
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

    /// The next blocked call. Applies decisions meanwhile. `None` when no process is left that
    /// could make one, or when the supervisor is dropped.
    fn next_blocking(&mut self) -> Result<Option<Notification>, Errno> {
        loop {
            let Some(woken) = &mut self.woken else { return Ok(None) };
            let [called, was_woken] = fd::wait_readable(&self.listener, woken.as_fd(), None)?;
            if woken.is_stopped() || called == fd::Readiness::Closed {
                return Ok(None);
            }
            if was_woken != fd::Readiness::Pending {
                woken.clear();
                self.gate.as_mut().map_or(Ok(()), ReadGate::apply_decisions)?;
            }
            if called == fd::Readiness::Readable
                && let Some(call) = receive(&self.listener)?
            {
                return Ok(Some(call));
            }
        }
    }

    fn wait_until_stopped(&mut self) {
        let Some(woken) = &mut self.woken else { return };
        while !woken.is_stopped() && fd::wait_readable(woken.as_fd(), woken.as_fd(), None).is_ok() {
            woken.clear();
        }
    }

    /// Handles a call. Returns whether another one can come.
    fn handle_next(&mut self, next: io::Result<Option<Notification>>) -> bool {
        match next {
            Ok(Some(call)) => {
                if let Err(errno) = self.handle(call) {
                    tracing::warn!(%errno, "no response to blocked system call sent");
                }
                true
            }
            Ok(None) => false,
            Err(error) => {
                // Fails closed: a call without a response does not pass.
                tracing::error!(%error, "blocked system calls can no longer be received");
                false
            }
        }
    }

    fn handle(&mut self, call: Notification) -> Result<(), Errno> {
        let is_logged = self.log_call(call);
        if let Some(gate) = self.gate.as_mut().filter(|gate| gate.handles(call)) {
            return gate.handle(call);
        }
        if is_logged {
            return listener::respond(&self.listener, call, Response::Continue);
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

    /// Logs a call that the plan allows and logs. Returns whether it is such a call, which
    /// continues even if it could not be logged.
    fn log_call(&mut self, call: Notification) -> bool {
        let Some(log) = self.log.as_mut().filter(|log| log.observes(call)) else { return false };
        // Until then it is a call of `codelia-init`.
        self.is_launched = self.is_launched || fd::is_eof(&self.launch).unwrap_or(true);
        if self.is_launched
            && let Err(errno) = log.add(&self.listener, call)
        {
            tracing::warn!(%errno, "system call not logged");
        }
        true
    }

    /// Lets the kernel decide about a program, which denies those that are not listed, and reports
    /// these.
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
        let permits = |memory: &ExecutableMemory| {
            name.is_some_and(|name| memory.permits(name, call.pid, &call.args))
        };
        self.executable_memory.as_ref().is_some_and(permits)
    }

    fn report(&mut self, call: Notification, kind: &str, syscall: String, path: Option<String>) {
        let Notification { nr, args, .. } = call;
        let violation = Violation { kind: kind.to_owned(), syscall, nr, args, path };
        let path = violation.path.as_deref();
        let args = violation.display_args();
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

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixStream, path::Path, thread::JoinHandle};

    use codelia_policy::{LoggedCalls, SyscallRules, syscalls};
    use codelia_sys::{capability, process};

    use super::*;
    use crate::ReadDecision;

    fn security(asked: &Path) -> Security {
        Security {
            syscalls: SyscallRules::Allow(syscalls::allowed(false)),
            violation_limit: Some(50),
            fork: true,
            exec: true,
            executables: None,
            debug: false,
            asked_reads: vec![asked.to_owned()],
            logged: LoggedCalls { signals: true, files: true },
        }
    }

    type Results = [io::Result<Vec<u8>>; 2];

    /// A thread under the filter that reads a file twice, and its supervisor.
    fn start(file: &Path) -> (Supervisor, JoinHandle<Results>) {
        let security = security(file);
        let filter = seccomp::filter(&security, false).unwrap();
        let (listener, received) = std::sync::mpsc::sync_channel(1);
        let (begin, begun) = std::sync::mpsc::sync_channel::<()>(1);
        let file = file.to_owned();
        let reader = thread::spawn(move || {
            capability::set_no_new_privs().unwrap();
            listener.send(listener::install(&filter, true).unwrap().unwrap()).unwrap();
            begun.recv().unwrap();
            [fs::read(&file), fs::read(&file)]
        });
        let (launch, _) = UnixStream::pair().unwrap();
        let ids = Ids { uid: process::own_uid(), gid: process::own_gid() };
        let supervisor =
            Supervisor::start(received.recv().unwrap(), launch.into(), &security, ids, 50).unwrap();
        begin.send(()).unwrap();
        (supervisor, reader)
    }

    #[tokio::test]
    async fn call_without_a_listener_fails() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "content").unwrap();
        // The control: while it listens, an allowed read succeeds.
        for is_dropped in [false, true] {
            let (mut supervisor, reader) = start(&file);
            let mut reads = supervisor.reads.take().unwrap();
            let path = reads.next().await.unwrap().path;
            let supervisor = Some(supervisor).filter(|_| !is_dropped);
            if is_dropped {
                assert_eq!(reads.next().await, None);
            }
            reads.decide(ReadDecision { path, is_directory: false, allow: true });
            let results = tokio::task::spawn_blocking(|| reader.join().unwrap()).await.unwrap();
            for result in results {
                let expected = if is_dropped { Err(Some(38)) } else { Ok(b"content".to_vec()) };
                assert_eq!(result.map_err(|error| error.raw_os_error()), expected, "ENOSYS");
            }
            drop(supervisor);
        }
    }
}
