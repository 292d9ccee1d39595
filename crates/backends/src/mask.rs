//! Resolves the paths that a plan hides to what must be masked: a tool or engine masks directories
//! and files differently.

use std::path::{Component, Path, PathBuf};

use codelia_policy::{Mount, PathTrie};
use tokio::task::spawn_blocking;

use crate::{Error, mounts::overlay::VOLUMES_FIELD};

/// A thing to mask, at its path inside the sandbox with symbolic links resolved.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MaskTarget {
    /// A directory, or a path at which the command could create one.
    Directory(PathBuf),
    /// A file.
    File(PathBuf),
    /// Nothing exists there and nothing can be created there.
    Absent,
}

/// As many symbolic links are followed as the kernel follows.
const MAX_LINKS: u32 = 40;

/// More hidden paths than this are resolved off the async runtime: each reads the file system.
const MAX_INLINE: usize = 8;

/// The mask of each mount of a plan, in the same order; `Absent` for mounts that hide nothing.
#[derive(Debug)]
pub(crate) struct Masks(Vec<MaskTarget>);

impl Masks {
    /// Resolves every path that the mounts hide.
    ///
    /// # Errors
    /// As [`MountTable::resolve`].
    pub(crate) async fn resolve(mounts: &[Mount]) -> Result<Self, Error> {
        let hidden = mounts.iter().filter(|mount| matches!(mount, Mount::Hidden { .. })).count();
        if hidden <= MAX_INLINE {
            return Self::resolve_now(mounts);
        }
        let mounts = mounts.to_vec();
        spawn_blocking(move || Self::resolve_now(&mounts)).await.map_err(std::io::Error::from)?
    }

    fn resolve_now(mounts: &[Mount]) -> Result<Self, Error> {
        let mut previous = MountTable::default();
        let mut masks = Vec::with_capacity(mounts.len());
        for mount in mounts {
            masks.push(match mount {
                Mount::Hidden { target, even_if_absent } => {
                    previous.resolve(target, *even_if_absent)?
                }
                _ => MaskTarget::Absent,
            });
            previous.add(mount);
        }
        Ok(Self(masks))
    }

    /// The mounts with their masks.
    pub(crate) fn zip<'a>(
        &'a self,
        mounts: &'a [Mount],
    ) -> impl Iterator<Item = (&'a Mount, &'a MaskTarget)> {
        mounts.iter().zip(&self.0)
    }
}

/// Mounts in the order in which they are made. A later one covers an earlier one.
#[derive(Debug, Default)]
pub(crate) struct MountTable<'a> {
    mounts: Vec<&'a Mount>,
    /// The last mount at each path.
    last: PathTrie<'a, usize>,
}

impl<'a> MountTable<'a> {
    pub(crate) fn add(&mut self, mount: &'a Mount) {
        self.last.insert(mount.target(), self.mounts.len());
        self.mounts.push(mount);
    }

    /// Resolves `target` in these mounts. With `even_if_absent` a path that does not exist but
    /// could be created is masked too.
    ///
    /// # Errors
    /// A symbolic link of the host leaves its mount, so its target inside is unknown. Not an error
    /// without `even_if_absent`: then the path counts as absent.
    pub(crate) fn resolve(&self, target: &Path, even_if_absent: bool) -> Result<MaskTarget, Error> {
        match self.follow_links(target, even_if_absent) {
            Err(Error::Unenforceable { .. }) if !even_if_absent => Ok(MaskTarget::Absent),
            resolved => resolved,
        }
    }

    fn follow_links(&self, target: &Path, even_if_absent: bool) -> Result<MaskTarget, Error> {
        let mut target = target.to_owned();
        for _ in 0..MAX_LINKS {
            match self.mount_of(&target) {
                Some((Mount::Symlink { target: link, to }, rest)) => {
                    target = normalize(&link.parent().unwrap_or(link).join(to).join(rest));
                }
                Some((mount, rest)) => return in_mount(mount, rest, &target, even_if_absent),
                None => return Ok(MaskTarget::Absent),
            }
        }
        Err(Error::Unenforceable { field: "mounts" })
    }

