//! Removal of a tree that a stranger filled: of any depth, width and modes, never through a symlink.
//!
//! Every directory found is moved up into the trash and emptied there, so neither the depth of a
//! tree nor the length of its paths matters, and two descriptors are enough. Nobody but us may write to
//! the trash itself; in what lies in it somebody may still change names while we look at them.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, IFlags, Mode, OFlags, chmod, ioctl_getflags, ioctl_setflags, openat,
        renameat, statat, unlinkat,
    },
    io::Errno,
    path::Arg,
};
use uuid::Uuid;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// As many directories are moved up before they are emptied: a tree may have millions.
const MOST_MOVED: usize = 1000;

/// Removes `name` in the directory `trash` and returns the bytes of its files. What is not there is
/// removed already.
pub(crate) fn remove(trash: &Path, name: &Path) -> io::Result<u64> {
    let trash = openat(CWD, trash, DIRECTORY, Mode::empty())?;
    let mut bytes = 0;
    let mut left = vec![name.to_owned()];
    while let Some(name) = left.last().cloned() {
        match remove_flat(&trash, &name) {
            // Another worker on this root removes it as well.
            Err(error) if error.kind() == io::ErrorKind::NotFound => drop(left.pop()),
            Err(error) => return Err(error),
            Ok(Removed::Yes(size)) => {
                bytes += size;
                left.pop();
            }
            Ok(Removed::After(size, moved)) => {
                bytes += size;
                left.extend(moved);
            }
        }
    }
    Ok(bytes)
}

enum Removed {
    /// It is gone.
    Yes(u64),
    /// Its files are gone as far as it was looked at; directories were moved to the trash under these names.
    After(u64, Vec<PathBuf>),
}

fn remove_flat(trash: &OwnedFd, name: &Path) -> io::Result<Removed> {
    match kind(trash, name)? {
        None => Ok(Removed::Yes(0)),
        Some((FileType::Directory, _)) => empty(trash, name),
        Some((_, size)) => {
            unlink(trash, name, AtFlags::empty())?;
            Ok(Removed::Yes(size))
        }
    }
}

fn empty(trash: &OwnedFd, name: &Path) -> io::Result<Removed> {
    let dir = open(trash, name)?;
    let mut bytes = 0;
    let mut moved = Vec::new();
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let child = entry.file_name();
        if matches!(child.to_bytes(), b"." | b"..") {
            continue;
        }
        match kind(&dir, child)? {
            None => {}
            Some((FileType::Directory, _)) => moved.push(move_up(trash, &dir, child)?),
            Some((_, size)) => {
                unlink(&dir, child, AtFlags::empty())?;
                bytes += size;
            }
        }
        if moved.len() == MOST_MOVED {
            break;
        }
    }
    if moved.is_empty() {
        unlink(trash, name, AtFlags::REMOVEDIR)?;
        return Ok(Removed::Yes(bytes));
    }
    Ok(Removed::After(bytes, moved))
}

/// Opens a directory that its owner may have closed to us.
fn open(trash: &OwnedFd, name: &Path) -> io::Result<OwnedFd> {
    match openat(trash, name, DIRECTORY, Mode::empty()) {
        Err(Errno::ACCESS) => {
            unlock(trash, name)?;
            Ok(openat(trash, name, DIRECTORY, Mode::empty())?)
        }
        answer => Ok(answer?),
    }
}

/// Moves a directory to the trash, under a name of ours. One that its owner closed cannot be moved by
/// everybody, and one that may not be changed by nobody.
fn move_up(trash: &OwnedFd, dir: &OwnedFd, child: &CStr) -> io::Result<PathBuf> {
    let name = PathBuf::from(Uuid::new_v4().to_string());
    match renameat(dir, child, trash, &name) {
        Err(Errno::ACCESS) => unlock(dir, child)?,
        Err(Errno::PERM) => thaw(dir, child)?,
        answer => return Ok(answer.map(|()| name)?),
    }
    renameat(dir, child, trash, &name)?;
    Ok(name)
}

/// Removes a name, also of what may not be changed. One that is gone is fine.
fn unlink<P: Arg + Copy>(dir: &OwnedFd, name: P, flags: AtFlags) -> io::Result<()> {
    let removed = match unlinkat(dir, name, flags) {
        Err(Errno::ACCESS) => {
            chmod(link_to(dir), Mode::RWXU)?;
            unlinkat(dir, name, flags)
        }
        Err(Errno::PERM) => {
            thaw(dir, name)?;
            unlinkat(dir, name, flags)
        }
        answer => answer,
    };
    match removed {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Gives us all rights on a directory: on what the name stands for when it is opened, never on what a symlink
/// in its place leads to.
fn unlock<P: Arg>(dir: &OwnedFd, name: P) -> io::Result<()> {
    let directory = openat(
        dir,
        name,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    Ok(chmod(link_to(&directory), Mode::RWXU)?)
}

fn link_to(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Takes the marks away that keep a directory, or a file or directory in it, from being changed.
fn thaw<P: Arg>(dir: &OwnedFd, name: P) -> io::Result<()> {
    take_marks(dir)?;
    // What is neither cannot be marked, and opening it may do something.
    match openat(
        dir,
        name,
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Ok(child) => take_marks(&child),
        Err(Errno::LOOP | Errno::NXIO | Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn take_marks(fd: &OwnedFd) -> io::Result<()> {
    const MARKS: IFlags = IFlags::IMMUTABLE.union(IFlags::APPEND);
    let flags = ioctl_getflags(fd)?;
    if flags.intersects(MARKS) {
        ioctl_setflags(fd, flags - MARKS)?;
    }
    Ok(())
}

/// The type and size of an entry itself, never of what it points to; a file with other names holds no bytes.
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
    fn a_tree_deeper_than_any_path_is_removed() {
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
    fn a_tree_of_more_directories_than_are_moved_at_once_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..2 * MOST_MOVED + 1 {
            fs::create_dir_all(dir.path().join(format!("wide/{number}/inner"))).unwrap();
        }
        remove(dir.path(), Path::new("wide")).unwrap();
        assert!(is_empty(dir.path()));
    }

    #[test]
    fn closed_directories_open_files_sockets_pipes_and_dangling_links_are_removed() {
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
    fn what_may_not_be_changed_is_removed_by_who_may_decide_so() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("frozen/inner")).unwrap();
        fs::write(tree.join("frozen/file"), "12").unwrap();
        for name in ["frozen/file", "frozen/inner", "frozen"] {
            let marked = ioctl_setflags(File::open(tree.join(name)).unwrap(), IFlags::IMMUTABLE);
            if let Err(error) = marked {
                return println!("skipped: nothing can be marked here: {error}");
            }
        }
        fs::remove_file(tree.join("frozen/file")).unwrap_err();
        assert_eq!(remove(dir.path(), Path::new("tree")).unwrap(), 2);
        assert!(is_empty(dir.path()));
    }

    /// Somebody exchanges a directory for a link to a place outside, again and again, while it is removed.
    #[test]
    fn a_link_that_takes_the_place_of_a_directory_leads_nowhere() {
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
                            // What is gone already cannot be exchanged.
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
                // A name that changes under our hands may make one try fail; the next one goes on.
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
