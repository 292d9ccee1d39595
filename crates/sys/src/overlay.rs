//! Overlays: directories of the host under a layer that takes all changes, mounted where only those see
//! them that enter a namespace, which is gone with the last of them.

use std::{
    fs,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
};

use nix::{
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags},
    io::Errno,
    process::Pid,
};

use crate::{
    fd::last_errno,
    process::{self, SingleThread, from_nix},
};

/// Moves this process to mounts of its own, and if it is not privileged to users of its own, of which there
/// is one: itself. Mounts of the host come and go here too, never the other way.
///
/// # Errors
/// As `unshare(2)` and `mount(2)`.
pub fn separate() -> Result<(), Errno> {
    let (uid, gid) = (process::own_uid(), process::own_gid());
    if uid == 0 {
        unshare(CloneFlags::CLONE_NEWNS).map_err(from_nix)?;
    } else {
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUSER).map_err(from_nix)?;
        write("/proc/self/setgroups", "deny")?;
        write("/proc/self/uid_map", &format!("{uid} {uid} 1"))?;
        write("/proc/self/gid_map", &format!("{gid} {gid} 1"))?;
    }
    let nothing = None::<&str>;
    mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_SLAVE, nothing).map_err(from_nix)
}

/// The namespaces that [`separate`] made, in the order they must be entered.
///
/// # Errors
/// As `open(2)`.
pub fn spaces() -> Result<Vec<OwnedFd>, Errno> {
    let names: &[&str] = if process::own_uid() == 0 { &["mnt"] } else { &["user", "mnt"] };
    let open = |name: &&str| {
        rustix::fs::open(format!("/proc/self/ns/{name}"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    };
    names.iter().map(open).collect()
}

/// Enters them.
///
/// # Errors
/// As `setns(2)`.
pub fn enter(spaces: &[OwnedFd]) -> Result<(), Errno> {
    spaces.iter().try_for_each(|space| setns(space, CloneFlags::empty()).map_err(from_nix))
}

/// A small file system in memory that others may only pass through.
///
/// # Errors
/// As `mount(2)`.
pub fn mount_memory(place: &Path) -> Result<(), Errno> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("codelia"), place, Some("tmpfs"), flags, Some("mode=0711,size=1m")).map_err(from_nix)
}

/// A directory, to be named by its descriptor.
///
/// # Errors
/// As `open(2)`.
pub fn directory(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// What an overlay takes for: there is nothing here.
///
/// # Errors
/// As `mknod(2)`.
pub fn leave_out(path: &Path) -> Result<(), Errno> {
    rustix::fs::mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0)
}

/// The directory again at `place`, where what root owns belongs to this user and group.
///
/// # Errors
/// As `open_tree(2)`, `mount_setattr(2)` and `move_mount(2)`: not every file system can do this.
pub fn mount_owned(
    process: &SingleThread,
    directory: &OwnedFd,
    place: &Path,
    uid: u32,
    gid: u32,
) -> Result<OwnedFd, Errno> {
    let users = users(process, uid, gid)?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_EMPTY_PATH.cast_unsigned();
    // SAFETY: the descriptor is open and the path is a string that ends; it answers a new descriptor or -1.
    let tree = unsafe { libc::syscall(libc::SYS_open_tree, directory.as_raw_fd(), c"".as_ptr(), flags) };
    let tree = i32::try_from(tree).ok().filter(|fd| *fd >= 0).ok_or_else(last_errno)?;
    // SAFETY: it was opened just now and nobody else has it.
    let tree = unsafe { OwnedFd::from_raw_fd(tree) };
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: u64::from(users.as_raw_fd().unsigned_abs()),
    };
    // SAFETY: both descriptors are open, the path ends, and the size is that of the attributes.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if set != 0 {
        return Err(last_errno());
    }
    let to = self::directory(place)?;
    // SAFETY: both descriptors are open and both paths end.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            to.as_raw_fd(),
            c"".as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_EMPTY_PATH,
        )
    };
    if moved != 0 { Err(last_errno()) } else { Ok(tree) }
}

/// A namespace in which user and group 0 are these two outside. A process must be in it to be given them.
fn users(process: &SingleThread, uid: u32, gid: u32) -> Result<OwnedFd, Errno> {
    let (ours, theirs) = crate::fd::socket_pair()?;
    let parent = process::own_pid();
    let child = || {
        let entered = unshare(CloneFlags::CLONE_NEWUSER).is_ok() && process::die_with_parent().is_ok();
        // Whoever is gone already sends no signal.
        let is_kept = entered && rustix::process::getppid() == Some(parent);
        // It has both ends of the socket: it waits until it is killed.
        if is_kept && rustix::io::write(&theirs, &[0]).is_ok() {
            let _ = rustix::io::read(&theirs, &mut [0]);
        }
        0
    };
    let pid = process.fork(child)?;
    drop(theirs);
    let users = users_of(pid, &ours, uid, gid);
    process::kill(pid)?;
    process::reap_next()?;
    users
}

/// The namespace of a process that tells when it is in it.
fn users_of(pid: Pid, socket: &OwnedFd, uid: u32, gid: u32) -> Result<OwnedFd, Errno> {
    if rustix::io::read(socket, &mut [0])? == 0 {
        return Err(Errno::PERM);
    }
    let of_child = format!("/proc/{}", pid.as_raw_nonzero());
    write(&format!("{of_child}/uid_map"), &format!("0 {uid} 1"))?;
    write(&format!("{of_child}/gid_map"), &format!("0 {gid} 1"))?;
    let users = format!("{of_child}/ns/user");
    rustix::fs::open(users, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Mounts an overlay at `place`. `hidden` is a layer over the lower one; nobody but its owner can tell
/// layers apart from inside.
///
/// # Errors
/// As `mount(2)`.
pub fn mount_overlay(
    lower: &OwnedFd,
    hidden: &OwnedFd,
    upper: &OwnedFd,
    work: &OwnedFd,
    place: &Path,
) -> Result<(), Errno> {
    let path = |directory: &OwnedFd| format!("/proc/self/fd/{}", directory.as_raw_fd());
    let mut options =
        format!("lowerdir={}:{},upperdir={},workdir={}", path(hidden), path(lower), path(upper), path(work));
    if process::own_uid() != 0 {
        options.push_str(",userxattr");
    } else {
        options.push_str(",index=off,redirect_dir=nofollow,metacopy=off");
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("codelia"), place, Some("overlay"), flags, Some(options.as_str())).map_err(from_nix)
}

/// Takes a mount away from its place. What is built on it stays.
///
/// # Errors
/// As `umount2(2)`.
pub fn detach(place: &Path) -> Result<(), Errno> {
    umount2(place, MntFlags::MNT_DETACH).map_err(from_nix)
}

/// Whether something is mounted there.
///
/// # Errors
/// As `stat(2)`.
pub fn is_mounted(place: &Path) -> Result<bool, Errno> {
    let (own, above) = (rustix::fs::stat(place)?, rustix::fs::stat(place.join(".."))?);
    Ok(own.st_dev != above.st_dev)
}

fn write(path: &str, text: &str) -> Result<(), Errno> {
    fs::write(path, text).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}
