//! The data directory of `codelia up`: its lock and the files in it.

use std::{
    fs::{DirBuilder, File, OpenOptions, Permissions},
    io::{ErrorKind, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use codelia_client::client::{self, ClientFile};
use codelia_store::SecretKey;
use rustix::{
    fs::{FlockOperation, flock},
    process::{Pid, geteuid},
};
use tempfile::TempDir;

/// Holds the pid of the owner, which locks the file.
const PID_FILE: &str = "up.pid";
/// Holds the key that encrypts secret variables.
const SECRET_KEY_FILE: &str = "secrets.key";
/// Longest path of a Unix socket that the kernel accepts, with its terminating zero.
const MAX_SOCKET_PATH_BYTES: usize = 108;

/// A data directory that this process owns until this is dropped.
#[derive(Debug)]
pub(crate) struct DataDir {
    /// Absolute path of the directory.
    pub(crate) path: PathBuf,
    /// Socket of the worker.
    pub(crate) socket: PathBuf,
    _socket_dir: Option<TempDir>,
    _lock: File,
}

impl DataDir {
    /// Creates the directory if needed, and locks it.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        create(dir)?;
        let dir = dir.canonicalize()?;
        let mut lock = pid_file(&dir, true)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!("another `codelia up` uses {} ({})", dir.display(), owner(&mut lock));
        }
        lock.set_len(0)?;
        write!(lock, "{}", std::process::id())?;
        let (socket, socket_dir) = socket(&dir)?;
        Ok(Self { path: dir, socket, _socket_dir: socket_dir, _lock: lock })
    }

    /// Directory of the private database.
    pub(crate) fn postgres(&self) -> PathBuf {
        self.path.join("postgres")
    }

    /// Directory of large output.
    pub(crate) fn output(&self) -> PathBuf {
        self.path.join("output")
    }

    /// Writes `client.toml`.
    pub(crate) fn write_client_file(&self, file: &ClientFile) -> Result<PathBuf> {
        self.write_private(client::FILE, &toml::to_string(file)?)
    }

    /// The file with the key for secrets, created if it does not exist.
    pub(crate) fn secret_key_file(&self) -> Result<PathBuf> {
        let path = self.path.join(SECRET_KEY_FILE);
        if path.try_exists()? {
            Ok(path)
        } else {
            self.write_private(SECRET_KEY_FILE, &SecretKey::generate()?)
        }
    }

    /// Writes a file atomically, readable only by its owner.
    fn write_private(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        let mut new = tempfile::NamedTempFile::new_in(&self.path)?;
        new.write_all(text.as_bytes())?;
        new.persist(&path)?;
        Ok(path)
    }
}

/// Returns the pid of the `up` that owns the directory; `None` if there is none.
pub(crate) fn owner_pid(dir: &Path) -> Result<Option<Pid>> {
    let mut lock = match pid_file(dir, false) {
        Ok(lock) => lock,
        Err(error) if is_not_found(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    if flock(&lock, FlockOperation::NonBlockingLockShared).is_ok() {
        return Ok(None);
    }
    let mut text = String::new();
    lock.read_to_string(&mut text)?;
    let pid = text.trim().parse().ok().and_then(Pid::from_raw);
    pid.map(Some)
        .with_context(|| format!("{} is locked, but {PID_FILE} holds no pid", dir.display()))
}

/// Creates a data directory. If we are root, the database and sessions run as other users, which
/// need search permission.
pub(crate) fn create(dir: &Path) -> Result<()> {
    let create = || {
        let new = if geteuid().is_root() { 0o711 } else { 0o700 };
        DirBuilder::new().recursive(true).mode(new).create(dir)?;
        let mode = dir.metadata()?.permissions().mode();
        if geteuid().is_root() && mode & 0o001 == 0 {
            std::fs::set_permissions(dir, Permissions::from_mode(mode | 0o011))?;
        }
        Ok::<_, std::io::Error>(())
    };
    create().with_context(|| format!("cannot create {}", dir.display()))
}

fn pid_file(dir: &Path, create: bool) -> Result<File> {
    let path = dir.join(PID_FILE);
    let opened = OpenOptions::new()
        .read(true)
        .write(create)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .open(&path);
    opened.with_context(|| format!("cannot open {}", path.display()))
}

fn is_not_found(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::NotFound)
}

fn owner(lock: &mut File) -> String {
    let mut pid = String::new();
    match lock.rewind().and_then(|()| lock.read_to_string(&mut pid)) {
        Ok(_) if !pid.is_empty() => format!("pid {pid}"),
        _ => "starting".to_owned(),
    }
}

/// Returns a path for the worker's socket: in the data directory, or in a temporary directory if
/// that path would be too long.
fn socket(dir: &Path) -> Result<(PathBuf, Option<TempDir>)> {
    let run = dir.join("run");
    let path = run.join("worker.sock");
    if path.as_os_str().len() < MAX_SOCKET_PATH_BYTES {
        DirBuilder::new().recursive(true).mode(0o700).create(&run)?;
        return Ok((path, None));
    }
    let private = Permissions::from_mode(0o700);
    let temporary =
        tempfile::Builder::new().prefix("codelia-").permissions(private).tempdir_in("/tmp")?;
    Ok((temporary.path().join("worker.sock"), Some(temporary)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_owner_is_refused_with_pid() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(owner_pid(dir.path()).unwrap(), None);
        let first = DataDir::open(dir.path()).unwrap();
        let pid = std::process::id();
        let error = DataDir::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {pid}")), "{error}");
        assert_eq!(owner_pid(dir.path()).unwrap(), Pid::from_raw(pid.cast_signed()));
        drop(first);
        assert_eq!(owner_pid(dir.path()).unwrap(), None);
        assert!(DataDir::open(dir.path()).is_ok());
    }

    #[test]
    fn client_file_is_private_and_readable() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::open(dir.path()).unwrap();
        let file = ClientFile { endpoint: "http://127.0.0.1:1".into(), api_key: "cdl_x".into() };
        let path = data_dir.write_client_file(&file).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ClientFile::read(&data_dir.path).unwrap(), Some(file));
    }

    #[test]
    fn secret_key_is_private_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = DataDir::open(dir.path()).unwrap();
        let path = data_dir.secret_key_file().unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let key = std::fs::read_to_string(&path).unwrap();
        assert!(SecretKey::parse(&key).is_ok());
        assert_eq!(data_dir.secret_key_file().unwrap(), path);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), key);
    }

    #[test]
    fn long_socket_path_moves_to_private_directory() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(100));
        let data_dir = DataDir::open(&deep).unwrap();
        assert!(data_dir.socket.as_os_str().len() < MAX_SOCKET_PATH_BYTES);
        let parent = data_dir.socket.parent().unwrap().to_owned();
        assert_eq!(parent.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        drop(data_dir);
        assert!(!parent.exists());
    }
}
