//! The directory of one sandbox on the host: the socket that `codelia-init` connects to, a copy of
//! `codelia-init`, and the small files of its plan. Only the worker can access it; it is removed
//! with the sandbox.
//!
//! A command can read the directory's path in its mount table. So its name is random, and a link to
//! it names the owner and the sandbox.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown, symlink},
    },
    path::{Path, PathBuf},
};

use codelia_policy::{Ids, Plan};
use codelia_sys::{Pid, process, process_id::ProcessId};
use codelia_types::RunId;
use tokio::net::UnixListener;

use crate::{Error, isolation, sandbox::control::Control};

const SOCKET: &str = "socket";

/// A control directory. Dropping it removes it.
#[derive(Debug)]
pub(super) struct ControlDir {
    link: PathBuf,
    directory: PathBuf,
    /// Taken when a connection is accepted.
    listener: Option<UnixListener>,
    /// Number of files added, for their names.
    files: usize,
}

impl ControlDir {
    /// Creates it below `parent`.
    pub(super) fn create(parent: &Path, owner: ProcessId, plan: &Plan) -> Result<Self, Error> {
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        let name = RunId::generate().to_string();
        let link = parent.join(format!("{owner}-{}", plan.sandbox));
        // The link first: the upkeep finds the directory by it.
        symlink(&name, &link)?;
        // From here on, an error drops the value, which removes both.
        let mut control_dir = Self { link, directory: parent.join(name), listener: None, files: 0 };
        DirBuilder::new().mode(0o700).create(&control_dir.directory)?;
        control_dir.listener = Some(listen(&control_dir.directory, isolation::ids(plan)?)?);
        Ok(control_dir)
    }

    /// The container's name, made of the link's.
    pub(super) fn container_name(&self) -> String {
        let name = self.link.file_name().unwrap_or_default().to_string_lossy();
        format!("codelia-{name}")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join(SOCKET)
    }

    /// Creates a file in it and returns its path.
    pub(super) fn add_file(&mut self, text: &str, mode: u32) -> Result<PathBuf, Error> {
        let path = self.new_path();
        let mut file = File::options().write(true).create_new(true).mode(mode).open(&path)?;
        file.write_all(text.as_bytes())?;
        // The mode above was subject to the umask.
        file.set_permissions(Permissions::from_mode(mode))?;
        Ok(path)
    }

    /// Copies a program into it and returns the path: commands could watch and lock a shared one.
    pub(super) fn add_program(&mut self, program: &Path) -> Result<PathBuf, Error> {
        let path = self.new_path();
        fs::copy(program, &path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o555))?;
        Ok(path)
    }

    fn new_path(&mut self) -> PathBuf {
        self.files += 1;
        self.directory.join(format!("file-{}", self.files))
    }

    /// Accepts the only connection and removes the socket. Also returns the peer's process.
    pub(super) async fn accept(&mut self) -> Result<(Control, Pid), Error> {
        let listener = self.listener.take().ok_or(Error::UnexpectedMessage)?;
        let (stream, _) = listener.accept().await?;
        fs::remove_file(self.socket())?;
        let peer = stream.peer_cred()?.pid().and_then(Pid::from_raw).ok_or(Error::UnknownPeer)?;
        Ok((Control::new(stream.into_std()?.into())?, peer))
    }

    /// Removes it. Returns whether it is gone.
    pub(super) fn remove(&mut self) -> bool {
        match remove(&self.directory, &self.link) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, directory = %self.directory.display(), "control directory not removed");
                false
            }
        }
    }
}

/// Removes a directory, then the link to it, as far as they exist.
pub(super) fn remove(directory: &Path, link: &Path) -> io::Result<()> {
    let ignore_absent = |result: io::Result<()>| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    };
    ignore_absent(fs::remove_dir_all(directory))?;
    ignore_absent(fs::remove_file(link))
}

impl Drop for ControlDir {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Creates a socket that the command's user may connect to. Binds through `/proc/self/fd`, because
/// the real path may be too long for a socket address.
fn listen(directory: &Path, ids: Ids) -> Result<UnixListener, Error> {
    let open = File::open(directory)?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd())).join(SOCKET);
    let listener = UnixListener::bind(short)?;
    let path = directory.join(SOCKET);
    fs::set_permissions(&path, Permissions::from_mode(0o600))?;
    if process::own_uid() == 0 {
        chown(&path, Some(ids.uid), Some(ids.gid))?;
    }
    Ok(listener)
}