    /// The last mount that contains the path, and the path relative to it.
    fn mount_of<'p>(&self, target: &'p Path) -> Option<(&'a Mount, &'p Path)> {
        let mount = self.mounts[*self.last.containing(target).max()?];
        Some((mount, target.strip_prefix(mount.target()).ok()?))
    }
}

fn in_mount(
    mount: &Mount,
    rest: &Path,
    target: &Path,
    even_if_absent: bool,
) -> Result<MaskTarget, Error> {
    match mount {
        Mount::Bind { source, target: mounted, writable } => {
            in_bind(source, mounted, rest, *writable && even_if_absent)
        }
        Mount::Transaction { source, target: mounted, .. } => {
            in_bind(source, mounted, rest, even_if_absent)
        }
        Mount::Runtime { path } => in_bind(path, path, rest, false),
        Mount::Overlay { .. } | Mount::Volume { .. } if rest.as_os_str().is_empty() => {
            Ok(MaskTarget::Directory(target.to_owned()))
        }
        // Paths below were left out when the overlay was mounted.
        Mount::Overlay { .. } => Ok(MaskTarget::Absent),
        // A policy that hides something in a volume is refused.
        Mount::Volume { .. } => Err(Error::Unenforceable { field: VOLUMES_FIELD }),
        Mount::Tmpfs { .. } if !even_if_absent => Ok(MaskTarget::Absent),
        Mount::Tmpfs { .. } => Ok(MaskTarget::Directory(target.to_owned())),
        // The sandbox's /proc and /dev have the same entries as the host's.
        Mount::Proc | Mount::Dev if target.is_dir() => Ok(MaskTarget::Directory(target.to_owned())),
        Mount::Proc | Mount::Dev if target.exists() => Ok(MaskTarget::File(target.to_owned())),
        Mount::File { .. } if rest.as_os_str().is_empty() => {
            Ok(MaskTarget::File(target.to_owned()))
        }
        Mount::Proc
        | Mount::Dev
        | Mount::File { .. }
        | Mount::Hidden { .. }
        | Mount::Symlink { .. } => Ok(MaskTarget::Absent),
    }
}

fn in_bind(
    source: &Path,
    mounted: &Path,
    rest: &Path,
    may_appear: bool,
) -> Result<MaskTarget, Error> {
    let outside = source.join(rest);
    if !outside.exists() {
        let appears = may_appear.then(|| MaskTarget::Directory(mounted.join(rest)));
        return Ok(appears.unwrap_or(MaskTarget::Absent));
    }
    let outside = outside.canonicalize()?;
    let source = source.canonicalize()?;
    let rest =
        outside.strip_prefix(&source).map_err(|_| Error::Unenforceable { field: "mounts" })?;
    // Joining an empty path would append a slash.
    let inside = if rest.as_os_str().is_empty() { mounted.to_owned() } else { mounted.join(rest) };
    Ok(if outside.is_dir() { MaskTarget::Directory(inside) } else { MaskTarget::File(inside) })
}

