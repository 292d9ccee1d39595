//! Mounts that are made with descriptors and attached at once: private file systems, read-only
//! views, masks. Only in a mount namespace that this process owns.

use std::{
    ffi::{CStr, CString, c_char},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    ptr,
};

use nix::{
    libc,
    mount::{MntFlags, MsFlags},
    sched::{CloneFlags, unshare},
};
use rustix::{fs::CWD, io::Errno};

use crate::{
    call::{check, from_nix, new_descriptor},
    fd::proc_fd_path,
};

/// Values of the kernel's interface that `libc` lacks.
const FSOPEN_CLOEXEC: u32 = 1;
const FSMOUNT_CLOEXEC: u32 = 1;
const SET_FLAG: u32 = 0;
const SET_STRING: u32 = 1;
const CREATE: u32 = 6;

/// Neither devices nor setuid programs work in a mount.
const RESTRICTED: u64 = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;

/// Moves this process into a new cgroup namespace, whose root is the cgroup that it is in.
///
/// # Errors
/// As `unshare(2)`.
pub fn unshare_cgroups() -> Result<(), Errno> {
    unshare(CloneFlags::CLONE_NEWCGROUP).map_err(from_nix)
}

/// Moves this process into new user, mount and UTS namespaces. Nothing propagates between its
/// mounts and those of the host.
///
/// # Errors
/// As `unshare(2)` and `mount(2)`.
pub fn unshare_for_zygote() -> Result<(), Errno> {
    let namespaces = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS;
    unshare(namespaces).map_err(from_nix)?;
    let none = None::<&str>;
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    nix::mount::mount(none, "/", none, flags, none).map_err(from_nix)
}

/// Makes a mount that is not attached yet the root of this process's mount namespace. The former
/// root and everything below it is gone from there.
///
/// # Errors
/// As `move_mount(2)`, `pivot_root(2)` and `umount2(2)`.
pub fn change_root(root: &OwnedFd) -> Result<(), Errno> {
    // Any directory serves that every host has.
    attach(root, Path::new("/proc"))?;
    rustix::process::fchdir(root)?;
    // The old root ends on top of the new one, where the working directory is.
    rustix::process::pivot_root(".", ".")?;
    nix::mount::umount2(".", MntFlags::MNT_DETACH).map_err(from_nix)?;
    rustix::process::chdir("/")
}

/// Moves this process into a new mount namespace and a new cgroup namespace. The root of the latter
/// is the cgroup that the process is in.
///
/// # Errors
/// As `unshare(2)`.
pub fn unshare_mounts_and_cgroups() -> Result<(), Errno> {
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWCGROUP).map_err(from_nix)
}

/// Creates a tmpfs that is not attached yet.
///
/// # Errors
/// As `fsopen(2)`, `fsconfig(2)` and `fsmount(2)`.
pub fn create_tmpfs(max_bytes: u64) -> Result<OwnedFd, Errno> {
    create_tmpfs_with_mode(max_bytes, "0755")
}

/// Creates a tmpfs in which everyone may create files, not attached yet.
///
/// # Errors
/// As `fsopen(2)`, `fsconfig(2)` and `fsmount(2)`.
pub fn create_shared_tmpfs(max_bytes: u64) -> Result<OwnedFd, Errno> {
    create_tmpfs_with_mode(max_bytes, "1777")
}

/// Creates the `/proc` of this process's PID namespace, not attached yet.
///
/// # Errors
/// As `fsopen(2)`, `fsconfig(2)` and `fsmount(2)`: `EPERM` if parts of every `/proc` that this
/// process sees are covered.
pub fn create_proc() -> Result<OwnedFd, Errno> {
    create(&open_file_system(c"proc")?, RESTRICTED | libc::MOUNT_ATTR_NOEXEC)
}

/// Creates a `/dev/pts` of its own, not attached yet, in which at most `max` terminals can be open.
///
/// # Errors
/// As `fsopen(2)`, `fsconfig(2)` and `fsmount(2)`.
pub fn create_devpts(max: u32) -> Result<OwnedFd, Errno> {
    let context = open_file_system(c"devpts")?;
    for (name, value) in [(c"mode", "620"), (c"ptmxmode", "666"), (c"max", &*max.to_string())] {
        configure(&context, SET_STRING, Some((name, Some(value))))?;
    }
    create(&context, libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC)
}

fn create_tmpfs_with_mode(max_bytes: u64, mode: &str) -> Result<OwnedFd, Errno> {
    let context = open_file_system(c"tmpfs")?;
    configure(&context, SET_STRING, Some((c"mode", Some(mode))))?;
    configure(&context, SET_STRING, Some((c"size", Some(&max_bytes.to_string()))))?;
    create(&context, RESTRICTED)
}

