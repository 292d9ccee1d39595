//! Overlay mounts: host directories below a writable layer, visible only in a separate mount
//! namespace and gone with the last process or descriptor in it.

use std::{fs, os::fd::OwnedFd, path::Path};

use nix::{
    mount::{MntFlags, MsFlags, mount as mount_at, umount2},
    sched::{CloneFlags, setns, unshare},
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags},
    io::Errno,
    process::Pid,
};

use crate::{
    call::{from_io, from_nix},
    fd::proc_fd_path,
    mount,
    process::{self, SingleThread},
    resolve_beneath::open_directory,
    user_namespace,
};

/// Moves this process into a new mount namespace. Without root it also gets a new user namespace
/// that maps only its own ids. Mounts of the host propagate into the namespace, never out of it.
///
/// # Errors
/// As `unshare(2)` and `mount(2)`.
pub fn unshare_mounts() -> Result<(), Errno> {
    let uid = process::own_uid();
    let gid = process::own_gid();
    if uid == 0 {
        unshare(CloneFlags::CLONE_NEWNS).map_err(from_nix)?;
    } else {
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUSER).map_err(from_nix)?;
        user_namespace::map_ids(Path::new("/proc"), (uid, uid), (gid, gid))?;
    }
    let none = None::<&str>;
    mount_at(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none).map_err(from_nix)
}

/// Opens the namespaces that [`unshare_mounts`] created, in the order in which to enter them.
///
/// # Errors
/// As `open(2)`.
pub fn open_namespaces() -> Result<Vec<OwnedFd>, Errno> {
    let names: &[&str] = if process::own_uid() == 0 { &["mnt"] } else { &["user", "mnt"] };
    let open = |name: &&str| {
        rustix::fs::open(
            format!("/proc/self/ns/{name}"),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )
    };
    names.iter().map(open).collect()
}

/// Enters namespaces, in order.
///
/// # Errors
/// As `setns(2)`.
pub fn enter_namespaces(namespaces: &[OwnedFd]) -> Result<(), Errno> {
    namespaces
        .iter()
        .try_for_each(|namespace| setns(namespace, CloneFlags::empty()).map_err(from_nix))
}

/// Mounts a small tmpfs that other users can traverse but not list.
///
/// # Errors
/// As `mount(2)`.
pub fn mount_tmpfs(target: &Path) -> Result<(), Errno> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount_at(Some("codelia"), target, Some("tmpfs"), flags, Some("mode=0711,size=1m"))
        .map_err(from_nix)
}

/// Creates a whiteout: in an overlay it hides the file of this name in the layers below.
///
/// # Errors
/// As `mknod(2)`.
pub fn create_whiteout(path: &Path) -> Result<(), Errno> {
    rustix::fs::mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0)
}

/// Mounts a directory at `target` with ids mapped: there, files of the user and group `owner`
/// belong to this user and group.
///
/// # Errors
/// As `open_tree(2)`, `mount_setattr(2)` and `move_mount(2)`: not every file system supports this.
pub fn mount_idmapped(
    process: &SingleThread,
    source: &OwnedFd,
    target: &Path,
    owner: u32,
    ids: (u32, u32),
) -> Result<OwnedFd, Errno> {
    let user_namespace = create_user_namespace(process, owner, ids)?;
    mount_restricted(source, target, Some(&user_namespace))
}

/// Mounts the directory of a volume at `target`, without devices and setuid programs. As root,
/// files of the user and group `owner` belong to this user and group there.
///
/// # Errors
/// As `open_tree(2)`, `mount_setattr(2)` and `move_mount(2)`: not every file system supports this.
pub fn mount_volume(
    process: &SingleThread,
    source: &OwnedFd,
    target: &Path,
    owner: u32,
    ids: (u32, u32),
) -> Result<(), Errno> {
    if process::own_uid() == 0 {
        return mount_idmapped(process, source, target, owner, ids).map(drop);
    }
    mount_restricted(source, target, None).map(drop)
}

