//! Terminal, signals, streams and permissions on Unix.

use std::{
    fs::{DirBuilder, File, Metadata, Permissions},
    io::{self, IsTerminal},
    os::{
        fd::AsFd,
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::Path,
};

use codelia_telemetry::task;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, fstat, tell},
    termios::{OptionalActions, Termios, Winsize, tcgetattr, tcgetwinsize, tcsetattr},
};
use tokio::{signal::unix::SignalKind, sync::mpsc};

use crate::signal::Signal;

/// Puts the terminal in raw mode until dropped.
#[derive(Debug)]
pub(crate) struct RawMode {
    original: Termios,
}

impl RawMode {
    /// Puts the terminal on stdin in raw mode; `None` if stdin is not a terminal.
    pub(crate) fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        let original = tcgetattr(io::stdin())?;
        let mut raw = original.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Some(Self { original }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // Nothing to restore if the terminal is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.original);
    }
}

/// Columns and rows of the terminal on stdin, else on stdout.
pub(crate) fn terminal_size() -> Option<(u16, u16)> {
    let size: Winsize = tcgetwinsize(io::stdin()).or_else(|_| tcgetwinsize(io::stdout())).ok()?;
    Some((size.ws_col, size.ws_row))
}

/// Columns of the terminal on stdout.
pub(crate) fn stdout_columns() -> Option<u16> {
    Some(tcgetwinsize(io::stdout()).ok()?.ws_col)
}

/// Receives changes of the terminal's size.
#[derive(Debug)]
pub(crate) struct Resizes(tokio::signal::unix::Signal);

impl Resizes {
    pub(crate) fn catch() -> io::Result<Self> {
        tokio::signal::unix::signal(SignalKind::window_change()).map(Self)
    }

    /// Waits for the next change; `None` if there are no more.
    pub(crate) async fn next(&mut self) -> Option<()> {
        self.0.recv().await
    }
}

/// Sends each termination signal from now on to `sender`.
pub(crate) fn catch_signals(sender: &mpsc::Sender<Signal>) -> io::Result<()> {
    for signal in [Signal::Interrupt, Signal::Terminate, Signal::HangUp] {
        let mut received = tokio::signal::unix::signal(SignalKind::from_raw(signal.number()))?;
        let sender = sender.clone();
        task::background("signal", async move {
            while received.recv().await.is_some() && sender.send(signal).await.is_ok() {}
        });
    }
    Ok(())
}

/// Whether stdin is a pipe or file with data, or one that may still get some.
pub(crate) fn stdin_has_data() -> io::Result<bool> {
    let stdin = io::stdin();
    match FileType::from_raw_mode(fstat(&stdin)?.st_mode) {
        FileType::RegularFile => Ok(fstat(&stdin)?.st_size > tell(&stdin)?.cast_signed()),
        FileType::Fifo | FileType::Socket => {
            let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
            let events = fds[0].revents();
            // A pipe whose writer is gone has no more than what is in it.
            Ok(events.contains(PollFlags::IN) || !events.contains(PollFlags::HUP))
        }
        _ => Ok(false),
    }
}

/// Stdout and stderr of this process, without buffers.
pub(crate) fn output_files() -> io::Result<(File, File)> {
    let stdout = io::stdout().as_fd().try_clone_to_owned()?;
    let stderr = io::stderr().as_fd().try_clone_to_owned()?;
    Ok((stdout.into(), stderr.into()))
}

/// Waits until a non-blocking file can be written.
pub(crate) fn wait_until_writable(file: &File) -> io::Result<()> {
    poll(&mut [PollFd::new(file, PollFlags::OUT)], None)?;
    Ok(())
}

/// The permissions of a file.
pub(crate) fn file_mode(metadata: &Metadata) -> Option<u32> {
    Some(metadata.permissions().mode())
}

/// Permissions for a new file.
pub(crate) fn permissions(mode: u32) -> Option<Permissions> {
    Some(Permissions::from_mode(mode))
}

/// Whether others may access a file of this user.
pub(crate) fn is_shared(metadata: &Metadata) -> bool {
    metadata.permissions().mode() & 0o077 != 0
}

/// Creates a directory that only this user may use.
pub(crate) fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