/// Creates a read-only overlay of a directory that is not attached yet. `empty` is an empty
/// directory: the kernel wants two layers. Files there have the content of those below, but watches
/// and locks of one are not seen at the other.
///
/// # Errors
/// As `fsopen(2)`, `fsconfig(2)` and `fsmount(2)`: `ENODEV` without the file system, `EPERM` where
/// only root may use it, `EINVAL` for a directory that it does not support.
pub fn create_read_only_overlay(directory: &OwnedFd, empty: &OwnedFd) -> Result<OwnedFd, Errno> {
    let context = open_file_system(c"overlay")?;
    let layers = format!("{}:{}", proc_fd_path(directory), proc_fd_path(empty));
    configure(&context, SET_STRING, Some((c"source", Some("codelia"))))?;
    configure(&context, SET_STRING, Some((c"lowerdir", Some(&layers))))?;
    configure(&context, SET_FLAG, Some((c"userxattr", None)))?;
    create(&context, RESTRICTED | libc::MOUNT_ATTR_RDONLY)
}

/// Clones the mount of a path, not attached to any mount point yet.
///
/// # Errors
/// As `open_tree(2)`.
pub fn clone_mount(path: &Path) -> Result<OwnedFd, Errno> {
    open_tree(CWD, path, 0)
}

/// Clones the mount of a path with all mounts below it.
///
/// # Errors
/// As `open_tree(2)`.
pub fn clone_tree(path: &Path) -> Result<OwnedFd, Errno> {
    open_tree(CWD, path, libc::AT_RECURSIVE.cast_unsigned())
}

/// Clones the mount of a path below a directory; an empty path is the directory itself.
///
/// # Errors
/// As `open_tree(2)`.
pub fn clone_beneath(directory: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    open_tree(directory, path, libc::AT_EMPTY_PATH.cast_unsigned())
}

fn open_tree(directory: impl AsFd, path: &Path, flags: u32) -> Result<OwnedFd, Errno> {
    let path = c_path(path)?;
    let flags = flags | libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    let directory = directory.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, the path is NUL-terminated, and the call returns a new
    // descriptor.
    unsafe { new_descriptor(libc::syscall(libc::SYS_open_tree, directory, path.as_ptr(), flags)) }
}

const READ_ONLY: libc::mount_attr = added(libc::MOUNT_ATTR_RDONLY);

/// Makes a mount read-only, which a clone of it inherits.
///
/// # Errors
/// As `mount_setattr(2)`.
pub fn make_read_only(tree: &OwnedFd) -> Result<(), Errno> {
    set_attributes(tree, &READ_ONLY)
}

/// Takes set-user-ID bits and devices from a mount and all mounts below it, and writing unless
/// `writable`.
///
/// # Errors
/// As `mount_setattr(2)`.
pub fn restrict_tree(tree: &OwnedFd, writable: bool) -> Result<(), Errno> {
    let read_only = if writable { 0 } else { libc::MOUNT_ATTR_RDONLY };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    set_attributes_at(tree, Path::new(""), flags, &added(RESTRICTED | read_only))
}

/// Takes set-user-ID bits and devices from a mount alone. With a user namespace, its files belong
/// to the users that the namespace maps them to.
pub(crate) fn restrict_mount(
    tree: &OwnedFd,
    user_namespace: Option<&OwnedFd>,
) -> Result<(), Errno> {
    let Some(user_namespace) = user_namespace else {
        return set_attributes(tree, &added(RESTRICTED));
    };
    let userns_fd = u64::from(user_namespace.as_raw_fd().unsigned_abs());
    let attributes = added(RESTRICTED | libc::MOUNT_ATTR_IDMAP);
    set_attributes(tree, &libc::mount_attr { userns_fd, ..attributes })
}

/// Takes set-user-ID bits from the mount of a device.
///
/// # Errors
/// As `mount_setattr(2)`.
pub fn restrict_device(tree: &OwnedFd) -> Result<(), Errno> {
    set_attributes(tree, &added(libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC))
}

const fn added(attributes: u64) -> libc::mount_attr {
    libc::mount_attr { attr_set: attributes, attr_clr: 0, propagation: 0, userns_fd: 0 }
}

/// Takes writing or execution from a mount that is not attached yet, or from the mount that a
/// descriptor is the root of.
///
/// # Errors
/// As `mount_setattr(2)`.
pub fn restrict_access(tree: &OwnedFd, writable: bool, executable: bool) -> Result<(), Errno> {
    let read_only = if writable { 0 } else { libc::MOUNT_ATTR_RDONLY };
    let no_execution = if executable { 0 } else { libc::MOUNT_ATTR_NOEXEC };
    set_attributes(tree, &added(read_only | no_execution))
}

