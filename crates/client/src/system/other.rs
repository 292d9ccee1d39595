//! The part that other systems than Unix have. Their users' directories are private by themselves.

use std::{
    convert::Infallible,
    fs::{File, Metadata, Permissions},
    io,
    os::windows::io::AsHandle,
    path::Path,
};

use codelia_telemetry::task;
use tokio::sync::mpsc;

use super::unsupported;
use crate::signal::Signal;

/// Raw mode of a terminal, which this system does not have.
#[derive(Debug)]
pub(crate) struct RawMode(Infallible);

impl RawMode {
    pub(crate) fn enter() -> io::Result<Option<Self>> {
        Err(unsupported("a terminal for the command (-t)"))
    }
}

pub(crate) fn terminal_size() -> Option<(u16, u16)> {
    None
}

pub(crate) fn stdout_columns() -> Option<u16> {
    None
}

/// Changes of a terminal's size, which never come.
#[derive(Debug)]
pub(crate) struct Resizes(());

impl Resizes {
    pub(crate) fn catch() -> io::Result<Self> {
        Ok(Self(()))
    }

    pub(crate) async fn next(&mut self) -> Option<()> {
        None
    }
}

/// Sends an interrupt to `sender` for each Ctrl-C from now on.
pub(crate) fn catch_signals(sender: &mpsc::Sender<Signal>) -> io::Result<()> {
    let sender = sender.clone();
    let mut received = tokio::signal::windows::ctrl_c()?;
    task::background("signal", async move {
        while received.recv().await.is_some() && sender.send(Signal::Interrupt).await.is_ok() {}
    });
    Ok(())
}

/// Whether stdin has data cannot be asked without reading it.
pub(crate) fn stdin_has_data() -> io::Result<bool> {
    Ok(false)
}

/// Stdout and stderr of this process, without buffers.
pub(crate) fn output_files() -> io::Result<(File, File)> {
    let stdout = io::stdout().as_handle().try_clone_to_owned()?;
    let stderr = io::stderr().as_handle().try_clone_to_owned()?;
    Ok((stdout.into(), stderr.into()))
}

/// Fails: files here always block.
pub(crate) fn wait_until_writable(_: &File) -> io::Result<()> {
    Err(io::ErrorKind::WouldBlock.into())
}

pub(crate) fn file_mode(_: &Metadata) -> Option<u32> {
    None
}

pub(crate) fn permissions(_: u32) -> Option<Permissions> {
    None
}

pub(crate) fn is_shared(_: &Metadata) -> bool {
    false
}

pub(crate) fn create_private_directory(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path)
}
