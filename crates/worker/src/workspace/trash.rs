//! Removes a tree of untrusted files of any depth, width and mode, never through a symlink.
//!
//! Every directory is moved up into the trash and emptied there, so the depth of a tree and the
//! length of its paths do not matter, and two descriptors suffice. Only the worker can write to the
//! trash itself; a command may still rename entries of the trees in it while they are removed.

use std::{
    ffi::CStr,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use codelia_sys::resolve_beneath::proc_fd_path;
use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, IFlags, Mode, OFlags, chmod, ioctl_getflags, ioctl_setflags,
        openat, renameat, statat, unlinkat,
    },
    io::Errno,
    path::Arg,
};
use uuid::Uuid;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Directories that are moved up before they are emptied: a tree may have millions.
const MAX_MOVED: usize = 1000;

/// Removes `name` in the directory `trash` and returns the size of its files in bytes. Nothing
/// happens if it does not exist.
pub(crate) fn remove(trash: &Path, name: &Path) -> io::Result<u64> {
    remove_while(trash, name, &|| true)
}

/// Like [`remove`], but fails when `may_continue` returns `false`. The next call continues.
pub(crate) fn remove_while(
    trash: &Path,
    name: &Path,
    may_continue: &dyn Fn() -> bool,
) -> io::Result<u64> {
    let trash = openat(CWD, trash, DIRECTORY, Mode::empty())?;
    let mut bytes = 0;
    let mut left = vec![name.to_owned()];
    while let Some(name) = left.last().cloned() {
        match remove_flat(&trash, &name, may_continue) {
            // Another worker on this root removes it too.
            Err(error) if error.kind() == io::ErrorKind::NotFound => drop(left.pop()),
            Err(error) => return Err(error),
            Ok(Removed::Done(size)) => {
                bytes += size;
                left.pop();
            }
            Ok(Removed::Moved(size, moved)) => {
                bytes += size;
                left.extend(moved);
            }
        }
    }
    Ok(bytes)
}

enum Removed {
    /// The entry and files of this size are removed.
    Done(u64),
    /// Files of this size are removed, and these directories moved to the trash. More may be left.
    Moved(u64, Vec<PathBuf>),
}

fn remove_flat(
    trash: &OwnedFd,
    name: &Path,
    may_continue: &dyn Fn() -> bool,
) -> io::Result<Removed> {
    match kind(trash, name)? {
        None => Ok(Removed::Done(0)),
        Some((FileType::Directory, _)) => empty(trash, name, may_continue),
        Some((_, size)) => {
            unlink(trash, name, AtFlags::empty())?;
            Ok(Removed::Done(size))
        }
    }
}

fn empty(trash: &OwnedFd, name: &Path, may_continue: &dyn Fn() -> bool) -> io::Result<Removed> {
    let dir = open(trash, name)?;
    let mut bytes = 0;
    let mut moved = Vec::new();
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let child = entry.file_name();
        if matches!(child.to_bytes(), b"." | b"..") {
            continue;
        }
        if !may_continue() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match kind(&dir, child)? {
            None => {}
            Some((FileType::Directory, _)) => moved.push(move_up(trash, &dir, child)?),
            Some((_, size)) => {
                unlink(&dir, child, AtFlags::empty())?;
                bytes += size;
            }
        }
        if moved.len() == MAX_MOVED {
            break;
        }
    }
    if moved.is_empty() {
        unlink(trash, name, AtFlags::REMOVEDIR)?;
        return Ok(Removed::Done(bytes));
    }
    Ok(Removed::Moved(bytes, moved))
}

/// Opens a directory whose mode may not allow it.
fn open(trash: &OwnedFd, name: &Path) -> io::Result<OwnedFd> {
    match openat(trash, name, DIRECTORY, Mode::empty()) {
        Err(Errno::ACCESS) => {
            make_accessible(trash, name)?;
            Ok(openat(trash, name, DIRECTORY, Mode::empty())?)
        }
        answer => Ok(answer?),
    }
}

/// Moves a directory to the trash under a new name. Modes and immutable flags may prevent it at
/// first.
fn move_up(trash: &OwnedFd, dir: &OwnedFd, child: &CStr) -> io::Result<PathBuf> {
    let name = PathBuf::from(Uuid::new_v4().to_string());
    match renameat(dir, child, trash, &name) {
        Err(Errno::ACCESS) => make_accessible(dir, child)?,
        Err(Errno::PERM) => make_mutable(dir, child)?,
        answer => return Ok(answer.map(|()| name)?),
    }
    renameat(dir, child, trash, &name)?;
    Ok(name)
}

