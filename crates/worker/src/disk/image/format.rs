//! Makes the files of images: formats one for each size, and copies it.

use std::{
    env,
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use codelia_policy::DiskLimits;
use rustix::{
    fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek},
    io::Errno,
};
use uuid::Uuid;

use crate::file_work::if_exists;

const BLOCK: u64 = 4096;
const INODE: u64 = 256;
/// One group has this many blocks.
const GROUP: u64 = 8 * BLOCK;
/// Inodes that ext4 keeps for itself.
pub(super) const RESERVED_INODES: u64 = 10;
/// The directories of the session and `lost+found`.
const OWN_INODES: u64 = 8;
/// ext4 cannot be larger, and neither can a file on it.
const MAX_BYTES: u64 = 8 << 40;
/// Formatted files of other sizes that are kept.
const MAX_BLANKS: usize = 8;
const BLANK: &str = "blank-";
/// Starts the name of a file that is being made.
pub(super) const NEW: &str = "new-";
/// `e2fsck` found nothing that it could not repair.
const REPAIRED: i32 = 1;

/// The programs that make and check file systems.
#[derive(Debug)]
pub(super) struct Formatter {
    mkfs: PathBuf,
    fsck: PathBuf,
}

impl Formatter {
    /// Looks for the programs in `PATH` and where Debian has them.
    pub(super) fn find() -> io::Result<Self> {
        Ok(Self { mkfs: program("mkfs.ext4")?, fsck: program("e2fsck")? })
    }

    /// Creates an image with room for `limits`. `directory` holds images.
    pub(super) fn create(
        &self,
        directory: &Path,
        image: &Path,
        limits: DiskLimits,
    ) -> io::Result<()> {
        let size = Size::with_room_for(limits)?;
        let blank = directory.join(format!("{BLANK}{}-{}", size.blocks, size.inodes));
        if !blank.try_exists()? {
            remove_old_blanks(directory)?;
            let new = directory.join(format!("{NEW}{}", Uuid::new_v4()));
            remove_on_error(&new, self.format(&new, size).and_then(|()| fs::rename(&new, &blank)))?;
        }
        let new = directory.join(format!("{NEW}{}", Uuid::new_v4()));
        remove_on_error(&new, copy(&blank, &new).and_then(|()| fs::rename(&new, image)))
    }

    fn format(&self, path: &Path, size: Size) -> io::Result<()> {
        let file = create_file(path)?;
        file.set_len(size.blocks * BLOCK)?;
        // No journal: what a crash of the host loses is repaired by `check`. Nothing is reserved
        // for root, and inode tables stay holes.
        let features = "^has_journal,^resize_inode,^orphan_file";
        let made = Command::new(&self.mkfs)
            .args(["-q", "-F", "-m", "0", "-b", "4096", "-I", "256", "-O", features])
            .args(["-E", "lazy_itable_init=1,nodiscard", "-N", &size.inodes.to_string()])
            .arg(path)
            .env_clear()
            .stdin(Stdio::null())
            .output()?;
        if made.status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "mkfs.ext4: {}",
            String::from_utf8_lossy(&made.stderr).trim()
        )))
    }

    /// Repairs what a crash of the host left. Nobody may have the image mounted.
    pub(super) fn check(&self, image: &Path) -> io::Result<()> {
        let checked = Command::new(&self.fsck)
            .arg("-p")
            .arg(image)
            .env_clear()
            .stdin(Stdio::null())
            .output()?;
        if checked.status.code().is_some_and(|code| code <= REPAIRED) {
            return Ok(());
        }
        let found = String::from_utf8_lossy(&checked.stdout).trim().to_owned();
        Err(io::Error::other(format!("the disk image is damaged: {found}")))
    }
}

/// The size of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    blocks: u64,
    inodes: u64,
}

impl Size {
    /// The size of a file system in which files can have `limits`.
    fn with_room_for(limits: DiskLimits) -> io::Result<Self> {
        if limits.bytes > MAX_BYTES {
            let message = "limits.disk_bytes: an image holds at most 8 TiB (lower it, or choose another worker.disk)";
            return Err(io::Error::new(ErrorKind::InvalidInput, message));
        }
        let data = limits.bytes.div_ceil(BLOCK);
        // ext4 has at most one inode for each block.
        let inodes = limits.inodes.min(data.max(64)) + RESERVED_INODES + OWN_INODES;
        let tables = (inodes * INODE).div_ceil(BLOCK);
        let groups = (data + tables).div_ceil(GROUP) + 1;
        // Bitmaps, a partly used block of each table, and some copies of the group descriptors.
        let descriptors = (groups * 64).div_ceil(BLOCK) * 12;
        Ok(Self { blocks: data + tables + groups * 3 + descriptors + 32, inodes })
    }
}

fn program(name: &str) -> io::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let found =
        env::split_paths(&path).chain(system).map(|dir| dir.join(name)).find(|path| path.is_file());
    found.ok_or_else(|| io::Error::new(ErrorKind::NotFound, format!("{name} not found")))
}

fn create_file(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
}

fn remove_on_error(path: &Path, done: io::Result<()>) -> io::Result<()> {
    if done.is_err() {
        // The file may not exist.
        let _ = fs::remove_file(path);
    }
    done
}

/// Callers choose sizes: only some formatted files are kept.
fn remove_old_blanks(directory: &Path) -> io::Result<()> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(BLANK) {
            found.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    found.sort();
    let surplus = (found.len() + 1).saturating_sub(MAX_BLANKS);
    for (_, path) in found.into_iter().take(surplus) {
        if_exists(fs::remove_file(path))?;
    }
    Ok(())
}

/// Copies a sparse file with its holes, or has the file system share its blocks.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let from = File::open(from)?;
    let to = create_file(to)?;
    if ioctl_ficlone(&to, &from).is_ok() {
        return Ok(());
    }
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut at = 0;
    while at < length {
        let start = match seek(&from, SeekFrom::Data(at)) {
            // Only a hole is left.
            Err(Errno::NXIO) => break,
            start => start?,
        };
        let end = seek(&from, SeekFrom::Hole(start))?;
        copy_range(&from, &to, start, end)?;
        at = end;
    }
    Ok(())
}

fn copy_range(from: &File, to: &File, mut start: u64, end: u64) -> io::Result<()> {
    let mut target = start;
    while start < end {
        let length = usize::try_from(end - start).unwrap_or(usize::MAX);
        if copy_file_range(from, Some(&mut start), to, Some(&mut target), length)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_large_limit_is_refused() {
        let refused = Size::with_room_for(DiskLimits { bytes: MAX_BYTES + 1, inodes: 1 })
            .unwrap_err()
            .to_string();
        assert!(refused.contains("limits.disk_bytes"), "{refused}");
        assert!(Size::with_room_for(DiskLimits { bytes: MAX_BYTES, inodes: u64::MAX }).is_ok());
    }

    #[test]
    fn copies_keep_holes() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
        let file = create_file(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"middle", 32 << 20).unwrap();
        copy(&from, &to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), fs::read(&from).unwrap());
        assert!(fs::metadata(&to).unwrap().blocks() * 512 < 1 << 20);
    }

    #[test]
    fn old_blanks_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..20 {
            remove_old_blanks(dir.path()).unwrap();
            create_file(&dir.path().join(format!("{BLANK}{number}"))).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), MAX_BLANKS);
    }
}
