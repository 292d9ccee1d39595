//! The `codelia-init` program: where it is, and starting it.

use std::{
    env,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
};

use tokio::process::{Child, Command};

use crate::Error;

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

/// Starts it with nothing of ours but the control socket. Nothing is set here that would keep the
/// standard library from `posix_spawn`: a fork of a large worker is slow.
pub(crate) fn start(path: &Path, control: OwnedFd) -> Result<Child, Error> {
    Command::new(path)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(control))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|source| Error::InitStart { path: path.to_owned(), source })
}
