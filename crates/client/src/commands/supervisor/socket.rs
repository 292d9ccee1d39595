//! The socket of the supervisor: for this user alone, and not taken from another supervisor.

use std::{
    fs::{self, File, Permissions},
    io::ErrorKind,
    os::unix::{
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
        net::UnixStream as BlockingStream,
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use rustix::{
    fs::{FlockOperation, flock},
    process::geteuid,
};
use tokio::net::{UnixListener, UnixStream};

/// A socket that is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode: another supervisor may have its socket at the path by then.
    file: (u64, u64),
}

impl Socket {
    /// Listens at a path. Replaces a socket there that nobody listens on.
    pub(super) fn bind(path: &Path) -> Result<Self> {
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = path.file_name().context("--socket names no file")?;
        // Several supervisors that start at once take turns. The lock ends with the file.
        let lock = File::open(directory)
            .with_context(|| format!("cannot open {}", directory.display()))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        remove_stale(path)?;
        // Nobody connects before the mode is right: the name is known afterwards.
        let private = tempfile::Builder::new()
            .prefix(".codelia-supervisor-")
            .tempdir_in(directory)
            .with_context(|| format!("cannot create a directory in {}", directory.display()))?;
        let hidden = private.path().join(name);
        let listener = UnixListener::bind(&hidden)
            .with_context(|| format!("cannot listen on {}", path.display()))?;
        fs::set_permissions(&hidden, Permissions::from_mode(0o600))?;
        let metadata = fs::metadata(&hidden)?;
        fs::rename(&hidden, path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self { listener, path: path.to_owned(), file: (metadata.dev(), metadata.ino()) })
    }

    /// The next program; `None` if it is another user's.
    pub(super) async fn accept(&self) -> Result<Option<UnixStream>> {
        let (stream, _) = self.listener.accept().await.context("cannot accept connections")?;
        let user = stream.peer_cred().context("cannot read the credentials of a connection")?.uid();
        let is_permitted = user == 0 || user == geteuid().as_raw();
        Ok(is_permitted.then_some(stream))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let is_own = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.file);
        if is_own {
            // A socket that stays is replaced by the next supervisor.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket that nobody listens on.
fn remove_stale(path: &Path) -> Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    if !metadata.file_type().is_socket() {
        bail!("{} exists and is not a socket", path.display());
    }
    match BlockingStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
        }
        Ok(_) => bail!("another supervisor listens on {}", path.display()),
        Err(error) => {
            Err(error).with_context(|| format!("cannot tell who listens on {}", path.display()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener as BlockingListener;

    use super::*;

    #[tokio::test]
    async fn only_a_stale_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(BlockingListener::bind(&path).unwrap());
        let socket = Socket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = Socket::bind(&path).unwrap_err();
        assert!(error.to_string().contains("another supervisor"), "{error:#}");
        let (accepted, _program) = tokio::join!(socket.accept(), UnixStream::connect(&path));
        assert!(accepted.unwrap().is_some());
        drop(socket);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0, "nothing is left");

        fs::write(&path, "a file").unwrap();
        let error = Socket::bind(&path).unwrap_err();
        assert!(error.to_string().contains("not a socket"), "{error:#}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "a file");
    }

    #[tokio::test]
    async fn socket_of_another_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = Socket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _second = Socket::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }
}
