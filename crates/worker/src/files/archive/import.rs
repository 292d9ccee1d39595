//! Unpacks an archive into a directory. Nothing that a member says is trusted: its directory is
//! opened without following any link, and everything is created by the session's user.

use std::{
    ffi::{OsStr, OsString},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Component, Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use codelia_policy::{FileAccess, WORKSPACE};
use codelia_proto::v1;
use codelia_sys::{
    Errno,
    resolve_beneath::{
        Entry, FinalSymlink, ResolvedPath, open_directory_without_symlinks, proc_fd_path,
    },
};
use codelia_types::Reason;
use rustix::fs::{AtFlags, CWD, FileType, Mode, linkat, mkdirat, symlinkat, unlinkat};

use super::{
    super::{
        error::{FileError, ImportProgress},
        limiter::CallShare,
        reservation::NEW_ENTRY,
        upload::{Upload, WriteOptions},
        workspace::Workspace,
    },
    decompress::Input,
    limits::{MAX_BYTES, MAX_DEPTH, MAX_DURATION, MAX_ENTRIES, MAX_PATH},
    staging::Staging,
    tar::{Kind, Member, Reader, Receiver},
};

/// The kernel's limit for a name.
const MAX_NAME: usize = 255;
/// Characters of a member's name in an error.
const MAX_SHOWN: usize = 200;
/// Directories that members need and the archive does not have.
const DIRECTORY_MODE: u32 = 0o755;
/// The owner can always write to a directory, so that its content can be created.
const OWNER: u32 = 0o700;

/// An archive that is being unpacked.
pub(in super::super) struct Import {
    input: Input,
    reader: Reader,
    tree: Tree,
    /// Bytes of the archive so far, without compression.
    bytes: u64,
    deadline: Instant,
    _permit: CallShare,
}

/// The directory that members are created in.
#[derive(Debug)]
struct Tree {
    workspace: Arc<Workspace>,
    directory: OwnedFd,
    /// The path of the directory in the workspace, now or once it is published.
    path: PathBuf,
    staging: Option<Staging>,
    overwrite: bool,
    /// The file that is being written, and when it was last modified.
    file: Option<(Upload, i64)>,
    /// The name of the current member.
    member: Vec<u8>,
    entries: u64,
    /// Members that are complete.
    created: u64,
    content_bytes: u64,
}

impl Import {
    /// Begins to unpack into a directory.
    pub(in super::super) fn begin(
        workspace: Workspace,
        permit: CallShare,
        open: &v1::ImportFilesOpen,
    ) -> Result<Self, FileError> {
        let mut target = workspace.as_session(|| {
            workspace.resolve(&open.path, FinalSymlink::Follow, FileAccess::Write)
        })?;
        let path = target.path.clone();
        let (directory, staging) = match target.entry.take() {
            None => {
                let staging = Staging::create(&workspace, target)?;
                (staging.tree()?, Some(staging))
            }
            Some(entry) if entry.kind() == FileType::Directory => {
                (open_directory_without_symlinks(&entry, Path::new(""))?, None)
            }
            Some(_) => return Err(Reason::NotADirectory.into()),
        };
        let tree = Tree {
            workspace: Arc::new(workspace),
            directory,
            path,
            // Of two members with the same name the later one wins.
            overwrite: open.overwrite || staging.is_some(),
            staging,
            file: None,
            member: Vec::new(),
            entries: 0,
            created: 0,
            content_bytes: 0,
        };
        Ok(Self {
            input: Input::default(),
            reader: Reader::default(),
            tree,
            bytes: 0,
            deadline: Instant::now() + MAX_DURATION,
            _permit: permit,
        })
    }

    /// Unpacks the next piece.
    pub(in super::super) fn append(&mut self, data: &[u8]) -> Result<(), FileError> {
        let Self { input, reader, tree, bytes, deadline, .. } = self;
        tree.workspace.check_held()?;
        let read = input.read(data, &mut |data| {
            *bytes += data.len() as u64;
            if *bytes > MAX_BYTES {
                return Err(Reason::ArchiveTooLarge.into());
            }
            if Instant::now() > *deadline {
                return Err(Reason::FileCallTimeout.into());
            }
            reader.read(data, tree)
        });
        read.map_err(|error| error.after(self.tree.progress()))
    }

    /// Completes the import.
    pub(in super::super) fn finish(mut self) -> Result<v1::ImportFilesResponse, FileError> {
        self.tree.member.clear();
        let complete = self.input.finish().and_then(|()| self.reader.finish());
        complete.map_err(|error| error.after(self.tree.progress()))?;
        let progress = self.tree.progress();
        if let Some(staging) = self.tree.staging.take() {
            staging.publish(&self.tree.workspace).map_err(|error| error.after(progress))?;
        }
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let entries = count(self.tree.entries);
        let content_bytes = count(self.tree.content_bytes);
        Ok(v1::ImportFilesResponse { entries, content_bytes })
    }
}

impl Tree {
    /// How far the import got; nothing remains of a staged one.
    fn progress(&self) -> ImportProgress {
        let member = String::from_utf8_lossy(&self.member).chars().take(MAX_SHOWN).collect();
        let created = if self.staging.is_some() { 0 } else { self.created };
        ImportProgress { member, entries: created }
    }

    /// The path of a member from the directory; empty for the directory itself.
    fn member_path(&self, name: &[u8]) -> Result<PathBuf, FileError> {
        let mut path = PathBuf::new();
        if name.contains(&0) {
            return Err(Reason::ArchiveInvalid.into());
        }
        for component in Path::new(OsStr::from_bytes(name)).components() {
            match component {
                Component::CurDir => {}
                Component::Normal(name) if name.len() > MAX_NAME => {
                    return Err(Reason::ArchiveTooLarge.into());
                }
                Component::Normal(name) => path.push(name),
                Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                    return Err(Reason::PathLeadsOut.into());
                }
            }
        }
        let length = WORKSPACE.len() + self.path.as_os_str().len() + path.as_os_str().len() + 2;
        if path.components().count() > MAX_DEPTH || length > MAX_PATH {
            return Err(Reason::ArchiveTooLarge.into());
        }
        Ok(path)
    }

    fn check_writable(&self, path: &Path) -> Result<(), FileError> {
        self.workspace.check_policy(FileAccess::Write, &self.path.join(path))
    }

    /// Opens the directory of a member, and creates it if it is missing.
    fn parent(&self, path: &Path) -> Result<(OwnedFd, OsString), FileError> {
        let name = path.file_name().ok_or(Reason::PathLeadsOut)?.to_owned();
        let directory = path.parent().unwrap_or(Path::new(""));
        match open_directory_without_symlinks(&self.directory, directory) {
            Err(Errno::NOENT) => Ok((self.make_directories(directory)?, name)),
            opened => Ok((opened.map_err(link_leads_out)?, name)),
        }
    }

    fn make_directories(&self, path: &Path) -> Result<OwnedFd, FileError> {
        let mut directory = open_directory_without_symlinks(&self.directory, Path::new(""))?;
        let mut made = PathBuf::new();
        for name in path {
            made.push(name);
            directory = match open_directory_without_symlinks(&directory, Path::new(name)) {
                Err(Errno::NOENT) => {
                    self.check_writable(&made)?;
                    self.workspace.reservation.take(NEW_ENTRY)?;
                    make_directory(&directory, name, DIRECTORY_MODE)?;
                    open_directory_without_symlinks(&directory, Path::new(name))
                        .map_err(link_leads_out)?
                }
                opened => opened.map_err(link_leads_out)?,
            };
        }
        Ok(directory)
    }

    fn add_directory(&self, path: &Path, mode: u32) -> Result<(), FileError> {
        let (parent, name) = self.parent(path)?;
        self.workspace.reservation.take(NEW_ENTRY)?;
        make_directory(&parent, &name, mode | OWNER)?;
        open_directory_without_symlinks(&parent, Path::new(&name)).map_err(link_leads_out)?;
        Ok(())
    }

    fn begin_file(&self, path: &Path, mode: u32) -> Result<Upload, FileError> {
        let (parent, name) = self.parent(path)?;
        let target = ResolvedPath { parent, name, path: self.path.join(path), entry: None };
        let options =
            WriteOptions { mode: Some(mode), replace: self.overwrite, etag: String::new() };
        Upload::begin_at(&self.workspace, target, options)
    }

    fn add_symlink(&self, path: &Path, to: &[u8]) -> Result<(), FileError> {
        let directory = self.path.join(path.parent().unwrap_or(Path::new("")));
        let to = Path::new(OsStr::from_bytes(to));
        if to.as_os_str().is_empty() || to.as_os_str().len() > MAX_PATH {
            return Err(Reason::ArchiveInvalid.into());
        }
        if leads_out(&directory, to) {
            return Err(Reason::PathLeadsOut.into());
        }
        let (parent, name) = self.parent(path)?;
        self.workspace.reservation.take(NEW_ENTRY)?;
        self.put(&parent, &name, || symlinkat(to, &parent, &name))
    }

    /// Links a file that is in the directory already.
    fn add_hard_link(&self, path: &Path, to: &[u8]) -> Result<(), FileError> {
        let to = self.member_path(to)?;
        if to == path {
            return Ok(());
        }
        // With another name, the file can be read and written.
        self.check_writable(&to)?;
        let name = to.file_name().ok_or(Reason::PathLeadsOut)?;
        let directory = to.parent().unwrap_or(Path::new(""));
        let directory =
            open_directory_without_symlinks(&self.directory, directory).map_err(link_leads_out)?;
        let linked = Entry::from_fd(directory)?.lookup(name)?.ok_or(Reason::FileNotFound)?;
        if linked.kind() != FileType::RegularFile {
            return Err(Reason::PathLeadsOut.into());
        }
        let (parent, name) = self.parent(path)?;
        let follow = AtFlags::SYMLINK_FOLLOW;
        self.put(&parent, &name, || linkat(CWD, proc_fd_path(&linked), &parent, &name, follow))
    }

    /// Creates a link, in place of what has its name if that may be replaced.
    fn put(
        &self,
        parent: &OwnedFd,
        name: &OsStr,
        create: impl Fn() -> Result<(), Errno>,
    ) -> Result<(), FileError> {
        match create() {
            Err(Errno::EXIST) if self.overwrite => {
                unlinkat(parent, name, AtFlags::empty())?;
                Ok(create()?)
            }
            created => Ok(created?),
        }
    }
}

