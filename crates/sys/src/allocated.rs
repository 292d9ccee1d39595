//! What the files below a directory use, although their owner may change the tree meanwhile.

use std::{
    collections::HashSet,
    ffi::{CStr, OsStr},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};

use crate::resolve_beneath;

/// The size that `st_blocks` counts in.
const BLOCK: u64 = 512;
/// The deepest tree that is measured. Each level costs a descriptor.
const MAX_DEPTH: usize = 256;
/// The most entries that are looked at.
const MAX_ENTRIES: u64 = 20_000_000;
/// Files with several names that are remembered, so that they count once. Others count for each name.
const MAX_LINKED: usize = 100_000;

/// What a measurement found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocated {
    /// The bytes that are allocated, at most the limit.
    Bytes(u64),
    /// More than the limit, or a tree that is too deep or too large to be measured.
    OverLimit,
    /// The measurement was stopped.
    Stopped,
}

/// Measures a directory up to a limit. Counts blocks, so that a sparse file counts what it uses, and a file
/// with several names once. Follows no link and stays on one mount. A directory that this process may not
/// read counts nothing.
///
/// # Errors
/// The directory itself cannot be read.
pub fn allocated(directory: &OwnedFd, max_bytes: u64, stop: &AtomicBool) -> Result<Allocated, Errno> {
    let mut scan = Scan { bytes: 0, entries: 0, linked: HashSet::new(), max_bytes };
    let mut open = vec![read_dir(directory, Path::new("."))?];
    while let Some(directory) = open.last_mut() {
        let Some(entry) = directory.read() else {
            open.pop();
            continue;
        };
        // The rest of a directory that cannot be read any more is what it had no time to become.
        let Ok(entry) = entry else {
            open.pop();
            continue;
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Some(below) = scan.add(directory, name) else {
            continue;
        };
        if stop.load(Ordering::Relaxed) {
            return Ok(Allocated::Stopped);
        }
        if scan.is_over() || open.len() >= MAX_DEPTH {
            return Ok(Allocated::OverLimit);
        }
        open.extend(below);
    }
    Ok(Allocated::Bytes(scan.bytes))
}

struct Scan {
    bytes: u64,
    entries: u64,
    linked: HashSet<(u64, u64)>,
    max_bytes: u64,
}

impl Scan {
    /// Counts an entry. Returns a directory that was opened; `None` if the entry is gone.
    fn add(&mut self, directory: &Dir, name: &CStr) -> Option<Option<Dir>> {
        let fd = directory.fd().ok()?;
        let stat = rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        self.entries += 1;
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if is_directory || self.is_first_name(&stat) {
            self.bytes = self.bytes.saturating_add(stat.st_blocks.unsigned_abs().saturating_mul(BLOCK));
        }
        let name = Path::new(OsStr::from_bytes(name.to_bytes()));
        Some(is_directory.then(|| read_dir(fd, name).ok()).flatten())
    }

    fn is_first_name(&mut self, stat: &Stat) -> bool {
        stat.st_nlink < 2 || self.linked.len() >= MAX_LINKED || self.linked.insert((stat.st_dev, stat.st_ino))
    }

    fn is_over(&self) -> bool {
        self.bytes > self.max_bytes || self.entries > MAX_ENTRIES
    }
}

fn read_dir(directory: impl AsFd, path: &Path) -> Result<Dir, Errno> {
    let place = resolve_beneath::open_directory_without_symlinks(directory, path)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Dir::new(rustix::fs::openat(&place, ".", flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    fn measure(path: &Path, max: u64) -> Allocated {
        let directory = resolve_beneath::open_directory(path).unwrap();
        allocated(&directory, max, &AtomicBool::new(false)).unwrap()
    }

    fn bytes(path: &Path) -> u64 {
        match measure(path, u64::MAX) {
            Allocated::Bytes(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn blocks_count_once_and_links_lead_nowhere() {
        let temp = tempfile::tempdir().unwrap();
        let (inside, outside) = (temp.path().join("in"), temp.path().join("out"));
        fs::create_dir_all(inside.join("a/b")).unwrap();
        fs::create_dir_all(&outside).unwrap();
        fs::write(outside.join("large"), vec![1; 4 << 20]).unwrap();
        let empty = bytes(&inside);
        fs::write(inside.join("a/b/file"), vec![1; 1 << 20]).unwrap();
        let one = bytes(&inside);
        assert!((empty + (1 << 20)..empty + (2 << 20)).contains(&one), "{empty} {one}");
        fs::hard_link(inside.join("a/b/file"), inside.join("name")).unwrap();
        symlink(&outside, inside.join("link")).unwrap();
        fs::File::create(inside.join("hole")).unwrap().set_len(1 << 30).unwrap();
        assert!(bytes(&inside) < one + (64 << 10), "{}", bytes(&inside));
        assert_eq!(measure(&inside, 1 << 20), Allocated::OverLimit);
    }

    #[test]
    fn tree_that_is_too_deep_is_over_every_limit() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join("a/".repeat(MAX_DEPTH + 1))).unwrap();
        assert_eq!(measure(temp.path(), u64::MAX), Allocated::OverLimit);
    }

    #[test]
    fn measurement_can_be_stopped() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir(temp.path().join("a")).unwrap();
        let directory = resolve_beneath::open_directory(temp.path()).unwrap();
        assert_eq!(allocated(&directory, u64::MAX, &AtomicBool::new(true)), Ok(Allocated::Stopped));
    }
}