/// Removes a name, even if modes or immutable flags prevent it at first. A missing name is fine.
fn unlink<P: Arg + Copy>(dir: &OwnedFd, name: P, flags: AtFlags) -> io::Result<()> {
    let removed = match unlinkat(dir, name, flags) {
        Err(Errno::ACCESS) => {
            chmod(proc_fd_path(dir), Mode::RWXU)?;
            unlinkat(dir, name, flags)
        }
        Err(Errno::PERM) => {
            make_mutable(dir, name)?;
            unlinkat(dir, name, flags)
        }
        answer => answer,
    };
    match removed {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Gives the worker all permissions on a directory. Never follows a symlink that replaced it.
fn make_accessible<P: Arg>(dir: &OwnedFd, name: P) -> io::Result<()> {
    let directory = openat(
        dir,
        name,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    Ok(chmod(proc_fd_path(&directory), Mode::RWXU)?)
}

/// Clears the flags that keep a directory, and an entry in it, from being changed.
fn make_mutable<P: Arg>(dir: &OwnedFd, name: P) -> io::Result<()> {
    clear_flags(dir)?;
    // Other kinds of files cannot have the flags, and opening them may have side effects.
    match openat(
        dir,
        name,
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Ok(child) => clear_flags(&child),
        Err(Errno::LOOP | Errno::NXIO | Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn clear_flags(fd: &OwnedFd) -> io::Result<()> {
    const IMMUTABLE: IFlags = IFlags::IMMUTABLE.union(IFlags::APPEND);
    let flags = ioctl_getflags(fd)?;
    if flags.intersects(IMMUTABLE) {
        ioctl_setflags(fd, flags - IMMUTABLE)?;
    }
    Ok(())
}

/// The type and size of an entry, without following a symlink. A file with other hard links counts
/// as empty.
fn kind<P: Arg>(dir: &OwnedFd, name: P) -> io::Result<Option<(FileType, u64)>> {
    match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => {
            let kind = FileType::from_raw_mode(stat.st_mode);
            let counts = kind == FileType::RegularFile && stat.st_nlink == 1;
            Ok(Some((kind, if counts { u64::try_from(stat.st_size).unwrap_or(0) } else { 0 })))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File, Permissions},
        os::unix::{
            fs::{PermissionsExt, symlink},
            net::UnixListener,
        },
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use rustix::fs::{RenameFlags, mkdirat, renameat_with};

    use super::*;

    fn is_empty(dir: &Path) -> bool {
        fs::read_dir(dir).unwrap().count() == 0
    }

    #[test]
    fn tree_deeper_than_path_max_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut here = openat(CWD, dir.path(), DIRECTORY, Mode::empty()).unwrap();
        let name = "d".repeat(200);
        for _ in 0..40 {
            mkdirat(&here, &name, Mode::RWXU).unwrap();
            here = openat(&here, &name, DIRECTORY, Mode::empty()).unwrap();
        }
        remove(dir.path(), Path::new(&name)).unwrap();
        assert!(is_empty(dir.path()));
    }

    #[test]
    fn tree_wider_than_one_batch_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..2 * MAX_MOVED + 1 {
            fs::create_dir_all(dir.path().join(format!("wide/{number}/inner"))).unwrap();
        }
        remove(dir.path(), Path::new("wide")).unwrap();
        assert!(is_empty(dir.path()));
    }

    #[test]
    fn unusual_files_and_modes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("closed/inner")).unwrap();
        let held = File::create(tree.join("closed/inner/held")).unwrap();
        held.set_len(3).unwrap();
        let _listener = UnixListener::bind(tree.join("socket")).unwrap();
        rustix::fs::mknodat(CWD, tree.join("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        symlink("/nowhere", tree.join("dangling")).unwrap();
        for closed in ["closed/inner", "closed"] {
            fs::set_permissions(tree.join(closed), Permissions::from_mode(0o000)).unwrap();
        }
        assert_eq!(remove(dir.path(), Path::new("tree")).unwrap(), 3);
        assert!(is_empty(dir.path()));
    }

    #[test]
    fn immutable_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("frozen/inner")).unwrap();
        fs::write(tree.join("frozen/file"), "12").unwrap();
        for name in ["frozen/file", "frozen/inner", "frozen"] {
            let set = ioctl_setflags(File::open(tree.join(name)).unwrap(), IFlags::IMMUTABLE);
            if let Err(error) = set {
                let missing = format!("cannot set the immutable flag: {error}");
                assert!(!codelia_tests::available("root", Some(&missing)));
                return;
            }
        }
        fs::remove_file(tree.join("frozen/file")).unwrap_err();
        assert_eq!(remove(dir.path(), Path::new("tree")).unwrap(), 2);
        assert!(is_empty(dir.path()));
    }

    /// Another thread keeps exchanging directories for links to a directory outside.
    #[test]
    fn link_swapped_for_directory_is_not_followed() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("kept"), "kept").unwrap();
        fs::set_permissions(outside.path(), Permissions::from_mode(0o711)).unwrap();
        for _ in 0..5 {
            let dir = tempfile::tempdir().unwrap();
            let tree = dir.path().join("tree");
            fs::create_dir(&tree).unwrap();
            for number in 0..200 {
                fs::create_dir(tree.join(format!("{number}"))).unwrap();
                symlink(outside.path(), tree.join(format!("{number}-link"))).unwrap();
            }
            let inside = openat(CWD, &tree, DIRECTORY, Mode::empty()).unwrap();
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        for number in 0..200 {
                            // Fails for entries that are already removed.
                            let _ = renameat_with(
                                &inside,
                                format!("{number}"),
                                &inside,
                                format!("{number}-link"),
                                RenameFlags::EXCHANGE,
                            );
                        }
                    }
                });
                // A concurrent exchange may make one call fail; the next one continues.
                while remove(dir.path(), Path::new("tree")).is_err() || tree.exists() {}
                done.store(true, Ordering::Relaxed);
            });
            while !is_empty(dir.path()) {
                for entry in fs::read_dir(dir.path()).unwrap() {
                    remove(dir.path(), Path::new(&entry.unwrap().file_name())).unwrap();
                }
            }
        }
        assert_eq!(fs::read_to_string(outside.path().join("kept")).unwrap(), "kept");
        assert_eq!(fs::metadata(outside.path()).unwrap().permissions().mode() & 0o777, 0o711);
    }
}
