//! A child process, from its start until it is reaped.

use std::{io, os::fd::AsRawFd};

use codelia_sys::{
    Errno, Pid,
    process::ExitStatus,
    spawn::{Child, Program},
};
use codelia_telemetry::task;
use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime::Handle,
};

/// A child process. Dropping it kills it; it is then reaped in the background.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    /// `None` once the child was reaped.
    child: Option<AsyncFd<Child>>,
    status: Option<ExitStatus>,
}

impl ChildProcess {
    /// Starts a program.
    pub(crate) fn start(program: &Program) -> io::Result<Self> {
        let child = async_fd(program.start()?).map_err(|(child, error)| {
            // A child that cannot be waited for must not keep running.
            match child.kill_and_wait() {
                Ok(()) => error,
                Err(errno) => errno.into(),
            }
        })?;
        Ok(Self { child: Some(child), status: None })
    }

    /// The process id, until it is reaped.
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.child.as_ref().map(|child| child.get_ref().pid())
    }

    /// Kills it, if it has not ended.
    pub(crate) fn kill(&self) -> Result<(), Errno> {
        self.child.as_ref().map_or(Ok(()), |child| child.get_ref().kill())
    }

    /// Waits until it ends and reaps it. Cancel-safe; further calls return the same status.
    pub(crate) async fn wait(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.status {
            return Ok(status);
        }
        let child = self.child.as_ref().ok_or(Errno::CHILD)?;
        let status = reap(child).await;
        self.child = None;
        self.status = status.as_ref().ok().copied();
        status
    }
}

/// Registers a descriptor's owner for readability. Returns the owner with the error on failure.
///
/// The deprecation is about types whose descriptor may change; ours keep theirs.
#[allow(deprecated)]
pub(crate) fn async_fd<T: AsRawFd>(owner: T) -> Result<AsyncFd<T>, (T, io::Error)> {
    AsyncFd::try_with_interest(owner, Interest::READABLE).map_err(|error| error.into_parts())
}

async fn reap(child: &AsyncFd<Child>) -> io::Result<ExitStatus> {
    loop {
        let mut ready = child.readable().await?;
        match child.get_ref().try_wait()? {
            Some(status) => return Ok(status),
            None => ready.clear_ready(),
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let Some(child) = self.child.take() else { return };
        if let Err(errno) = child.get_ref().kill() {
            tracing::warn!(%errno, "child process not killed");
        }
        // Without a runtime this process is exiting; its parent reaps the child.
        if let (Ok(None), Ok(_)) = (child.get_ref().try_wait(), Handle::try_current()) {
            task::background("reap a child process", async move { reap(&child).await.map(drop) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, time::Duration};

    use codelia_sys::{fd, process};

    use super::*;

    fn start(script: &str) -> ChildProcess {
        let null = || fd::dev_null().unwrap();
        let program = Program::new(Path::new("/bin/sh"), ["-c", script], [null(), null(), null()]);
        ChildProcess::start(&program.unwrap()).unwrap()
    }

    #[tokio::test]
    async fn repeated_wait_returns_the_same_status() {
        let mut child = start("exit 3");
        assert_eq!(child.wait().await.unwrap(), ExitStatus::Exited(3));
        assert_eq!(child.wait().await.unwrap(), ExitStatus::Exited(3));
        assert_eq!(child.pid(), None);
        let mut killed = start("exec sleep 1000");
        killed.kill().unwrap();
        assert_eq!(killed.wait().await.unwrap(), ExitStatus::Signaled(9));
        killed.kill().unwrap();
    }

    #[tokio::test]
    async fn dropped_child_is_killed_and_reaped() {
        let child = start("exec sleep 1000");
        let pid = child.pid().unwrap();
        assert!(process::is_alive(pid));
        drop(child);
        while Path::new("/proc").join(pid.to_string()).exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
