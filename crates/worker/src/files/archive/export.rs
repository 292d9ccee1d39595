//! Packs a directory. Every directory is entered through the descriptor of the one above it, so
//! what a command swaps meanwhile cannot lead out; links are packed as links.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    mem::take,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use bytes::Bytes;
use codelia_policy::FileAccess;
use codelia_proto::v1::{self, ArchiveFormat, SkipReason, export_files_response::Kind as Message};
use codelia_sys::resolve_beneath::{Entry, FinalSymlink};
use codelia_types::Reason;
use rustix::fs::{Dir, FileType};
use zstd::stream::write::Encoder;

use super::{
    super::{error::FileError, limiter::CallShare, workspace::Workspace},
    limits::{MAX_BYTES, MAX_DEPTH, MAX_DURATION, MAX_ENTRIES, MAX_PATH},
    tar::{self, Kind, Member},
};

/// How much one message carries, and a little more.
const MESSAGE_BYTES: usize = 256 * 1024;
/// How much of a file is read at once.
const READ_BYTES: u64 = 128 * 1024;
/// Fast: the archive is often read once.
const ZSTD_LEVEL: i32 = 1;
/// Skipped files that the summary names, and characters of each path.
const MAX_SKIPPED: usize = 100;
const MAX_SHOWN: usize = 1024;

/// A directory that is being packed.
pub(in super::super) struct Export {
    workspace: Arc<Workspace>,
    /// The path of the packed directory.
    top: PathBuf,
    /// The directories from the packed one to the current one.
    levels: Vec<Level>,
    file: Option<OpenFile>,
    output: Output,
    summary: v1::ExportSummary,
    state: State,
    deadline: Instant,
    _permit: CallShare,
}

#[derive(Debug)]
struct Level {
    entry: Entry,
    names: Dir,
    path: PathBuf,
}

/// A file whose header is packed.
#[derive(Debug)]
struct OpenFile {
    file: File,
    name: PathBuf,
    size: u64,
    left: u64,
    /// Whether it ended before its size.
    is_short: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Packing,
    /// Only the summary is left.
    Packed,
    Done,
}

/// The archive as far as it was not sent.
struct Output {
    plain: Vec<u8>,
    encoder: Option<Encoder<'static, Vec<u8>>>,
}

impl Export {
    /// Begins to pack a directory.
    pub(in super::super) fn begin(
        workspace: Workspace,
        permit: CallShare,
        request: &v1::ExportFilesRequest,
    ) -> Result<Self, FileError> {
        let (path, level) = workspace.as_session(|| {
            let (target, entry) =
                workspace.find_entry(&request.path, FinalSymlink::Follow, FileAccess::Read)?;
            if entry.kind() != FileType::Directory {
                return Err(Reason::NotADirectory.into());
            }
            Ok((target.path.clone(), Level::open(entry, target.path)?))
        })?;
        let encoder = match request.format() {
            ArchiveFormat::TarZstd => Some(Encoder::new(Vec::new(), ZSTD_LEVEL)?),
            ArchiveFormat::Unspecified | ArchiveFormat::Tar => None,
        };
        Ok(Self {
            workspace: Arc::new(workspace),
            top: path,
            levels: vec![level],
            file: None,
            output: Output { plain: Vec::new(), encoder },
            summary: v1::ExportSummary::default(),
            state: State::Packing,
            deadline: Instant::now() + MAX_DURATION,
            _permit: permit,
        })
    }

    /// The next message; `None` after the last one.
    pub(in super::super) fn next(&mut self) -> Result<Option<Message>, FileError> {
        let workspace = self.workspace.clone();
        while self.state == State::Packing {
            workspace.check_held()?;
            workspace.as_session(|| self.pack())?;
            let ready = self.output.take_ready(self.state == State::Packed)?;
            if !ready.is_empty() {
                return Ok(Some(Message::Data(ready)));
            }
        }
        if self.state == State::Done {
            return Ok(None);
        }
        self.state = State::Done;
        Ok(Some(Message::Summary(take(&mut self.summary))))
    }

    /// Packs about as much as one message carries.
    fn pack(&mut self) -> Result<(), FileError> {
        while self.output.plain.len() < MESSAGE_BYTES {
            if Instant::now() > self.deadline {
                return Err(Reason::FileCallTimeout.into());
            }
            if let Some(mut file) = self.file.take() {
                self.pack_content(&mut file)?;
                self.file = (file.left > 0).then_some(file);
            } else if !self.pack_next()? {
                tar::write_end(&mut self.output.plain);
                self.state = State::Packed;
                return Ok(());
            }
        }
        Ok(())
    }

    fn pack_content(&mut self, open: &mut OpenFile) -> Result<(), FileError> {
        let max = open.left.min(READ_BYTES);
        let output = &mut self.output.plain;
        let mut read =
            if open.is_short { 0 } else { (&open.file).take(max).read_to_end(output)? as u64 };
        if read == 0 {
            // The header has announced the size.
            output.resize(output.len() + usize::try_from(max).unwrap_or_default(), 0);
            read = max;
            if !std::mem::replace(&mut open.is_short, true) {
                self.skip(&open.name, SkipReason::Shortened);
            }
        }
        open.left -= read;
        if open.left == 0 {
            tar::write_padding(&mut self.output.plain, open.size);
        }
        Ok(())
    }