impl Receiver for Tree {
    fn begin(&mut self, member: Member) -> Result<(), FileError> {
        self.member.clone_from(&member.name);
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(Reason::ArchiveTooLarge.into());
        }
        let path = self.member_path(&member.name)?;
        let workspace = self.workspace.clone();
        if path.as_os_str().is_empty() && member.kind == Kind::Directory {
            return Ok(());
        }
        self.check_writable(&path)?;
        workspace.as_session(|| match member.kind {
            Kind::Special => Err(Reason::SpecialFile.into()),
            Kind::Directory => self.add_directory(&path, member.mode),
            Kind::Symlink => self.add_symlink(&path, &member.link),
            Kind::HardLink => self.add_hard_link(&path, &member.link),
            Kind::File => {
                self.file = Some((self.begin_file(&path, member.mode)?, member.modified));
                Ok(())
            }
        })
    }

    fn content(&mut self, data: &[u8]) -> Result<(), FileError> {
        let Some((file, _)) = &mut self.file else { return Ok(()) };
        self.content_bytes += data.len() as u64;
        file.append(&self.workspace, data)
    }

    fn end(&mut self) -> Result<(), FileError> {
        if let Some((file, modified)) = self.file.take() {
            let modified = Duration::from_secs(u64::try_from(modified).unwrap_or_default());
            if let Some(time) = SystemTime::UNIX_EPOCH.checked_add(modified) {
                file.set_modified(time)?;
            }
            file.publish(&self.workspace)?;
        }
        self.created += 1;
        Ok(())
    }
}

