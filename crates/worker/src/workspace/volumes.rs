//! The directories of volumes, `volumes/ID/data`, next to those of sessions. Only the worker can
//! reach them; a session's sandboxes mount them.
//!
//! Their content is hostile: no link in them is followed.

use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt, lchown},
    path::{Path, PathBuf},
};

use codelia_policy::VOLUME_OWNER;
use codelia_sys::resolve_beneath;
use codelia_types::{DiskUsage, VolumeId};
use uuid::Uuid;

use super::trash;
use crate::{disk, file_work::if_exists};

/// Files of a volume that are counted.
const MAX_INODES: u64 = 1_000_000;

/// The directories of volumes on a root.
#[derive(Debug, Clone)]
pub(crate) struct VolumeDirs {
    path: PathBuf,
    trash: PathBuf,
    /// Whether each session has a user of its own.
    are_users_separate: bool,
}

impl VolumeDirs {
    pub(super) fn new(root: &Path, trash: PathBuf, are_users_separate: bool) -> Self {
        Self { path: root.join("volumes"), trash, are_users_separate }
    }

    /// Creates what is missing of a volume's directory, and returns it.
    pub(crate) fn create(&self, id: VolumeId) -> io::Result<PathBuf> {
        let parent = self.path.join(id.to_string());
        DirBuilder::new().recursive(true).mode(0o700).create(&parent)?;
        let data = parent.join("data");
        if data.is_dir() {
            return Ok(data);
        }
        // Complete before it has its name: another worker on this root may use it.
        let new = parent.join(format!("data.{}", Uuid::new_v4()));
        DirBuilder::new().mode(0o700).create(&new)?;
        if self.are_users_separate {
            lchown(&new, Some(VOLUME_OWNER), Some(VOLUME_OWNER))?;
        }
        fs::set_permissions(&new, Permissions::from_mode(0o755))?;
        match fs::rename(&new, &data) {
            Ok(()) => Ok(data),
            // Another worker was first, and a run has written to it.
            Err(_) if data.is_dir() => fs::remove_dir(&new).map(|()| data),
            Err(error) => Err(error),
        }
    }

    /// The volumes that have a directory here.
    pub(crate) fn list(&self) -> io::Result<Vec<VolumeId>> {
        let Some(entries) = if_exists(fs::read_dir(&self.path))? else { return Ok(Vec::new()) };
        let mut ids = Vec::new();
        for entry in entries {
            ids.extend(entry?.file_name().to_str().and_then(|name| name.parse::<VolumeId>().ok()));
        }
        Ok(ids)
    }

    /// Removes the directory of a volume. What a crash leaves is in the trash.
    pub(crate) fn remove(&self, id: VolumeId) -> io::Result<u64> {
        let name = format!("volume-{}", Uuid::new_v4());
        let moved = fs::rename(self.path.join(id.to_string()), self.trash.join(&name));
        if if_exists(moved)?.is_none() {
            return Ok(0);
        }
        trash::remove(&self.trash, Path::new(&name))
    }
}

/// The space that the files of a volume take, in bytes. One with too many files has no room for
/// more.
pub(crate) fn measure(directory: &Path) -> io::Result<u64> {
    let directory = resolve_beneath::open_directory(directory)?;
    let max = DiskUsage { bytes: u64::MAX, inodes: MAX_INODES };
    Ok(disk::measure(&directory, max, || false)?.unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn dirs(root: &Path) -> VolumeDirs {
        let trash = root.join("trash");
        fs::create_dir_all(&trash).unwrap();
        VolumeDirs::new(root, trash, false)
    }

    #[test]
    fn removal_leaves_nothing_and_follows_no_link() {
        let temp = tempfile::tempdir().unwrap();
        let dirs = dirs(temp.path());
        fs::write(temp.path().join("kept"), "kept").unwrap();
        let id = VolumeId::generate();
        let data = dirs.create(id).unwrap();
        assert_eq!(dirs.create(id).unwrap(), data, "it stays");
        symlink(temp.path(), data.join("link")).unwrap();
        fs::create_dir(data.join("closed")).unwrap();
        fs::set_permissions(data.join("closed"), Permissions::from_mode(0o000)).unwrap();
        assert_eq!(dirs.list().unwrap(), [id]);
        dirs.remove(id).unwrap();
        assert_eq!(dirs.remove(id).unwrap(), 0, "a second removal is not an error");
        assert!(dirs.list().unwrap().is_empty());
        assert_eq!(fs::read_dir(temp.path().join("trash")).unwrap().count(), 0);
        assert_eq!(fs::read_to_string(temp.path().join("kept")).unwrap(), "kept");
    }

    #[test]
    fn size_counts_blocks_once_and_stays_inside() {
        let temp = tempfile::tempdir().unwrap();
        let dirs = dirs(temp.path());
        fs::write(temp.path().join("outside"), vec![1; 8 << 20]).unwrap();
        let data = dirs.create(VolumeId::generate()).unwrap();
        let before = measure(&data).unwrap();
        fs::create_dir(data.join("closed")).unwrap();
        fs::write(data.join("closed/file"), vec![1; 2 << 20]).unwrap();
        fs::hard_link(data.join("closed/file"), data.join("again")).unwrap();
        fs::set_permissions(data.join("closed"), Permissions::from_mode(0o000)).unwrap();
        symlink(temp.path(), data.join("link")).unwrap();
        fs::File::create(data.join("sparse")).unwrap().set_len(1 << 40).unwrap();
        let grown = measure(&data).unwrap() - before;
        assert!((2 << 20..3 << 20).contains(&grown), "{grown}");
    }
}
