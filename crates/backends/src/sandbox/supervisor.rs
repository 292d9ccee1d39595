//! Answers for the system calls that a filter does not let pass: refuses them, tells of them, counts them.

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

use crate::{Error, sandbox::process::watched, seccomp};

/// The word for a call that was refused.
const SYSCALL_BLOCKED: &str = "SYSCALL_BLOCKED";

/// So many wait to be heard of; more are only counted.
const MOST_UNHEARD: usize = 256;

/// The supervisor of one sandbox. It ends with its value.
#[derive(Debug)]
pub(crate) struct Supervisor {
    task: AbortHandle,
    limit: Arc<Limit>,
    violations: Option<mpsc::Receiver<Violation>>,
}

/// Whether there were too many.
#[derive(Debug, Default)]
struct Limit {
    is_exceeded: AtomicBool,
    exceeded: Notify,
}

impl Supervisor {
    /// Starts to answer. The launch socket says whether the command was executed already: until
    /// then a call is one of `codelia-init`.
    pub(crate) fn start(
        listener: OwnedFd,
        launch: OwnedFd,
        security: &Security,
        limit: u32,
    ) -> Result<Self, Error> {
        let (sender, violations) = mpsc::channel(MOST_UNHEARD);
        let exceeded = Arc::new(Limit::default());
        let watch = Watch {
            listener: watched(listener).map_err(|(_, error)| error)?,
            launch,
            exec: security.exec,
            left: limit.max(1),
            sender,
            unheard: 0,
            limit: Arc::clone(&exceeded),
        };
        let task = task::background("sandbox supervisor", watch.run()).abort_handle();
        Ok(Self { task, limit: exceeded, violations: Some(violations) })
    }

    /// The violations as they happen. Given once.
    pub(crate) fn violations(&mut self) -> Option<mpsc::Receiver<Violation>> {
        self.violations.take()
    }

    /// Waits until there are too many. The call that was too much is never answered.
    pub(crate) async fn exceeded(&self) {
        // Stored by `notify_one` if nobody waits yet; asked for again it must still hold.
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

struct Watch {
    listener: AsyncFd<OwnedFd>,
    launch: OwnedFd,
    /// Whether the command may execute.
    exec: bool,
    /// How many more end the run.
    left: u32,
    sender: mpsc::Sender<Violation>,
    unheard: u64,
    limit: Arc<Limit>,
}

impl Watch {
    /// Until the last process under the filter has ended, or there were too many.
    async fn run(mut self) {
        while self.left > 0 {
            match self.next().await {
                Ok(Some(call)) => {
                    if let Err(errno) = self.handle(call) {
                        tracing::warn!(%errno, "a blocked call was not answered");
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    // What is not answered does not pass.
                    tracing::error!(%error, "blocked calls are not heard of any more");
                    break;
                }
            }
        }
        if self.unheard > 0 {
            tracing::warn!(count = self.unheard, "violations came faster than they were heard");
        }
        if self.left == 0 {
            self.limit.is_exceeded.store(true, Ordering::Release);
            self.limit.exceeded.notify_one();
            // Who listens need not wait for what never comes.
            drop(self.sender);
            // Closed, the listener would have the kernel answer what waits. The supervisor's end ends this.
            let _open = self.listener;
            std::future::pending().await
        }
    }

    /// The next call; `None` when none can come any more.
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
                // Its process was killed meanwhile.
                Err(Errno::NOENT | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn handle(&mut self, call: Notification) -> Result<(), Errno> {
        let name = seccomp::name(call.nr);
        if self.is_launch(name.as_deref())? {
            return listener::respond(self.listener.get_ref(), call, Response::Continue);
        }
        // What is newer than we know is answered as by a kernel that does not know it either.
        let errno = if name.is_some() { Errno::PERM } else { Errno::NOSYS };
        self.tell(call, name.unwrap_or_else(|| format!("#{}", call.nr)));
        self.left -= 1;
        if self.left == 0 {
            Ok(())
        } else {
            listener::respond(self.listener.get_ref(), call, Response::Fail(errno))
        }
    }

    /// Until the command is executed its process is `codelia-init`'s own, with one thread: what it
    /// asked for cannot change between our answer and the kernel's look at it.
    fn is_launch(&self, name: Option<&str>) -> Result<bool, Errno> {
        Ok(!self.exec && name == Some("execve") && !fd::is_eof(&self.launch)?)
    }

    fn tell(&mut self, call: Notification, syscall: String) {
        tracing::info!(syscall, nr = call.nr, args = ?call.args, "a system call was blocked");
        let violation = Violation { kind: SYSCALL_BLOCKED.to_owned(), syscall, nr: call.nr, args: call.args };
        if self.sender.try_send(violation).is_err() {
            self.unheard += 1;
        }
    }
}