/// Creates a directory, or accepts what has its name.
fn make_directory(parent: &OwnedFd, name: &OsStr, mode: u32) -> Result<(), FileError> {
    match mkdirat(parent, name, Mode::from_raw_mode(mode)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// A link where a member needs a directory.
fn link_leads_out(errno: Errno) -> FileError {
    match errno {
        Errno::LOOP => Reason::PathLeadsOut.into(),
        errno => errno.into(),
    }
}

/// Whether a link in this directory of the workspace leads out of the workspace, if no other link
/// is on the way. Those are checked when they are followed.
fn leads_out(directory: &Path, to: &Path) -> bool {
    let (mut depth, to) = match to.strip_prefix(WORKSPACE) {
        Ok(below) => (0, below),
        Err(_) => (directory.components().count(), to),
    };
    for component in to.components() {
        match component {
            Component::RootDir | Component::Prefix(_) => return true,
            Component::CurDir => {}
            Component::Normal(_) => depth += 1,
            Component::ParentDir if depth == 0 => return true,
            Component::ParentDir => depth -= 1,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_by_name() {
        let out = |directory: &str, to: &str| leads_out(Path::new(directory), Path::new(to));
        for (directory, to) in
            [("", ".."), ("a", "../.."), ("a/b", "../../../x"), ("", "/etc"), ("", "/workspacex")]
        {
            assert!(out(directory, to), "{directory} {to}");
        }
        assert!(out("a", "x/../../../y") && out("a", "/workspace/../etc"));
        for (directory, to) in
            [("", "a"), ("a", ".."), ("a/b", "../../x"), ("", "/workspace/x"), ("", "a/../b")]
        {
            assert!(!out(directory, to), "{directory} {to}");
        }
    }
}
