//! The extended attributes of changes: those of the overlay are removed, others are kept.

use std::{
    ffi::{CStr, CString},
    io,
    path::PathBuf,
};

use codelia_sys::resolve_beneath::proc_fd_path;
use rustix::{
    fd::AsFd,
    fs::{XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, llistxattr, lremovexattr},
    io::Errno,
};

/// Prefixes of the overlay's attributes: as root, and for other users.
const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];
/// Whether a directory hides the one below it.
const OPAQUE: [&CStr; 2] = [c"trusted.overlay.opaque", c"user.overlay.opaque"];
/// The mode of a directory that its owner may not change, while the changes are being applied.
const MODE: &CStr = c"user.codelia.mode";

/// A name in a directory, for calls that take a path and follow no link at its end.
fn path(directory: &impl AsFd, name: &CStr) -> PathBuf {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    PathBuf::from(proc_fd_path(directory)).join(OsStr::from_bytes(name.to_bytes()))
}

/// Whether a directory of a layer hides the one of the workspace. Only the overlay can have set it.
pub(super) fn is_opaque(directory: &impl AsFd) -> io::Result<bool> {
    let mut value = [0; 1];
    for name in OPAQUE {
        match fgetxattr(directory, name, &mut value) {
            Ok(1) if value[0] == b'y' => return Ok(true),
            Ok(_) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(false)
}

/// Removes the attributes of the overlay, with or without the one that makes a directory opaque.
pub(super) fn strip(directory: &impl AsFd, name: &CStr, keep_opaque: bool) -> io::Result<()> {
    let path = path(directory, name);
    let listed = list(|buffer| llistxattr(&path, buffer))?;
    let is_ours =
        |name: &&CString| OVERLAY.iter().any(|prefix| name.to_bytes().starts_with(prefix));
    for name in listed.iter().filter(|name| is_ours(name)) {
        if !(keep_opaque && OPAQUE.contains(&name.as_c_str())) {
            remove(|| lremovexattr(&path, name.as_c_str()))?;
        }
    }
    Ok(())
}

/// Remembers the mode of a directory in it.
pub(super) fn remember_mode(directory: &impl AsFd, mode: u32) -> io::Result<()> {
    Ok(fsetxattr(directory, MODE, &mode.to_le_bytes(), XattrFlags::empty())?)
}

/// The mode that a directory was remembered with.
pub(super) fn remembered_mode(directory: &impl AsFd) -> io::Result<Option<u32>> {
    let mut value = [0; 4];
    match fgetxattr(directory, MODE, &mut value) {
        Ok(4) => Ok(Some(u32::from_le_bytes(value) & 0o7777)),
        Ok(_) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Forgets the remembered mode.
pub(super) fn forget_mode(directory: &impl AsFd) -> io::Result<()> {
    remove(|| fremovexattr(directory, MODE))
}

/// Gives a directory the attributes and access lists of another one.
pub(super) fn copy(from: &impl AsFd, to: &impl AsFd) -> io::Result<()> {
    let wanted = list(|buffer| flistxattr(from, buffer))?;
    let present = list(|buffer| flistxattr(to, buffer))?;
    for name in present.iter().filter(|name| is_copied(name) && !wanted.contains(name)) {
        remove(|| fremovexattr(to, name.as_c_str()))?;
    }
    for name in wanted.iter().filter(|name| is_copied(name)) {
        let value = read(|buffer| fgetxattr(from, name.as_c_str(), buffer))?;
        fsetxattr(to, name.as_c_str(), &value, XattrFlags::empty())?;
    }
    Ok(())
}

/// Whether the owner of a directory may set this attribute.
fn is_copied(name: &CString) -> bool {
    let bytes = name.to_bytes();
    let is_users =
        bytes.starts_with(b"user.") && !bytes.starts_with(OVERLAY[1]) && name.as_c_str() != MODE;
    is_users || bytes.starts_with(b"system.posix_acl_")
}

fn list(call: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> io::Result<Vec<CString>> {
    let names = match read(call) {
        Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => Vec::new(),
        names => names?,
    };
    let words = names.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    Ok(words.filter_map(|word| CString::new(word).ok()).collect())
}

/// Reads what the kernel bounds to 64 KiB.
fn read(call: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; 256];
    let length = match call(&mut buffer) {
        Err(Errno::RANGE) => {
            buffer.resize(64 * 1024, 0);
            call(&mut buffer)?
        }
        length => length?,
    };
    buffer.truncate(length);
    Ok(buffer)
}

fn remove(call: impl FnOnce() -> Result<(), Errno>) -> io::Result<()> {
    match call() {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
