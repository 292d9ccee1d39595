//! Finds and starts the `codelia-init` binary.

use std::{
    env,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use codelia_init::Report;
use codelia_sys::{fd, spawn::Program};
use serde::Serialize;

use crate::{
    Error,
    sandbox::{child::ChildProcess, control::Control},
};

const NAME: &str = "codelia-init";

/// Finds `codelia-init`: at `$CODELIA_INIT`, otherwise next to this program.
///
/// # Errors
/// There is no file at that path.
pub fn find_init() -> Result<PathBuf, Error> {
    let path = match env::var_os("CODELIA_INIT").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => env::current_exe()?.with_file_name(NAME),
    };
    if path.is_file() { Ok(path) } else { Err(Error::InitMissing { path }) }
}

/// Starts it. The control socket is the only descriptor of ours that it inherits.
pub(crate) fn start(
    path: &Path,
    arguments: &[&str],
    control: OwnedFd,
) -> Result<ChildProcess, Error> {
    let start = || {
        let streams = [control, fd::dev_null()?, fd::dev_null()?];
        ChildProcess::start(&Program::new(path, arguments, streams)?)
    };
    start().map_err(|cause| Error::InitStart { path: path.to_owned(), cause })
}

/// Has a separate `codelia-init` serve one request outside any sandbox. Returns the descriptors
/// that it sent back.
pub(crate) async fn call(
    path: &Path,
    argument: &str,
    request: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> Result<Vec<OwnedFd>, Error> {
    let (mut control, remote) = Control::pair()?;
    let mut process = start(path, &[argument], remote)?;
    let sent = control.send(request, descriptors).await;
    // If sending failed, init may have reported why before it exited.
    let ready = control.expect_report(Report::Ready).await;
    // After an error of the socket it may not end by itself; dropping it kills it.
    if !matches!(ready, Err(Error::Control(_) | Error::Frame(_))) {
        process.wait().await?;
    }
    match ready {
        Ok(()) => Ok(control.take_descriptors()),
        Err(Error::InitExited) => sent.and(Err(Error::InitExited)),
        Err(error) => Err(error),
    }
}
