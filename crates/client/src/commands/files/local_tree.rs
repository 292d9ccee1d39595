//! Local directories, entered one component at a time and never through a link.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use rustix::{
    fs::{
        AtFlags, Dir, FileType, Mode, OFlags, RawMode, Stat, fstat, mkdirat, open, openat, statat,
    },
    io::Errno,
};

use super::{
    download::{LocalFile, Target},
    limits::{MAX_DEPTH, MAX_ENTRIES},
    local_entry::{LocalEntry, LocalKind},
};

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Permissions that a new directory has at least, so that files can be created in it.
const OWNER: u32 = 0o700;

/// A directory that the user named.
#[derive(Debug)]
pub(super) struct LocalTree {
    root: OwnedFd,
    path: PathBuf,
    /// Files that this copy has created, by device and inode. Two names can be the same file on a
    /// file system that ignores case.
    created: HashMap<(u64, u64), PathBuf>,
}

impl LocalTree {
    /// Opens a directory. The user wrote its path, so links in it are followed.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let root = open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let root = root.with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { root, path: path.to_owned(), created: HashMap::new() })
    }

    /// The path of a file below the root, for messages.
    pub(super) fn shown(&self, path: &[String]) -> PathBuf {
        path.iter().fold(self.path.clone(), |path, name| path.join(name))
    }

    /// Lists everything below the root. Directories come before their content; links are not
    /// followed. The error names a file that cannot be copied.
    pub(super) fn walk(&self) -> Result<Vec<LocalEntry>> {
        let mut found: Vec<LocalEntry> = Vec::new();
        let mut open: Vec<Vec<String>> = vec![Vec::new()];
        while let Some(directory) = open.pop() {
            let cannot = || format!("cannot read {}", self.shown(&directory).display());
            let fd = self.enter(&directory).with_context(cannot)?;
            for entry in Dir::read_from(&fd).with_context(cannot)? {
                let entry = entry.with_context(cannot)?;
                if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    continue;
                }
                let name = entry.file_name().to_str();
                let name =
                    name.with_context(|| format!("{}: a file name is not UTF-8", cannot()))?;
                let mut path = directory.clone();
                path.push(name.to_owned());
                let stat = statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW)
                    .with_context(|| format!("cannot read {}", self.shown(&path).display()))?;
                let kind = match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Directory => LocalKind::Directory,
                    FileType::RegularFile => LocalKind::File,
                    _ => LocalKind::Other,
                };
                if kind == LocalKind::Directory {
                    if path.len() >= MAX_DEPTH {
                        bail!(
                            "{} is deeper than {MAX_DEPTH} directories",
                            self.shown(&path).display()
                        );
                    }
                    open.push(path.clone());
                }
                found.push(LocalEntry {
                    path,
                    kind,
                    size: u64::try_from(stat.st_size).unwrap_or_default(),
                });
            }
            if found.len() > MAX_ENTRIES {
                bail!(
                    "{} has more than {MAX_ENTRIES} entries: use a smaller one, or `tar`",
                    self.path.display()
                );
            }
        }
        Ok(found)
    }

    /// Opens a regular file for reading.
    pub(super) fn read(&self, path: &[String]) -> Result<File> {
        let shown = self.shown(path);
        let cannot = || format!("cannot read {}", shown.display());
        let (name, directory) = path.split_last().with_context(cannot)?;
        let directory = self.enter(directory).with_context(cannot)?;
        // A FIFO that has taken its place must not block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(directory, name, flags, Mode::empty()).with_context(cannot)?);
        if !file.metadata().with_context(cannot)?.is_file() {
            bail!("{}: not a regular file any more", cannot());
        }
        Ok(file)
    }

    /// Creates a directory, or accepts the one that exists.
    pub(super) fn create_directory(&mut self, path: &[String], mode: u32) -> Result<()> {
        let shown = self.shown(path);
        let cannot =
            || format!("cannot create the directory {} (links are not followed)", shown.display());
        if let Some((name, parent)) = path.split_last() {
            let parent = self.enter(parent).with_context(cannot)?;
            match mkdirat(&parent, name, Mode::from_raw_mode(raw_mode(mode | OWNER))) {
                Err(Errno::EXIST) | Ok(()) => {}
                Err(error) => return Err(error).with_context(cannot),
            }
        }
        let stat = fstat(self.enter(path).with_context(cannot)?).with_context(cannot)?;
        self.record(identity(&stat), shown)
    }

    /// The target of a download.
    pub(super) fn target(&self, path: &[String], force: bool) -> Result<Target> {
        let shown = self.shown(path);
        let cannot = || format!("cannot write {}", shown.display());
        let (name, directory) = path.split_last().with_context(cannot)?;
        let directory = self.enter(directory).with_context(cannot)?;
        if let Ok(stat) = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)
            && let Some(other) = self.created.get(&identity(&stat))
        {
            bail!("{}: on this file system it is the same file as {}", cannot(), other.display());
        }
        let path = if cfg!(target_os = "linux") {
            // The open directory, whatever is done to its path meanwhile.
            Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name)
        } else {
            shown.clone()
        };
        let file = LocalFile {
            path,
            shown: shown.display().to_string(),
            force,
            _directory: Some(directory.into()),
        };
        Ok(Target::File(file))
    }

    /// Remembers a file that was downloaded.
    pub(super) fn record_file(&mut self, path: &[String]) -> Result<()> {
        let Some((name, directory)) = path.split_last() else { return Ok(()) };
        let stat = statat(self.enter(directory)?, name, AtFlags::SYMLINK_NOFOLLOW)?;
        self.record(identity(&stat), self.shown(path))
    }

    fn record(&mut self, identity: (u64, u64), path: PathBuf) -> Result<()> {
        match self.created.insert(identity, path.clone()) {
            Some(other) if other != path => {
                bail!(
                    "{} and {} are the same file on this file system",
                    path.display(),
                    other.display()
                )
            }
            _ => Ok(()),
        }
    }

    fn enter(&self, path: &[String]) -> io::Result<OwnedFd> {
        let mut directory = self.root.as_fd().try_clone_to_owned()?;
        for name in path {
            directory = openat(&directory, name, DIRECTORY, Mode::empty())?;
        }
        Ok(directory)
    }
}