fn mount_restricted(
    source: &OwnedFd,
    target: &Path,
    user_namespace: Option<&OwnedFd>,
) -> Result<OwnedFd, Errno> {
    let tree = mount::clone_beneath(source, Path::new(""))?;
    mount::restrict_mount(&tree, user_namespace)?;
    mount::attach_on(&tree, &open_directory(target)?)?;
    Ok(tree)
}

/// Creates a user namespace in which user and group `owner` are these two outside. Its id maps can
/// be written only while a process is in it, so a child enters it and is killed afterwards.
fn create_user_namespace(
    process: &SingleThread,
    owner: u32,
    ids: (u32, u32),
) -> Result<OwnedFd, Errno> {
    let (ours, theirs) = crate::fd::socket_pair()?;
    let parent = process::own_pid();
    let child = || {
        let entered =
            unshare(CloneFlags::CLONE_NEWUSER).is_ok() && process::die_with_parent().is_ok();
        // If the parent is gone already, no death signal comes.
        let has_parent = entered && rustix::process::getppid() == Some(parent);
        // The child holds both ends of the socket, so the read blocks until it is killed.
        if has_parent && rustix::io::write(&theirs, &[0]).is_ok() {
            let _ = rustix::io::read(&theirs, &mut [0]);
        }
        0
    };
    let pid = process.fork(child)?;
    drop(theirs);
    let namespace = map_user_namespace(pid, &ours, owner, ids);
    process::kill(pid)?;
    process::reap_next()?;
    namespace
}

/// Waits until the process has entered its user namespace, maps ids into it and opens it.
fn map_user_namespace(
    pid: Pid,
    socket: &OwnedFd,
    owner: u32,
    (uid, gid): (u32, u32),
) -> Result<OwnedFd, Errno> {
    if rustix::io::read(socket, &mut [0])? == 0 {
        return Err(Errno::PERM);
    }
    let proc_dir = format!("/proc/{}", pid.as_raw_nonzero());
    fs::write(format!("{proc_dir}/uid_map"), format!("{owner} {uid} 1")).map_err(from_io)?;
    fs::write(format!("{proc_dir}/gid_map"), format!("{owner} {gid} 1")).map_err(from_io)?;
    let namespace = format!("{proc_dir}/ns/user");
    rustix::fs::open(namespace, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Mounts an overlay of these layers, the upper ones first. With `is_volatile` its changes are not
/// written to the disk by a sync of it or by its end.
///
/// # Errors
/// As `mount(2)`.
pub fn mount_overlay(
    lower: &[&OwnedFd],
    upper: &OwnedFd,
    work: &OwnedFd,
    target: &Path,
    is_volatile: bool,
) -> Result<(), Errno> {
    let lower = lower.iter().map(proc_fd_path).collect::<Vec<_>>().join(":");
    let more = if is_volatile { ",volatile" } else { "" };
    let by_user = match process::own_uid() {
        0 => "index=off,redirect_dir=nofollow,metacopy=off",
        _ => "userxattr",
    };
    let upper = proc_fd_path(upper);
    let work = proc_fd_path(work);
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work}{more},{by_user}");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount_at(Some("codelia"), target, Some("overlay"), flags, Some(options.as_str()))
        .map_err(from_nix)
}

/// Detaches a mount from its mount point. An overlay on top of it keeps working.
///
/// # Errors
/// As `umount2(2)`.
pub fn detach(target: &Path) -> Result<(), Errno> {
    umount2(target, MntFlags::MNT_DETACH).map_err(from_nix)
}

/// Whether a directory is a mount point.
///
/// # Errors
/// As `stat(2)`.
pub fn is_mounted(path: &Path) -> Result<bool, Errno> {
    let own = rustix::fs::stat(path)?;
    let parent = rustix::fs::stat(path.join(".."))?;
    Ok(own.st_dev != parent.st_dev)
}
