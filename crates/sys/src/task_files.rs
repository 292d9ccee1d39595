//! The files that a system call of another task names: reading the name from its memory, resolving
//! it in the root of that task, opening the result.
//!
//! Nothing here trusts the task. What a name leads to may change at any time, so a caller decides
//! by the descriptor that it got, never by the name.

use std::{
    ffi::CString,
    io::IoSliceMut,
    os::{
        fd::{AsFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use nix::{
    libc,
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd::Pid,
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};

use crate::{call::from_nix, fd::proc_fd_path};

/// A relative name starts at the working directory.
pub const AT_FDCWD: RawFd = libc::AT_FDCWD;

/// The longest name that the kernel takes, with its final zero.
const MAX_NAME: usize = 4096;
/// No architecture that Codelia supports has smaller pages.
const PAGE: usize = 4096;

/// Reads the name at an address of a task. Reads the memory of the task once.
///
/// # Errors
/// As `process_vm_readv(2)`; `ENAMETOOLONG` for a name without an end.
pub fn read_name(task: u32, address: u64) -> Result<CString, Errno> {
    let base = usize::try_from(address).map_err(|_| Errno::FAULT)?;
    // One part for each page: of a part that is not mapped, nothing is read.
    let first = PAGE - base % PAGE;
    let second = base.checked_add(first).ok_or(Errno::FAULT)?;
    let parts =
        [RemoteIoVec { base, len: first }, RemoteIoVec { base: second, len: MAX_NAME - first }];
    let mut bytes = [0; MAX_NAME];
    let task = Pid::from_raw(task.try_into().map_err(|_| Errno::SRCH)?);
    let read = process_vm_readv(task, &mut [IoSliceMut::new(&mut bytes)], &parts);
    let read = read.map_err(from_nix)?;
    let end = bytes[..read].iter().position(|byte| *byte == 0).ok_or(Errno::NAMETOOLONG)?;
    CString::new(&bytes[..end]).map_err(|_| Errno::INVAL)
}

/// Opens the root directory of a task, without reading rights.
///
/// # Errors
/// As `open(2)`.
pub fn open_root(task: u32) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, format!("/proc/{task}/root"), flags, Mode::empty())
}

/// Makes a name absolute in the root of a task: relative to a directory that the task has open, or
/// to its working directory for `AT_FDCWD`.
///
/// # Errors
/// As `readlink(2)`; `ENOTDIR` if the descriptor has no path.
pub fn absolute(task: u32, directory: RawFd, name: &CString) -> Result<PathBuf, Errno> {
    let name = Path::new(std::ffi::OsStr::from_bytes(name.as_bytes()));
    if name.is_absolute() {
        return Ok(name.to_owned());
    }
    let link = match directory {
        AT_FDCWD => format!("/proc/{task}/cwd"),
        fd => format!("/proc/{task}/fd/{fd}"),
    };
    let base = read_link(&link)?;
    if base.is_absolute() { Ok(base.join(name)) } else { Err(Errno::NOTDIR) }
}

/// The path of a file that a task has open, in the root of its mount namespace.
///
/// # Errors
/// As `readlink(2)`; `ENOENT` if it has no path.
pub fn path_of_descriptor(task: u32, fd: RawFd) -> Result<PathBuf, Errno> {
    read_path(&format!("/proc/{task}/fd/{fd}"))
}

/// The program that a task executes, in the root of its mount namespace.
///
/// # Errors
/// As `readlink(2)`; `ENOENT` if it has no path.
pub fn executable(task: u32) -> Result<PathBuf, Errno> {
    read_path(&format!("/proc/{task}/exe"))
}

/// The working directory of a task, in the root of its mount namespace.
///
/// # Errors
/// As `readlink(2)`; `ENOENT` if it has no path.
pub fn working_directory(task: u32) -> Result<PathBuf, Errno> {
    read_path(&format!("/proc/{task}/cwd"))
}

/// The process of a task, by its number in its own PID namespace.
///
/// # Errors
/// As `open(2)` and `read(2)`; `ESRCH` if the process is gone.
pub fn pid_in_namespace(task: u32) -> Result<u32, Errno> {
    last_number(&format!("/proc/{task}/status"), "NStgid:")
}

/// The process that a pidfd of a task refers to, by its number in its own PID namespace.
///
/// # Errors
/// As `open(2)` and `read(2)`; `ESRCH` if it is not a pidfd, or the process is gone.
pub fn pid_of_descriptor(task: u32, fd: RawFd) -> Result<u32, Errno> {
    last_number(&format!("/proc/{task}/fdinfo/{fd}"), "NSpid:")
}

/// The last number of a line in a small file of `/proc`.
fn last_number(file: &str, key: &str) -> Result<u32, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, file, flags, Mode::empty())?;
    let mut bytes = [0; PAGE];
    let read = rustix::io::read(file, &mut bytes)?;
    let text = String::from_utf8_lossy(&bytes[..read]);
    let line = text.lines().find_map(|line| line.strip_prefix(key)).ok_or(Errno::SRCH)?;
    line.split_ascii_whitespace().last().and_then(|number| number.parse().ok()).ok_or(Errno::SRCH)
}

fn read_path(link: &str) -> Result<PathBuf, Errno> {
    read_link(link).and_then(|path| if path.is_absolute() { Ok(path) } else { Err(Errno::NOENT) })
}

/// Resolves an absolute name below a root: links and `..` do not leave it. Opens neither for
/// reading nor for writing, so nothing blocks and nothing happens to the file.
///
/// # Errors
/// As `openat2(2)`. Names that go through links of `/proc` are refused.
pub fn resolve(root: impl AsFd, name: &Path, follow: bool) -> Result<OwnedFd, Errno> {
    let follow = if follow { OFlags::empty() } else { OFlags::NOFOLLOW };
    let flags = OFlags::PATH | OFlags::CLOEXEC | follow;
    let scope = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(root, name, flags, Mode::empty(), scope)
}