/// Takes execution from the mount at a path and from all mounts below it.
///
/// # Errors
/// As `mount_setattr(2)`: `EINVAL` if nothing is mounted there.
pub fn deny_execution(path: &Path) -> Result<(), Errno> {
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_RECURSIVE;
    set_attributes_at(CWD, path, flags, &added(libc::MOUNT_ATTR_NOEXEC))
}

/// Sets `nosuid` on the mount at `path` and on every mount below it.
///
/// # Errors
/// As `mount_setattr(2)`, which needs Linux 5.12.
pub fn deny_setuid(path: &Path) -> Result<(), Errno> {
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_RECURSIVE;
    set_attributes_at(CWD, path, flags, &added(libc::MOUNT_ATTR_NOSUID))
}

/// Sets `nodev` on the mount at `path` alone.
///
/// # Errors
/// As `mount_setattr(2)`: `EINVAL` if nothing is mounted there.
pub fn deny_devices(path: &Path) -> Result<(), Errno> {
    set_attributes_at(CWD, path, libc::AT_SYMLINK_NOFOLLOW, &added(libc::MOUNT_ATTR_NODEV))
}

/// Makes the mount at a path read-only.
///
/// # Errors
/// As `mount_setattr(2)`.
pub fn make_path_read_only(path: &Path) -> Result<(), Errno> {
    set_attributes_at(CWD, path, libc::AT_SYMLINK_NOFOLLOW, &READ_ONLY)
}

fn set_attributes(tree: &OwnedFd, attributes: &libc::mount_attr) -> Result<(), Errno> {
    set_attributes_at(tree, Path::new(""), libc::AT_EMPTY_PATH, attributes)
}

fn set_attributes_at(
    directory: impl AsFd,
    path: &Path,
    flags: i32,
    attributes: &libc::mount_attr,
) -> Result<(), Errno> {
    let path = c_path(path)?;
    // SAFETY: the descriptor is open, the path is NUL-terminated, and the size is that of the
    // attributes, which the kernel only reads.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            directory.as_fd().as_raw_fd(),
            path.as_ptr(),
            flags,
            ptr::from_ref(attributes),
            size_of_val(attributes),
        )
    })
}

/// Attaches a mount at a path. Does not follow a symbolic link at its end.
///
/// # Errors
/// As `move_mount(2)`.
pub fn attach(tree: &OwnedFd, target: &Path) -> Result<(), Errno> {
    move_mount(tree, CWD, &c_path(target)?, 0)
}

/// Attaches a mount on a directory that is open.
///
/// # Errors
/// As `move_mount(2)`.
pub fn attach_on(tree: &OwnedFd, directory: &OwnedFd) -> Result<(), Errno> {
    move_mount(tree, directory, c"", libc::MOVE_MOUNT_T_EMPTY_PATH)
}

fn move_mount(
    tree: &OwnedFd,
    directory: impl AsFd,
    target: &CStr,
    flags: u32,
) -> Result<(), Errno> {
    // SAFETY: both descriptors are open and both paths are NUL-terminated.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            directory.as_fd().as_raw_fd(),
            target.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH | flags,
        )
    })
}

fn open_file_system(name: &CStr) -> Result<OwnedFd, Errno> {
    // SAFETY: the name is NUL-terminated, and the call returns a new descriptor.
    unsafe { new_descriptor(libc::syscall(libc::SYS_fsopen, name.as_ptr(), FSOPEN_CLOEXEC)) }
}

/// Sets a parameter, a flag or a string, or carries out a command without any.
fn configure(
    context: &OwnedFd,
    command: u32,
    parameter: Option<(&CStr, Option<&str>)>,
) -> Result<(), Errno> {
    let value = parameter.and_then(|(_, value)| value).map(CString::new).transpose();
    let value = value.map_err(|_| Errno::INVAL)?;
    let name: *const c_char = parameter.map_or(ptr::null(), |(name, _)| name.as_ptr());
    let value: *const c_char = value.as_ref().map_or(ptr::null(), |value| value.as_ptr());
    // SAFETY: the descriptor is open; name and value are null or NUL-terminated, and live until the
    // call returns.
    check(unsafe {
        libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, name, value, 0)
    })
}

fn create(context: &OwnedFd, attributes: u64) -> Result<OwnedFd, Errno> {
    configure(context, CREATE, None)?;
    let context = context.as_raw_fd();
    // SAFETY: the descriptor is open, and the call returns a new one.
    unsafe {
        new_descriptor(libc::syscall(libc::SYS_fsmount, context, FSMOUNT_CLOEXEC, attributes))
    }
}

fn c_path(path: &Path) -> Result<CString, Errno> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)
}
