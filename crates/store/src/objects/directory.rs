//! Objects as files of one directory, private to this user and durable before a row names them.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, ReadDir},
    io::{self, ErrorKind, Write},
    ops::Range,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use tokio::{sync::OwnedSemaphorePermit, task::spawn_blocking};

use super::ObjectProblem;

/// A directory with objects. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    root: Arc<Path>,
    /// The subdirectory whose own entry this process last made durable.
    synced: Arc<Mutex<PathBuf>>,
}

impl Directory {
    /// Creates the directory if it does not exist.
    pub(super) fn open(root: &Path) -> Result<Self, ObjectProblem> {
        DirBuilder::new().recursive(true).mode(0o700).create(root)?;
        let root = root.canonicalize()?;
        let mode = fs::metadata(&root)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            let detail = format!("other users have access to it, mode {mode:o} (run `chmod 700`)");
            return Err(ObjectProblem::Failed(detail));
        }
        Ok(Self { root: root.into(), synced: Arc::default() })
    }

    pub(super) async fn put(
        &self,
        name: &str,
        data: Bytes,
        permit: OwnedSemaphorePermit,
    ) -> Result<(), ObjectProblem> {
        let this = self.clone();
        let path = self.root.join(name);
        blocking(permit, move || this.write(&path, &data)).await
    }

    pub(super) async fn read(
        &self,
        name: &str,
        range: Range<u64>,
        permit: OwnedSemaphorePermit,
    ) -> Result<Bytes, ObjectProblem> {
        let path = self.root.join(name);
        blocking(permit, move || read(&path, range)).await
    }

    pub(super) async fn delete(
        &self,
        names: &[String],
        permit: OwnedSemaphorePermit,
    ) -> Result<(), ObjectProblem> {
        let paths: Vec<PathBuf> = names.iter().map(|name| self.root.join(name)).collect();
        blocking(permit, move || paths.iter().try_for_each(|path| if_exists(fs::remove_file(path))))
            .await
    }

    /// The names of all subdirectories.
    pub(super) async fn days(
        &self,
        permit: OwnedSemaphorePermit,
    ) -> Result<Vec<String>, ObjectProblem> {
        let root = self.root.clone();
        let is_dir = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        blocking(permit, move || {
            let entries = fs::read_dir(root)?.collect::<io::Result<Vec<_>>>()?;
            Ok(entries.iter().filter(|entry| is_dir(entry)).filter_map(file_name).collect())
        })
        .await
    }

    /// Lists the names in a subdirectory.
    pub(super) async fn list(
        &self,
        day: &str,
        permit: OwnedSemaphorePermit,
    ) -> Result<FileList, ObjectProblem> {
        let path = self.root.join(day);
        let entries = blocking(permit, move || fs::read_dir(path)).await?;
        Ok(FileList { day: day.to_owned(), entries: Some(entries) })
    }

    /// Removes an empty subdirectory.
    pub(super) async fn remove_day(
        &self,
        day: &str,
        permit: OwnedSemaphorePermit,
    ) -> Result<(), ObjectProblem> {
        let path = self.root.join(day);
        blocking(permit, move || match fs::remove_dir(path) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => if_exists(removed),
        })
        .await
    }

    /// Writes a file in place: every writer of this name writes the same bytes, and nobody reads
    /// it before a row names it. It and its name are on the disk when this returns.
    fn write(&self, path: &Path, data: &[u8]) -> io::Result<()> {
        let parent = path.parent().unwrap_or(&self.root);
        self.create(parent)?;
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.write_all(data)?;
        file.sync_data()?;
        File::open(parent)?.sync_all()
    }

    /// Creates the directory of a day. Each process makes its entry durable itself: the one that
    /// created it may not have done so yet.
    fn create(&self, parent: &Path) -> io::Result<()> {
        let created = match DirBuilder::new().mode(0o700).create(parent) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            created => created.map(|()| true)?,
        };
        let is_synced = *self.synced.lock().unwrap_or_else(PoisonError::into_inner) == parent;
        if created || !is_synced {
            File::open(&self.root)?.sync_all()?;
            parent.clone_into(&mut self.synced.lock().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(())
    }
}

/// The files of a subdirectory.
#[derive(Debug)]
pub(super) struct FileList {
    day: String,
    /// `None` while a thread reads it, and after a failure.
    entries: Option<ReadDir>,
}

impl FileList {
    /// Returns up to `limit` more names; none at the end.
    pub(super) async fn next(
        &mut self,
        limit: usize,
        permit: OwnedSemaphorePermit,
    ) -> Result<Vec<String>, ObjectProblem> {
        let Some(mut entries) = self.entries.take() else { return Ok(Vec::new()) };
        let (entries, batch) = blocking(permit, move || {
            let batch = entries.by_ref().take(limit).collect::<io::Result<Vec<_>>>()?;
            Ok((entries, batch))
        })
        .await?;
        self.entries = Some(entries);
        Ok(batch.iter().filter_map(file_name).map(|name| format!("{}/{name}", self.day)).collect())
    }
}

fn file_name(entry: &fs::DirEntry) -> Option<String> {
    entry.file_name().into_string().ok()
}

fn read(path: &Path, range: Range<u64>) -> io::Result<Bytes> {
    let file = File::open(path)?;
    let length =
        usize::try_from(range.end.saturating_sub(range.start)).map_err(io::Error::other)?;
    let mut data = vec![0; length];
    let mut found = 0;
    while found < length {
        match file.read_at(&mut data[found..], range.start + found as u64)? {
            0 => break,
            more => found += more,
        }
    }
    data.truncate(found);
    Ok(data.into())
}

fn if_exists(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Works on a thread, which holds the permit even if nobody waits for the result any more.
async fn blocking<T: Send + 'static>(
    permit: OwnedSemaphorePermit,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, ObjectProblem> {
    let done = spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    Ok(done.await.map_err(io::Error::other)??)
}
