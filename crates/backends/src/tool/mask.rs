//! What a hidden place of a plan is, seen from the host: a tool must know before it covers it.

use std::path::{Component, Path, PathBuf};

use codelia_policy::Mount;

use crate::Error;

/// What is to be covered, at its place inside with symbolic links followed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Hidden {
    /// A directory, or a place where one may be made.
    Directory(PathBuf),
    /// A file.
    File(PathBuf),
    /// Nothing is there and nothing can be made there.
    Nothing,
}

/// As many links are followed as the kernel follows.
const MOST_LINKS: u32 = 40;

/// Looks for what the mounts made so far have at `target`.
///
/// # Errors
/// A symbolic link of the host leads out of its mount: nobody can tell where to. That does not matter for what
/// is covered only where it is: it is not there.
pub(crate) fn find(made: &[Mount], target: &Path, even_if_absent: bool) -> Result<Hidden, Error> {
    match look(made, target, even_if_absent) {
        Err(Error::Unenforceable { .. }) if !even_if_absent => Ok(Hidden::Nothing),
        found => found,
    }
}

fn look(made: &[Mount], target: &Path, even_if_absent: bool) -> Result<Hidden, Error> {
    let mut target = target.to_owned();
    for _ in 0..MOST_LINKS {
        match below(made, &target) {
            Some((Mount::Symlink { target: link, to }, rest)) => {
                target = lexical(&link.parent().unwrap_or(link).join(to).join(rest));
            }
            Some((mount, rest)) => return at(mount, rest, &target, even_if_absent),
            None => return Ok(Hidden::Nothing),
        }
    }
    Err(Error::Unenforceable { field: "mounts" })
}

/// The last mount that the place is in, and the way from there.
fn below<'a>(made: &'a [Mount], target: &'a Path) -> Option<(&'a Mount, &'a Path)> {
    made.iter().rev().find_map(|mount| Some((mount, target.strip_prefix(mount.target()).ok()?)))
}

fn at(mount: &Mount, rest: &Path, target: &Path, even_if_absent: bool) -> Result<Hidden, Error> {
    match mount {
        Mount::Bind { source, target: place, writable } => {
            in_bind(source, place, rest, *writable && even_if_absent)
        }
        // What is below was left out when it was mounted.
        Mount::Overlay { .. } if rest.as_os_str().is_empty() => Ok(Hidden::Directory(target.to_owned())),
        Mount::Overlay { .. } => Ok(Hidden::Nothing),
        Mount::Tmpfs { .. } if !even_if_absent => Ok(Hidden::Nothing),
        Mount::Tmpfs { .. } => Ok(Hidden::Directory(target.to_owned())),
        // The sandbox's own has what the host's has.
        Mount::Proc | Mount::Dev if target.is_dir() => Ok(Hidden::Directory(target.to_owned())),
        Mount::Proc | Mount::Dev if target.exists() => Ok(Hidden::File(target.to_owned())),
        Mount::File { .. } if rest.as_os_str().is_empty() => Ok(Hidden::File(target.to_owned())),
        Mount::Proc | Mount::Dev | Mount::File { .. } | Mount::Hidden { .. } | Mount::Symlink { .. } => {
            Ok(Hidden::Nothing)
        }
    }
}

fn in_bind(source: &Path, place: &Path, rest: &Path, may_appear: bool) -> Result<Hidden, Error> {
    let outside = source.join(rest);
    if !outside.exists() {
        return Ok(if may_appear { Hidden::Directory(place.join(rest)) } else { Hidden::Nothing });
    }
    let (outside, source) = (outside.canonicalize()?, source.canonicalize()?);
    let rest = outside.strip_prefix(&source).map_err(|_| Error::Unenforceable { field: "mounts" })?;
    // Joining nothing would end the path with a slash.
    let inside = if rest.as_os_str().is_empty() { place.to_owned() } else { place.join(rest) };
    Ok(if outside.is_dir() { Hidden::Directory(inside) } else { Hidden::File(inside) })
}

/// Without `.` and `..`.
fn lexical(path: &Path) -> PathBuf {
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
    use super::*;

    fn bind(source: &Path, target: &str, writable: bool) -> Mount {
        Mount::Bind { source: source.to_owned(), target: target.into(), writable }
    }

    #[test]
    fn files_directories_and_links_of_a_bind_are_told_apart() {
        let host = tempfile::tempdir().unwrap();
        std::fs::create_dir(host.path().join("dir")).unwrap();
        std::fs::write(host.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", host.path().join("link")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", host.path().join("out")).unwrap();
        let made =
            [bind(host.path(), "/data", false), Mount::Symlink { target: "/d".into(), to: "data".into() }];
        let find = |target: &str| find(&made, Path::new(target), true);
        assert_eq!(find("/data/dir").unwrap(), Hidden::Directory("/data/dir".into()));
        assert_eq!(find("/d/file").unwrap(), Hidden::File("/data/file".into()));
        assert_eq!(find("/data/link").unwrap(), Hidden::File("/data/file".into()));
        assert_eq!(find("/data").unwrap(), Hidden::Directory("/data".into()));
        assert_eq!(find("/data/absent").unwrap(), Hidden::Nothing);
        assert_eq!(find("/elsewhere").unwrap(), Hidden::Nothing);
        assert!(matches!(find("/data/out"), Err(Error::Unenforceable { .. })));
    }

    #[test]
    fn a_place_that_could_be_written_is_covered_before_it_exists() {
        let host = tempfile::tempdir().unwrap();
        let made = [bind(host.path(), "/workspace", true)];
        let hidden = find(&made, Path::new("/workspace/absent"), true).unwrap();
        assert_eq!(hidden, Hidden::Directory("/workspace/absent".into()));
    }

    #[test]
    fn what_is_covered_only_where_it_is_makes_nothing_on_the_host() {
        let host = tempfile::tempdir().unwrap();
        std::fs::create_dir(host.path().join("there")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", host.path().join("out")).unwrap();
        let made = [bind(host.path(), "/home/ann", true)];
        let find = |target: &str| find(&made, Path::new(target), false).unwrap();
        assert_eq!(find("/home/ann/there"), Hidden::Directory("/home/ann/there".into()));
        assert_eq!(find("/home/ann/absent"), Hidden::Nothing);
        assert_eq!(find("/home/ann/out"), Hidden::Nothing);
    }

    #[test]
    fn links_that_lead_in_circles_are_refused() {
        let link = |from: &str, to: &str| Mount::Symlink { target: from.into(), to: to.into() };
        assert!(find(&[link("/a", "b"), link("/b", "a")], Path::new("/a/x"), true).is_err());
    }
}
