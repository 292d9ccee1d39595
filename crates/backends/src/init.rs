//! The `codelia-init` program: where it is, and starting it.

use std::{
    env,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use codelia_sys::{fd, spawn::Program};

use crate::{Error, sandbox::process::Process};

const NAME: &str = "codelia-init";

/// Finds `codelia-init`: at `$CODELIA_INIT`, else beside this program.
///
/// # Errors
/// There is none.
pub fn find_init() -> Result<PathBuf, Error> {
    let path = match env::var_os("CODELIA_INIT").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => env::current_exe()?.with_file_name(NAME),
    };
    if path.is_file() { Ok(path) } else { Err(Error::InitMissing { path }) }
}

/// Starts it with nothing of ours but the control socket.
pub(crate) fn start(path: &Path, arguments: &[&str], control: OwnedFd) -> Result<Process, Error> {
    let started = || {
        let (output, errors) = (fd::dev_null()?, fd::dev_null()?);
        Process::start(&Program::new(path, arguments, [control, output, errors])?)
    };
    started().map_err(|source| Error::InitStart { path: path.to_owned(), source })
}
