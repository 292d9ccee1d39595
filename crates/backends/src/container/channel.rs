//! The directory of one sandbox on the host: the socket that `codelia-init` connects to, and the small
//! files of its plan. It is the worker's alone and goes with the sandbox.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
};

use codelia_policy::{Ids, Plan};
use codelia_sys::{Pid, process, process_id::ProcessId};
use tokio::net::UnixListener;

use crate::{Error, sandbox::control::Control, tool::tool_backend};

const SOCKET: &str = "socket";

/// The directory, until it is removed or dropped.
#[derive(Debug)]
pub(super) struct Channel {
    directory: PathBuf,
    /// There until somebody has connected.
    listener: Option<UnixListener>,
    files: usize,
}

impl Channel {
    /// Makes it below `parent`; its name tells its owner and its sandbox.
    pub(super) fn open(parent: &Path, owner: ProcessId, plan: &Plan) -> Result<Self, Error> {
        DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        let directory = parent.join(format!("{owner}-{}", plan.sandbox));
        DirBuilder::new().mode(0o700).create(&directory)?;
        // From here on it removes itself.
        let mut channel = Self { directory, listener: None, files: 0 };
        channel.listener = Some(listen(&channel.directory, tool_backend::ids(plan)?)?);
        Ok(channel)
    }

    /// What names the container: it is the directory's name too.
    pub(super) fn name(&self) -> String {
        let name = self.directory.file_name().unwrap_or_default().to_string_lossy();
        format!("codelia-{name}")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.directory.join(SOCKET)
    }

    /// Puts a file into it.
    pub(super) fn add_file(&mut self, text: &str, mode: u32) -> Result<PathBuf, Error> {
        self.files += 1;
        let path = self.directory.join(format!("file-{}", self.files));
        let mut file = File::options().write(true).create_new(true).mode(mode).open(&path)?;
        file.write_all(text.as_bytes())?;
        file.set_permissions(Permissions::from_mode(mode))?;
        Ok(path)
    }

    /// Takes the one connection there will be; answers also which process it came from.
    pub(super) async fn accept(&mut self) -> Result<(Control, Pid), Error> {
        let listener = self.listener.take().ok_or(Error::OutOfTurn)?;
        let (stream, _) = listener.accept().await?;
        fs::remove_file(self.socket())?;
        let peer = stream.peer_cred()?.pid().and_then(Pid::from_raw).ok_or(Error::Stranger)?;
        Ok((Control::new(stream.into_std()?.into())?, peer))
    }

    /// Tells whether it is gone.
    pub(super) fn remove(&mut self) -> bool {
        match fs::remove_dir_all(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, directory = %self.directory.display(), "a sandbox's directory is left");
                false
            }
            _ => true,
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A socket that the command's user may connect to. Its path may be longer than a socket's name can be.
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
