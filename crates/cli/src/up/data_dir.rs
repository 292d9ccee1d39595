//! The data directory of one `up`: who owns it now, where things are in it.

use std::{
    fs::{DirBuilder, File, OpenOptions, Permissions},
    io::{ErrorKind, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use rustix::{
    fs::{FlockOperation, flock},
    process::{Pid, geteuid},
};
use tempfile::TempDir;

use crate::client::{self, ClientFile};

/// Names the owner's process and is locked by it.
const PID_FILE: &str = "up.pid";
/// The kernel takes no longer path for a Unix socket, with its closing zero.
const SOCKET_PATH_BYTES: usize = 108;

/// A data directory that is ours until this is dropped.
#[derive(Debug)]
pub(crate) struct Home {
    dir: PathBuf,
    socket: PathBuf,
    _short: Option<TempDir>,
    _lock: File,
}

impl Home {
    /// Makes the directory if it is new, and takes it.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        make(dir)?;
        let dir = dir.canonicalize()?;
        let mut lock = pid_file(&dir, true)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!("another `codelia up` has {} ({})", dir.display(), owner(&mut lock));
        }
        lock.set_len(0)?;
        write!(lock, "{}", std::process::id())?;
        let (socket, short) = socket(&dir)?;
        Ok(Self { dir, socket, _short: short, _lock: lock })
    }

    /// Where the private database is.
    pub(crate) fn postgres(&self) -> PathBuf {
        self.dir.join("postgres")
    }

    /// Where the worker listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The directory itself.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file that tells clients where to go, if it was written before.
    pub(crate) fn client_file(&self) -> Result<Option<ClientFile>> {
        ClientFile::read(&self.dir)
    }

    /// Writes that file, for our own eyes only; a reader finds the old one or the new one.
    pub(crate) fn write_client_file(&self, file: &ClientFile) -> Result<PathBuf> {
        let path = self.dir.join(client::FILE);
        let mut new = tempfile::NamedTempFile::new_in(&self.dir)?;
        new.write_all(toml::to_string(file)?.as_bytes())?;
        new.persist(&path)?;
        Ok(path)
    }
}

/// The process that has this data directory, if one has.
pub(crate) fn running(dir: &Path) -> Result<Option<Pid>> {
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
    pid.map(Some).with_context(|| format!("{} is taken, but does not say by whom", dir.display()))
}

/// Makes the directory of an `up`. Root's database runs as another user, who must get through.
pub(crate) fn make(dir: &Path) -> Result<()> {
    let make = || {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mode = dir.metadata()?.permissions().mode();
        if geteuid().is_root() && mode & 0o001 == 0 {
            std::fs::set_permissions(dir, Permissions::from_mode(mode | 0o011))?;
        }
        Ok::<_, std::io::Error>(())
    };
    make().with_context(|| format!("cannot make {}", dir.display()))
}

fn pid_file(dir: &Path, create: bool) -> Result<File> {
    let path = dir.join(PID_FILE);
    let opened =
        OpenOptions::new().read(true).write(create).create(create).truncate(false).mode(0o600).open(&path);
    opened.with_context(|| format!("cannot open {}", path.display()))
}

fn is_not_found(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::NotFound)
}

fn owner(lock: &mut File) -> String {
    let mut pid = String::new();
    match lock.rewind().and_then(|()| lock.read_to_string(&mut pid)) {
        Ok(_) if !pid.is_empty() => format!("pid {pid}"),
        _ => "it is starting".to_owned(),
    }
}

/// A path for the worker's socket: in the directory, or in a temporary one if that is too deep.
fn socket(dir: &Path) -> Result<(PathBuf, Option<TempDir>)> {
    let run = dir.join("run");
    let path = run.join("worker.sock");
    if path.as_os_str().len() < SOCKET_PATH_BYTES {
        DirBuilder::new().recursive(true).mode(0o700).create(&run)?;
        return Ok((path, None));
    }
    let private = Permissions::from_mode(0o700);
    let short = tempfile::Builder::new().prefix("codelia-").permissions(private).tempdir_in("/tmp")?;
    Ok((short.path().join("worker.sock"), Some(short)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_owner_is_refused_with_the_pid_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(running(dir.path()).unwrap(), None);
        let first = Home::open(dir.path()).unwrap();
        let pid = std::process::id();
        let refusal = Home::open(dir.path()).unwrap_err().to_string();
        assert!(refusal.contains(&format!("pid {pid}")), "{refusal}");
        assert_eq!(running(dir.path()).unwrap(), Pid::from_raw(pid.cast_signed()));
        drop(first);
        assert_eq!(running(dir.path()).unwrap(), None);
        assert!(Home::open(dir.path()).is_ok());
    }

    #[test]
    fn the_client_file_is_for_its_owner_only_and_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::open(dir.path()).unwrap();
        let file = ClientFile { endpoint: "http://127.0.0.1:1".into(), api_key: "cdl_x".into() };
        let path = home.write_client_file(&file).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(home.client_file().unwrap(), Some(file));
    }

    #[test]
    fn a_socket_path_that_is_too_long_moves_to_a_private_short_one() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(100));
        let home = Home::open(&deep).unwrap();
        assert!(home.socket().as_os_str().len() < SOCKET_PATH_BYTES);
        let parent = home.socket().parent().unwrap().to_owned();
        assert_eq!(parent.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        drop(home);
        assert!(!parent.exists());
    }
}
