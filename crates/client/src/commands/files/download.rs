//! One file from a session to a local file or stdout.

use std::{
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use codelia_proto::v1::{File, ReadFileRequest, ReadFileResponse, read_file_response};
use indicatif::ProgressBar;
use tempfile::NamedTempFile;
use tonic::Streaming;

use super::{
    limits::MODE_MASK,
    remote_file::{NO_FILE, size},
};
use crate::{client::Client, output::stdout_error, system};

/// Reads a file of a session into `target`: at most `limit` bytes, or as many as the server names.
pub(super) async fn download(
    client: &Client,
    request: ReadFileRequest,
    target: Target,
    limit: Option<u64>,
    bar: &ProgressBar,
) -> Result<File> {
    let mut chunks = client.files().read_file(request).await?.into_inner();
    let first = chunks.message().await?.and_then(|chunk| chunk.kind);
    let Some(read_file_response::Kind::File(file)) = first else { bail!(NO_FILE) };
    let limit = limit.unwrap_or_else(|| size(&file));
    let mut sink = target.open(file.mode.cast_unsigned())?;
    copy_chunks(&mut chunks, |data| sink.write(data), limit, bar).await?;
    sink.finish()?;
    Ok(file)
}

/// Writes what arrives, at most `limit` bytes. Returns how many there were.
pub(super) async fn copy_chunks(
    chunks: &mut Streaming<ReadFileResponse>,
    mut write: impl FnMut(&[u8]) -> Result<()>,
    limit: u64,
    bar: &ProgressBar,
) -> Result<u64> {
    let mut copied = 0;
    while let Some(chunk) = chunks.message().await? {
        if let Some(read_file_response::Kind::Data(data)) = chunk.kind {
            copied += data.len() as u64;
            ensure!(
                copied <= limit,
                "the file grew during the copy (it had {limit} bytes): copy it again"
            );
            write(&data)?;
            bar.inc(data.len() as u64);
        }
    }
    Ok(copied)
}

/// Destination of a download.
#[derive(Debug)]
pub(super) enum Target {
    Stdout,
    File(LocalFile),
}

/// A local file to write.
#[derive(Debug)]
pub(super) struct LocalFile {
    pub(super) path: PathBuf,
    /// The path for messages.
    pub(super) shown: String,
    /// Whether it may replace another file.
    pub(super) force: bool,
    /// Keeps the directory open that `path` refers to.
    pub(super) _directory: Option<std::fs::File>,
}

/// An open [`Target`].
#[derive(Debug)]
pub(super) enum Sink {
    Stdout,
    /// A temporary file in the directory of the target, renamed once complete.
    File(NamedTempFile, LocalFile),
}

impl Target {
    /// A file at this path.
    pub(super) fn file(path: PathBuf, force: bool) -> Self {
        let shown = path.display().to_string();
        Self::File(LocalFile { path, shown, force, _directory: None })
    }

    /// The file that `requested` is copied to. In a directory it has the name that the user wrote:
    /// the server's answer may name another one, such as the target of a link that a command made.
    pub(super) fn new(to: &Path, requested: &str, force: bool) -> Result<Self> {
        if !to.is_dir() {
            return Ok(Self::file(to.to_owned(), force));
        }
        let name = Path::new(requested).file_name();
        let name =
            name.with_context(|| format!("{requested:?} has no file name: name the local file"))?;
        Ok(Self::file(to.join(name), force))
    }

    pub(super) fn open(self, mode: u32) -> Result<Sink> {
        let Self::File(file) = self else { return Ok(Sink::Stdout) };
        file.check_replaceable()?;
        let parent = file.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        // The umask applies.
        let permissions = system::permissions(mode & MODE_MASK);
        let mut builder = tempfile::Builder::new();
        builder.prefix(".codelia-");
        if let Some(permissions) = permissions {
            builder.permissions(permissions);
        }
        let temporary = builder
            .tempfile_in(parent.unwrap_or(Path::new(".")))
            .with_context(|| format!("cannot write {}", file.shown))?;
        Ok(Sink::File(temporary, file))
    }
}

impl LocalFile {
    /// Fails if something has this name that must not be replaced. Does not follow a link.
    pub(super) fn check_replaceable(&self) -> Result<()> {
        match std::fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error).with_context(|| format!("cannot write {}", self.shown)),
            Ok(found) if !found.is_file() && !found.is_symlink() => {
                bail!("{} is not a regular file (write to stdout with -)", self.shown)
            }
            Ok(_) if self.force => Ok(()),
            Ok(_) => bail!(self.exists()),
        }
    }

    pub(super) fn exists(&self) -> String {
        format!("{} exists (replace it with --force)", self.shown)
    }
}

impl Sink {
    pub(super) fn write(&mut self, data: &[u8]) -> Result<()> {
        match self {
            Self::Stdout => std::io::stdout().write_all(data).map_err(stdout_error),
            Self::File(temporary, file) => {
                temporary.write_all(data).with_context(|| format!("cannot write {}", file.shown))
            }
        }
    }

    pub(super) fn finish(self) -> Result<()> {
        let (temporary, file) = match self {
            Self::Stdout => return std::io::stdout().flush().map_err(stdout_error),
            Self::File(temporary, file) => (temporary, file),
        };
        // Neither follows a link.
        let named = if file.force {
            temporary.persist(&file.path)
        } else {
            temporary.persist_noclobber(&file.path)
        };
        match named {
            Err(error) if error.error.kind() == ErrorKind::AlreadyExists => bail!(file.exists()),
            named => named.map(drop).with_context(|| format!("cannot write {}", file.shown)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn download_to_directory_gets_requested_name() {
        let temp = tempfile::tempdir().unwrap();
        for (requested, name) in [("a", "a"), ("out/b", "b"), ("/workspace/c/", "c"), ("d/.", "d")]
        {
            let Target::File(file) = Target::new(temp.path(), requested, false).unwrap() else {
                panic!()
            };
            assert_eq!(file.path, temp.path().join(name), "{requested}");
        }
        for nameless in ["", "/", "..", "a/..", "."] {
            assert!(Target::new(temp.path(), nameless, true).is_err(), "{nameless}");
        }
    }

    #[test]
    fn download_never_replaces_or_follows_silently() {
        let temp = tempfile::tempdir().unwrap();
        let [victim, link, new] = ["victim", "link", "new"].map(|name| temp.path().join(name));
        std::fs::write(&victim, "before").unwrap();
        std::os::unix::fs::symlink("victim", &link).unwrap();
        let written = |path: &Path, force| {
            let mut sink = Target::file(path.to_owned(), force).open(0o6755)?;
            sink.write(b"after")?;
            sink.finish()
        };
        for existing in [&victim, &link] {
            assert!(written(existing, false).unwrap_err().to_string().contains("--force"));
        }
        written(&link, true).unwrap();
        assert!(!link.is_symlink(), "the link itself is replaced");
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "before");
        written(&new, false).unwrap();
        let mode = std::fs::metadata(&new).unwrap().permissions().mode() & 0o7777;
        assert!(mode & 0o7000 == 0 && mode & 0o700 == 0o700, "{mode:o}");
        assert!(written(temp.path(), true).is_err(), "a directory is never replaced");
        // A name that appears during the download is kept.
        let late = temp.path().join("late");
        let sink = Target::file(late.clone(), false).open(0o644).unwrap();
        std::fs::write(&late, "first").unwrap();
        assert!(sink.finish().is_err());
        assert_eq!(std::fs::read_to_string(&late).unwrap(), "first");
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 4, "no temporary file is left");
    }
}
