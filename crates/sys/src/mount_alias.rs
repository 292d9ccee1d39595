//! Other paths of a file: a file system may be mounted in several places.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use crate::{
    call::from_io,
    proc_self::{MountLine, unescape},
};

/// The mounts that this process sees.
#[derive(Debug)]
pub struct MountAliases(Vec<Mounted>);

#[derive(Debug)]
struct Mounted {
    device: Vec<u8>,
    /// The directory of the file system that is mounted.
    root: PathBuf,
    target: PathBuf,
}

/// A path of a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Alias {
    /// The path.
    pub path: PathBuf,
    /// The mount point that it is below.
    pub mount: PathBuf,
}

impl MountAliases {
    /// Reads the mount table.
    ///
    /// # Errors
    /// As `open(2)` and `read(2)`.
    pub fn read() -> Result<Self, Errno> {
        fs::read("/proc/self/mountinfo").map(|table| Self::parse(&table)).map_err(from_io)
    }

    fn parse(table: &[u8]) -> Self {
        let mounted = |line: MountLine<'_>| Mounted {
            device: line.device.to_owned(),
            root: unescape(line.root),
            target: unescape(line.target),
        };
        Self(MountLine::parse_all(table).map(mounted).collect())
    }

    /// All paths of the file at `path`, which must have no symbolic link in it.
    #[must_use]
    pub fn find(&self, path: &Path) -> Vec<Alias> {
        let length = |mount: &&Mounted| mount.target.as_os_str().len();
        // Of mounts at one path the last one is visible, and `max_by_key` returns the last.
        let Some(own) =
            self.0.iter().filter(|mount| path.starts_with(&mount.target)).max_by_key(length)
        else {
            return Vec::new();
        };
        let Some(inner) = rebase(path, &own.target, &own.root) else { return Vec::new() };
        let same = self.0.iter().filter(|mount| mount.device == own.device);
        let alias = |mount: &Mounted| {
            Some(Alias {
                path: rebase(&inner, &mount.root, &mount.target)?,
                mount: mount.target.clone(),
            })
        };
        same.filter_map(alias).collect()
    }
}

/// Replaces the prefix `from` of the path by `to`. Adds no slash at the end.
fn rebase(path: &Path, from: &Path, to: &Path) -> Option<PathBuf> {
    let rest = path.strip_prefix(from).ok()?;
    Some(to.components().chain(rest.components()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_mount_is_an_alias() {
        let table =
            b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:1 /srv/data /mnt/again rw - ext4 /dev/a rw\n\
            3 1 8:2 / /srv/other rw - ext4 /dev/b rw\n4 1 8:1 /home /h\\040h ro - ext4 /dev/a rw\n";
        let aliases = MountAliases::parse(table);
        let of = |path: &str| {
            let paths = aliases.find(Path::new(path)).into_iter().map(|alias| alias.path);
            paths.collect::<Vec<_>>()
        };
        assert_eq!(of("/srv/data/x"), ["/srv/data/x", "/mnt/again/x"].map(PathBuf::from));
        assert_eq!(of("/mnt/again"), ["/srv/data", "/mnt/again"].map(PathBuf::from));
        assert_eq!(of("/home/ann"), ["/home/ann", "/h h/ann"].map(PathBuf::from));
        assert_eq!(of("/srv/other/x"), [PathBuf::from("/srv/other/x")]);
    }
}
