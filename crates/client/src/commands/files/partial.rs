//! A partial download: a hidden file next to its destination, whose name stands for the version of
//! the file that it is a part of.

use std::{
    ffi::OsString,
    fs::{File as LocalContent, OpenOptions},
    io::{Seek, SeekFrom, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    fs::{CWD, FlockOperation, OFlags, RenameFlags, flock, renameat_with},
    io::Errno,
};

use super::{download::LocalFile, hash::hash, limits::MODE_MASK};

const SUFFIX: &str = ".part";
/// Permissions that a partial file has at least, so that the next copy can continue it.
const OWNER: u32 = 0o600;

/// The part of a file that has arrived.
#[derive(Debug)]
pub(super) struct Partial {
    content: LocalContent,
    path: PathBuf,
    shown: String,
    pub(super) length: u64,
    mode: u32,
}

impl Partial {
    /// Opens the part of this version of a file, or creates it. Removes parts of other versions.
    pub(super) fn open(target: &LocalFile, version: u64, mode: u32, size: u64) -> Result<Self> {
        let cannot = || format!("cannot write {}", target.shown);
        let parent = target.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let prefix = format!(".codelia-{:016x}-", hash(&target.path.file_name()));
        let name = OsString::from(format!("{prefix}{version:016x}{SUFFIX}"));
        for entry in std::fs::read_dir(parent).with_context(cannot)?.flatten() {
            let other = entry.file_name();
            let other = other.to_str().unwrap_or_default();
            if other.starts_with(&prefix) && other.ends_with(SUFFIX) && name != *other {
                // The owner may be another user. The file is in nobody's way.
                let _ = std::fs::remove_file(entry.path());
            }
        }
        let path = parent.join(name);
        let mode = mode & MODE_MASK;
        let (content, length) = match continue_partial(&path, size).with_context(cannot)? {
            Some(partial) => partial,
            None => (create_partial(&path, mode).with_context(cannot)?, 0),
        };
        ensure!(
            flock(&content, FlockOperation::NonBlockingLockExclusive).is_ok(),
            "another copy is writing {}",
            target.shown
        );
        Ok(Self { content, path, shown: target.shown.clone(), length, mode })
    }

    pub(super) fn write(&mut self, data: &[u8]) -> Result<()> {
        self.content.write_all(data).with_context(|| format!("cannot write {}", self.shown))
    }

    /// Gives the complete file its name. Never follows a link.
    pub(super) fn publish(self, target: &LocalFile) -> Result<()> {
        let cannot = || format!("cannot write {}", self.shown);
        let mut permissions = self.content.metadata().with_context(cannot)?.permissions();
        permissions.set_mode(permissions.mode() & self.mode);
        self.content.set_permissions(permissions).with_context(cannot)?;
        if target.force {
            return std::fs::rename(&self.path, &target.path).with_context(cannot);
        }
        match renameat_with(CWD, &self.path, CWD, &target.path, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => bail!(target.exists()),
            renamed => renamed.with_context(cannot),
        }
    }
}

/// Opens a partial file at its end, if it is one that this user wrote. `None` if there is none.
fn continue_partial(path: &Path, size: u64) -> std::io::Result<Option<(LocalContent, u64)>> {
    #[allow(clippy::cast_possible_wrap, reason = "the type differs between systems")]
    let flags = OFlags::NOFOLLOW.bits() as i32;
    let Ok(mut content) = OpenOptions::new().write(true).custom_flags(flags).open(path) else {
        return Ok(None);
    };
    let found = content.metadata()?;
    let is_own = found.uid() == rustix::process::geteuid().as_raw();
    if !found.is_file() || !is_own || found.nlink() != 1 || found.len() > size {
        return Ok(None);
    }
    let length = content.seek(SeekFrom::End(0))?;
    Ok(Some((content, length)))
}

/// Creates an empty partial file in place of anything that has its name. The umask applies.
fn create_partial(path: &Path, mode: u32) -> std::io::Result<LocalContent> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(mode | OWNER).open(path)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::{super::download::Target, *};

    fn target(path: &Path, force: bool) -> LocalFile {
        let Target::File(file) = Target::file(path.to_owned(), force) else { panic!("not a file") };
        file
    }

    #[test]
    fn partial_file_continues_and_appears_when_complete() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("out");
        let file = target(&path, false);
        let mut first = Partial::open(&file, 1, 0o444, 6).unwrap();
        first.write(b"one").unwrap();
        assert!(
            Partial::open(&file, 1, 0o444, 6).unwrap_err().to_string().contains("another copy")
        );
        drop(first);
        let mut second = Partial::open(&file, 1, 0o444, 6).unwrap();
        assert_eq!(second.length, 3);
        assert!(!path.exists());
        second.write(b"two").unwrap();
        second.publish(&file).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "onetwo");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o444);
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
        // A file that exists by then is not replaced.
        let third = Partial::open(&file, 1, 0o644, 6).unwrap();
        assert!(third.publish(&file).unwrap_err().to_string().contains("--force"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "onetwo");
    }

    #[test]
    fn parts_of_other_versions_and_planted_files_are_not_continued() {
        let temp = tempfile::tempdir().unwrap();
        let file = target(&temp.path().join("out"), false);
        let mut old = Partial::open(&file, 1, 0o644, 9).unwrap();
        old.write(b"old").unwrap();
        let old = old.path;
        let new = Partial::open(&file, 2, 0o644, 9).unwrap();
        assert_eq!(new.length, 0);
        assert!(!old.exists(), "the part of another version is removed");
        let name = new.path.clone();
        drop(new);
        let victim = temp.path().join("victim");
        fs::write(&victim, "mine").unwrap();
        fs::remove_file(&name).unwrap();
        symlink(&victim, &name).unwrap();
        assert_eq!(Partial::open(&file, 2, 0o644, 9).unwrap().length, 0, "a link is replaced");
        fs::remove_file(&name).unwrap();
        fs::hard_link(&victim, &name).unwrap();
        let mut partial = Partial::open(&file, 2, 0o644, 9).unwrap();
        partial.write(b"new").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
        assert_eq!(Partial::open(&target(&victim, true), 2, 0o644, 2).unwrap().length, 0);
        drop(partial);
        assert_eq!(Partial::open(&file, 2, 0o644, 2).unwrap().length, 0, "longer than the file");
    }
}