/// The path of an open file, in the root of its mount namespace. `None` unless it is a regular file
/// that has a name.
///
/// # Errors
/// As `fstat(2)` and `readlink(2)`.
pub fn path_of_regular_file(file: impl AsFd) -> Result<Option<PathBuf>, Errno> {
    let status = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile || status.st_nlink == 0 {
        return Ok(None);
    }
    read_link(&proc_fd_path(&file)).map(Some)
}

/// The path of an open file, in the root of its mount namespace.
///
/// # Errors
/// As `readlink(2)`.
pub fn path_of(file: impl AsFd) -> Result<PathBuf, Errno> {
    read_link(&proc_fd_path(&file))
}

/// Whether this is a regular file that somebody may execute.
///
/// # Errors
/// As `fstat(2)`.
pub fn is_executable_file(file: impl AsFd) -> Result<bool, Errno> {
    let mode = rustix::fs::fstat(&file)?.st_mode;
    Ok(FileType::from_raw_mode(mode) == FileType::RegularFile && mode & 0o111 != 0)
}

/// Opens what a descriptor of a task refers to, without reading rights.
///
/// # Errors
/// As `open(2)`.
pub fn open_descriptor(task: u32, descriptor: RawFd) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, format!("/proc/{task}/fd/{descriptor}"), flags, Mode::empty())
}

/// Opens a resolved regular file for reading, without waiting for anything.
///
/// # Errors
/// As `open(2)`; `EAGAIN` if another process holds a lease on the file.
pub fn open_to_read(file: impl AsFd) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::openat(CWD, proc_fd_path(&file), flags, Mode::empty())
}

/// Sets whether reads of an open file wait.
///
/// # Errors
/// As `fcntl(2)`.
pub fn set_nonblocking(file: impl AsFd, nonblocking: bool) -> Result<(), Errno> {
    let mut flags = rustix::fs::fcntl_getfl(&file)?;
    flags.set(OFlags::NONBLOCK, nonblocking);
    rustix::fs::fcntl_setfl(file, flags)
}

fn read_link(link: &str) -> Result<PathBuf, Errno> {
    let target = rustix::fs::readlink(link, Vec::new())?;
    Ok(PathBuf::from(std::ffi::OsStr::from_bytes(target.as_bytes())))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::fd::AsRawFd};

    use super::*;

    #[test]
    fn name_is_read_up_to_its_end() {
        let own = std::process::id();
        let name = CString::new("/opt/file").unwrap();
        assert_eq!(read_name(own, name.as_ptr() as u64).unwrap(), name);
        assert_eq!(read_name(own, 8), Err(Errno::FAULT));
        let endless = vec![b'a'; 3 * MAX_NAME];
        assert_eq!(read_name(own, endless.as_ptr() as u64), Err(Errno::NAMETOOLONG));
    }

    #[test]
    fn own_process_is_described() {
        let own = std::process::id();
        assert_eq!(executable(own).unwrap(), std::env::current_exe().unwrap());
        assert_eq!(working_directory(own).unwrap(), std::env::current_dir().unwrap());
        assert!(pid_in_namespace(own).is_ok_and(|pid| pid > 0));
        let file = fs::File::open("/dev/null").unwrap();
        assert_eq!(path_of_descriptor(own, file.as_raw_fd()).unwrap(), Path::new("/dev/null"));
        assert_eq!(pid_of_descriptor(own, file.as_raw_fd()), Err(Errno::SRCH));
        let pidfd = rustix::process::pidfd_open(
            rustix::process::getpid(),
            rustix::process::PidfdFlags::empty(),
        );
        let pidfd = pidfd.unwrap();
        assert_eq!(pid_of_descriptor(own, pidfd.as_raw_fd()), pid_in_namespace(own));
    }

    #[test]
    fn links_and_dots_stay_in_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let (inner, outside) = (dir.path().join("root"), dir.path().join("file"));
        fs::create_dir(&inner).unwrap();
        fs::write(&outside, "outside").unwrap();
        fs::write(inner.join("file"), "inside").unwrap();
        std::os::unix::fs::symlink("/file", inner.join("link")).unwrap();
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, &inner, flags, Mode::empty()).unwrap();
        for name in ["/file", "/../file", "/link", "/./x/../../file"] {
            let found = resolve(&root, Path::new(name), true);
            match found {
                Ok(found) => {
                    assert_eq!(
                        path_of_regular_file(&found).unwrap(),
                        Some(inner.join("file")),
                        "{name}"
                    );
                    let mut text = String::new();
                    std::io::Read::read_to_string(
                        &mut fs::File::from(open_to_read(&found).unwrap()),
                        &mut text,
                    )
                    .unwrap();
                    assert_eq!(text, "inside");
                }
                Err(errno) => assert_eq!((name, errno), ("/./x/../../file", Errno::NOENT)),
            }
        }
        let link = resolve(&root, Path::new("/link"), false).unwrap();
        assert_eq!(path_of_regular_file(&link).unwrap(), None, "the link itself");
    }

    #[test]
    fn file_without_a_name_has_no_path() {
        let dir = tempfile::tempdir().unwrap();
        let file = fs::File::create(dir.path().join("file")).unwrap();
        assert!(path_of_regular_file(&file).unwrap().is_some());
        fs::remove_file(dir.path().join("file")).unwrap();
        assert_eq!(path_of_regular_file(&file).unwrap(), None);
        assert_eq!(path_of_regular_file(fs::File::open(dir.path()).unwrap()).unwrap(), None);
    }
}
