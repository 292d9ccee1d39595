//! Tests of the walk, and the tree that other tests use.

use std::{fs, os::unix::fs::symlink, path::Path};

use rustix::io::Errno;

use super::{FinalSymlink, ResolveError, Root};

/// A root with `a/b/file` in it and a file `outside` next to it.
pub(super) fn tree() -> (tempfile::TempDir, Root) {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("root");
    fs::create_dir_all(path.join("a/b")).unwrap();
    fs::write(path.join("a/b/file"), "inside").unwrap();
    fs::write(temp.path().join("outside"), "outside").unwrap();
    let root = Root::open(&path, Path::new("/workspace")).unwrap();
    (temp, root)
}

fn resolve(root: &Root, path: &str, final_symlink: FinalSymlink) -> Result<String, ResolveError> {
    let resolved = root.resolve(Path::new(path), final_symlink)?;
    Ok(resolved.path.to_str().unwrap().to_owned())
}

#[test]
fn symlinks_inside_the_root_are_followed() {
    let (temp, root) = tree();
    let link = |to: &str, name: &str| symlink(to, temp.path().join("root").join(name)).unwrap();
    link("a/b", "relative");
    link("/workspace/a/b", "absolute");
    link("/workspace", "own-root");
    link("relative/../b/file", "around");
    link("absent/../x", "through-nothing");
    link("new", "dangling");
    for (path, resolved) in [
        ("", ""),
        (".", ""),
        ("own-root", ""),
        ("a/b/file", "a/b/file"),
        ("relative/file", "a/b/file"),
        ("absolute/file", "a/b/file"),
        ("absolute", "a/b"),
        ("around", "a/b/file"),
        ("dangling", "new"),
        ("absent", "absent"),
    ] {
        assert_eq!(resolve(&root, path, FinalSymlink::Follow).as_deref(), Ok(resolved), "{path}");
    }
    assert_eq!(resolve(&root, "around", FinalSymlink::NoFollow).as_deref(), Ok("around"));
    for (path, errno) in [
        ("absent/x", Errno::NOENT),
        ("through-nothing", Errno::NOENT),
        ("a/b/file/x", Errno::NOTDIR),
    ] {
        assert_eq!(
            resolve(&root, path, FinalSymlink::Follow),
            Err(ResolveError::Os(errno)),
            "{path}"
        );
    }
}

#[test]
fn path_outside_the_root_is_refused() {
    let (temp, root) = tree();
    let outside = Err(ResolveError::OutsideRoot);
    for (name, to) in [
        ("up", "../outside"),
        ("deep", "a/b/../../../outside"),
        ("host", "/etc/passwd"),
        ("proc", "/proc/self/root/etc/passwd"),
        ("near", "/workspacex/a"),
        ("slash", "/"),
    ] {
        symlink(to, temp.path().join("root").join(name)).unwrap();
        assert_eq!(resolve(&root, name, FinalSymlink::Follow), outside, "{name}");
        assert_eq!(resolve(&root, &format!("{name}/x"), FinalSymlink::NoFollow), outside, "{name}");
    }
    for path in ["..", "a/../..", "/etc/passwd"] {
        assert_eq!(resolve(&root, path, FinalSymlink::Follow), outside, "{path}");
    }
    // Control: opening the name without resolving it reads the file outside.
    assert_eq!(fs::read_to_string(temp.path().join("root/up")).unwrap(), "outside");
}

#[test]
fn long_chain_of_symlinks_is_refused() {
    let (temp, root) = tree();
    let link = |to: &str, name: &str| symlink(to, temp.path().join("root").join(name)).unwrap();
    let (there_and_back, count) = ("a/../".repeat(800), 3);
    link(&format!("{there_and_back}a/b/file"), "0");
    for number in 1..count {
        link(&format!("{there_and_back}{}", number - 1), &number.to_string());
    }
    assert_eq!(resolve(&root, "1", FinalSymlink::Follow).as_deref(), Ok("a/b/file"), "control");
    assert_eq!(
        resolve(&root, "2", FinalSymlink::Follow),
        Err(ResolveError::Os(Errno::NAMETOOLONG))
    );
}

#[test]
fn symlink_loop_is_refused() {
    let (temp, root) = tree();
    symlink("two", temp.path().join("root/one")).unwrap();
    symlink("one", temp.path().join("root/two")).unwrap();
    assert_eq!(resolve(&root, "one", FinalSymlink::Follow), Err(ResolveError::Os(Errno::LOOP)));
}