/// Removes `.` and `..` without looking at the file system.
fn normalize(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut path, component| {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(path.pop()),
            other => path.push(other),
        }
        path
    })
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    fn resolve(mounts: &[Mount], target: &Path, even_if_absent: bool) -> Result<MaskTarget, Error> {
        let mut table = MountTable::default();
        mounts.iter().for_each(|mount| table.add(mount));
        table.resolve(target, even_if_absent)
    }

    proptest! {
        #[test]
        fn last_mount_equals_pairwise_comparison(
            targets in vec(select(vec!["/a", "/a/b", "/a-b", "/ab", "/a/b/c", "/"]), 0..8),
            target in select(vec!["/a", "/a/b/x", "/a-b/x", "/ab", "/a/b/c", "/x"]),
        ) {
            let mounts: Vec<_> = targets.iter().map(|target| bind(Path::new("/s"), target, false)).collect();
            let mut table = MountTable::default();
            mounts.iter().for_each(|mount| table.add(mount));
            let target = Path::new(target);
            let expected = mounts.iter().rev().find(|mount| target.starts_with(mount.target()));
            let found = table.mount_of(target).map(|(mount, _)| std::ptr::from_ref(mount));
            prop_assert_eq!(found, expected.map(std::ptr::from_ref));
        }
    }

    #[tokio::test]
    async fn many_hidden_paths_resolve_like_few() {
        let host = tempfile::tempdir().unwrap();
        let names: Vec<_> = (0..MAX_INLINE * 4).map(|number| format!("/data/{number}")).collect();
        let mut mounts = vec![bind(host.path(), "/data", true)];
        mounts.extend(
            names.iter().map(|name| Mount::Hidden { target: name.into(), even_if_absent: true }),
        );
        let masks = Masks::resolve(&mounts).await.unwrap();
        for (mount, mask) in masks.zip(&mounts).skip(1) {
            assert_eq!(*mask, MaskTarget::Directory(mount.target().to_owned()));
        }
    }

    fn bind(source: &Path, target: &str, writable: bool) -> Mount {
        Mount::Bind { source: source.to_owned(), target: target.into(), writable }
    }

    #[test]
    fn files_directories_and_links_are_distinguished() {
        let host = tempfile::tempdir().unwrap();
        std::fs::create_dir(host.path().join("dir")).unwrap();
        std::fs::write(host.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", host.path().join("link")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", host.path().join("out")).unwrap();
        let mounts = [
            bind(host.path(), "/data", false),
            Mount::Symlink { target: "/d".into(), to: "data".into() },
        ];
        let resolve = |target: &str| resolve(&mounts, Path::new(target), true);
        assert_eq!(resolve("/data/dir").unwrap(), MaskTarget::Directory("/data/dir".into()));
        assert_eq!(resolve("/d/file").unwrap(), MaskTarget::File("/data/file".into()));
        assert_eq!(resolve("/data/link").unwrap(), MaskTarget::File("/data/file".into()));
        assert_eq!(resolve("/data").unwrap(), MaskTarget::Directory("/data".into()));
        assert_eq!(resolve("/data/absent").unwrap(), MaskTarget::Absent);
        assert_eq!(resolve("/elsewhere").unwrap(), MaskTarget::Absent);
        assert!(matches!(resolve("/data/out"), Err(Error::Unenforceable { .. })));
    }

    #[test]
    fn writable_path_is_masked_before_it_exists() {
        let host = tempfile::tempdir().unwrap();
        let mounts = [bind(host.path(), "/workspace", true)];
        let target = resolve(&mounts, Path::new("/workspace/absent"), true).unwrap();
        assert_eq!(target, MaskTarget::Directory("/workspace/absent".into()));
    }

    #[test]
    fn absent_path_is_not_created_on_the_host() {
        let host = tempfile::tempdir().unwrap();
        std::fs::create_dir(host.path().join("present")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", host.path().join("out")).unwrap();
        let mounts = [bind(host.path(), "/home/ann", true)];
        let resolve = |target: &str| resolve(&mounts, Path::new(target), false).unwrap();
        assert_eq!(resolve("/home/ann/present"), MaskTarget::Directory("/home/ann/present".into()));
        assert_eq!(resolve("/home/ann/absent"), MaskTarget::Absent);
        assert_eq!(resolve("/home/ann/out"), MaskTarget::Absent);
    }

    #[test]
    fn circular_links_are_refused() {
        let link = |from: &str, to: &str| Mount::Symlink { target: from.into(), to: to.into() };
        assert!(resolve(&[link("/a", "b"), link("/b", "a")], Path::new("/a/x"), true).is_err());
    }
}