    /// Packs the next entry; returns `false` after the last one.
    fn pack_next(&mut self) -> Result<bool, FileError> {
        let Some(level) = self.levels.last_mut() else { return Ok(false) };
        let Some(read) = level.names.read() else {
            self.levels.pop();
            return Ok(true);
        };
        let name = OsString::from_vec(read?.file_name().to_bytes().to_vec());
        let path = level.path.join(&name);
        if name == "." || name == ".." || !self.workspace.may_see(&path) {
            return Ok(true);
        }
        // Ignores what was removed meanwhile.
        if let Some(entry) = level.entry.lookup(&name)? {
            self.pack_entry(path, entry)?;
        }
        Ok(true)
    }

    fn pack_entry(&mut self, path: PathBuf, entry: Entry) -> Result<(), FileError> {
        let relative = path.strip_prefix(&self.top).unwrap_or(&path).to_owned();
        match entry.kind() {
            FileType::Directory => {
                let is_too_deep =
                    self.levels.len() >= MAX_DEPTH || path.as_os_str().len() >= MAX_PATH;
                self.write_member(&relative, Kind::Directory, OsStr::new(""), &entry)?;
                if is_too_deep {
                    self.skip(&relative, SkipReason::TooDeep);
                } else if let Some(level) = self.readable(&relative, Level::open(entry, path))? {
                    self.levels.push(level);
                }
            }
            FileType::RegularFile => {
                if let Some(file) =
                    self.readable(&relative, entry.open().map_err(FileError::from))?
                {
                    self.write_member(&relative, Kind::File, OsStr::new(""), &entry)?;
                    let size = u64::try_from(entry.stat.st_size).unwrap_or_default();
                    self.count_content(size)?;
                    let open = OpenFile { file, name: relative, size, left: size, is_short: false };
                    self.file = (size > 0).then_some(open);
                }
            }
            FileType::Symlink => {
                let to = entry.link_target()?;
                self.write_member(&relative, Kind::Symlink, &to, &entry)?;
            }
            _ => self.skip(&relative, SkipReason::Special),
        }
        Ok(())
    }

    /// The opened value; `None` if the session's user may not open it.
    fn readable<T>(
        &mut self,
        path: &Path,
        opened: Result<T, FileError>,
    ) -> Result<Option<T>, FileError> {
        match opened {
            Err(error) if error.reason == Reason::FilePermission => {
                self.skip(path, SkipReason::Permission);
                Ok(None)
            }
            opened => opened.map(Some),
        }
    }

    fn write_member(
        &mut self,
        path: &Path,
        kind: Kind,
        to: &OsStr,
        entry: &Entry,
    ) -> Result<(), FileError> {
        self.summary.entries += 1;
        if self.summary.entries.cast_unsigned() > MAX_ENTRIES {
            return Err(Reason::ArchiveTooLarge.into());
        }
        let size = if kind == Kind::File {
            u64::try_from(entry.stat.st_size).unwrap_or_default()
        } else {
            0
        };
        let member = Member {
            name: path.as_os_str().as_bytes().to_vec(),
            link: to.as_bytes().to_vec(),
            kind,
            size,
            mode: entry.stat.st_mode & 0o777,
            modified: entry.stat.st_mtime,
        };
        tar::write_member(&mut self.output.plain, &member);
        Ok(())
    }

    /// Counts the content of a file before it is packed: a sparse file announces any size.
    fn count_content(&mut self, size: u64) -> Result<(), FileError> {
        let total = self.summary.content_bytes.cast_unsigned().saturating_add(size);
        if total > MAX_BYTES {
            return Err(Reason::ArchiveTooLarge.into());
        }
        self.summary.content_bytes = total.cast_signed();
        Ok(())
    }

    fn skip(&mut self, path: &Path, reason: SkipReason) {
        self.summary.skipped_count += 1;
        if self.summary.skipped.len() < MAX_SKIPPED {
            let path = path.to_string_lossy().chars().take(MAX_SHOWN).collect();
            self.summary.skipped.push(v1::SkippedFile { path, reason: reason.into() });
        }
    }
}

impl Level {
    fn open(entry: Entry, path: PathBuf) -> Result<Self, FileError> {
        Ok(Self { names: Dir::new(entry.open()?)?, entry, path })
    }
}

impl Output {
    /// Takes what can be sent.
    fn take_ready(&mut self, is_last: bool) -> io::Result<Bytes> {
        let Some(mut encoder) = self.encoder.take() else {
            return Ok(take(&mut self.plain).into());
        };
        encoder.write_all(&self.plain)?;
        self.plain.clear();
        if is_last {
            return Ok(encoder.finish()?.into());
        }
        let ready = take(encoder.get_mut());
        self.encoder = Some(encoder);
        Ok(ready.into())
    }
}