/// Device and inode.
fn identity(stat: &Stat) -> (u64, u64) {
    #[allow(
        clippy::unnecessary_cast,
        clippy::cast_sign_loss,
        reason = "the type differs between systems"
    )]
    let device = stat.st_dev as u64;
    (device, stat.st_ino)
}

/// Permissions, at most 0777, as the system has them.
fn raw_mode(mode: u32) -> RawMode {
    #[allow(
        clippy::unnecessary_cast,
        clippy::cast_possible_truncation,
        reason = "the type differs between systems"
    )]
    let mode = mode as RawMode;
    mode
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    fn names(path: &str) -> Vec<String> {
        path.split('/').map(str::to_owned).collect()
    }

    #[test]
    fn links_are_listed_but_never_followed() {
        let temp = tempfile::tempdir().unwrap();
        let inside = temp.path().join("inside");
        let outside = temp.path().join("outside");
        fs::create_dir_all(inside.join("sub")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("secret"), "x").unwrap();
        fs::write(inside.join("sub/file"), "y").unwrap();
        symlink(&outside, inside.join("link")).unwrap();
        symlink(outside.join("secret"), inside.join("sub/alias")).unwrap();
        let mut tree = LocalTree::open(&inside).unwrap();
        let mut found: Vec<_> =
            tree.walk().unwrap().into_iter().map(|e| (e.path.join("/"), e.kind)).collect();
        found.sort_by(|a, b| a.0.cmp(&b.0));
        let expected = [
            ("link", LocalKind::Other),
            ("sub", LocalKind::Directory),
            ("sub/alias", LocalKind::Other),
            ("sub/file", LocalKind::File),
        ];
        assert_eq!(found, expected.map(|(path, kind)| (path.to_owned(), kind)));
        assert!(tree.read(&names("sub/file")).is_ok());
        for through in ["link/secret", "sub/alias"] {
            assert!(tree.read(&names(through)).is_err(), "{through}");
        }
        assert!(tree.target(&names("link/new"), true).is_err());
        assert!(tree.create_directory(&names("link"), 0o755).is_err());
        assert!(tree.create_directory(&names("link/new"), 0o755).is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    }

    /// A hard link stands for a second name of the same file, as on a file system that ignores
    /// case.
    #[test]
    fn second_name_of_a_copied_file_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let mut tree = LocalTree::open(temp.path()).unwrap();
        fs::write(temp.path().join("a"), "first").unwrap();
        tree.record_file(&names("a")).unwrap();
        fs::hard_link(temp.path().join("a"), temp.path().join("A")).unwrap();
        let error = tree.target(&names("A"), true).unwrap_err().to_string();
        assert!(error.contains("the same file"), "{error}");
        assert!(tree.target(&names("b"), true).is_ok());
    }
}
