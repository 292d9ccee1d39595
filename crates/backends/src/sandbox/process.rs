//! A program that we started, from its start until it is collected.

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

/// A child of ours. Dropped, it is killed, and collected in the background.
#[derive(Debug)]
pub(crate) struct Process {
    /// Taken when nobody has to collect it any more.
    child: Option<AsyncFd<Child>>,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts a program.
    pub(crate) fn start(program: &Program) -> io::Result<Self> {
        let child = watched(program.start()?).map_err(|(child, error)| {
            // What cannot be waited for must not live.
            match child.kill_and_wait() {
                Ok(()) => error,
                Err(errno) => errno.into(),
            }
        })?;
        Ok(Self { child: Some(child), ended: None })
    }

    /// Its id, until it is collected.
    pub(crate) fn id(&self) -> Option<Pid> {
        self.child.as_ref().map(|child| child.get_ref().pid())
    }

    /// Kills it, if it has not ended.
    pub(crate) fn kill(&self) -> Result<(), Errno> {
        self.child.as_ref().map_or(Ok(()), |child| child.get_ref().kill())
    }

    /// Waits for its end. Cancel-safe; may be called again.
    pub(crate) async fn ended(&mut self) -> io::Result<ExitStatus> {
        if let Some(ended) = self.ended {
            return Ok(ended);
        }
        let child = self.child.as_ref().ok_or(Errno::CHILD)?;
        let ended = collected(child).await;
        self.child = None;
        self.ended = ended.as_ref().ok().copied();
        ended
    }
}

/// Tells when what owns a descriptor can be read, or gives it back with the reason why not. The deprecation is about types
/// whose descriptor may change; ours keep theirs.
#[allow(deprecated)]
pub(crate) fn watched<T: AsRawFd>(owner: T) -> Result<AsyncFd<T>, (T, io::Error)> {
    AsyncFd::try_with_interest(owner, Interest::READABLE).map_err(|error| error.into_parts())
}

async fn collected(child: &AsyncFd<Child>) -> io::Result<ExitStatus> {
    loop {
        let mut ready = child.readable().await?;
        match child.get_ref().try_wait()? {
            Some(status) => return Ok(status),
            None => ready.clear_ready(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let Some(child) = self.child.take() else { return };
        if let Err(errno) = child.get_ref().kill() {
            tracing::warn!(%errno, "a process of ours was not killed");
        }
        // Without a runtime we are at our end, and who inherits it collects it.
        if let (Ok(None), Ok(_)) = (child.get_ref().try_wait(), Handle::try_current()) {
            task::background("collect a process", async move { collected(&child).await.map(drop) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, time::Duration};

    use codelia_sys::{fd, process};

    use super::*;

    fn start(script: &str) -> Process {
        let null = || fd::dev_null().unwrap();
        let program = Program::new(Path::new("/bin/sh"), ["-c", script], [null(), null(), null()]);
        Process::start(&program.unwrap()).unwrap()
    }

    #[tokio::test]
    async fn its_end_is_told_as_often_as_it_is_asked_for() {
        let mut process = start("exit 3");
        assert_eq!(process.ended().await.unwrap(), ExitStatus::Exited(3));
        assert_eq!(process.ended().await.unwrap(), ExitStatus::Exited(3));
        assert_eq!(process.id(), None);
        let mut killed = start("exec sleep 1000");
        killed.kill().unwrap();
        assert_eq!(killed.ended().await.unwrap(), ExitStatus::Signaled(9));
        killed.kill().unwrap();
    }

    #[tokio::test]
    async fn nothing_is_left_of_one_that_is_dropped() {
        let process = start("exec sleep 1000");
        let pid = process.id().unwrap();
        assert!(process::is_alive(pid));
        drop(process);
        while Path::new("/proc").join(pid.to_string()).exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
