//! Finds and starts the `codelia-init` binary.

use std::{
    env,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use codelia_sys::{fd, spawn::Program};

use crate::{Error, sandbox::child::ChildProcess};

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
pub(crate) fn start(path: &Path, arguments: &[&str], control: OwnedFd) -> Result<ChildProcess, Error> {
    let start = || {
        let (stdout, stderr) = (fd::dev_null()?, fd::dev_null()?);
        ChildProcess::start(&Program::new(path, arguments, [control, stdout, stderr])?)
    };
    start().map_err(|cause| Error::InitStart { path: path.to_owned(), cause })
}
