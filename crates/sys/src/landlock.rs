//! Landlock: which files may be executed.
//!
//! The kernel checks the right when it opens a file to execute it: the program, a script's
//! interpreter, a dynamic program's loader. It does not check when a program maps a file (shared
//! libraries) or reads one (a script passed to an interpreter), nor for files without a name.

use std::{
    mem::size_of,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
};

use nix::libc;
use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
};

const ACCESS_EXECUTE: u64 = 1 << 0;
/// Linking and renaming into another directory. Every ruleset that does not grant this denies it.
const ACCESS_REFER: u64 = 1 << 13;
const RULE_PATH_BENEATH: libc::c_int = 1;

#[repr(C)]
struct RulesetAttributes {
    handled_access_fs: u64,
}

#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent: RawFd,
}

/// A ruleset of the files that may be executed, not enforced yet.
#[derive(Debug)]
pub struct ExecAllowlist(OwnedFd);

impl ExecAllowlist {
    /// Creates a ruleset that allows no file.
    ///
    /// # Errors
    /// As `landlock_create_ruleset(2)`: a kernel without Landlock, or older than 5.19.
    pub fn new() -> Result<Self, Errno> {
        let attributes = RulesetAttributes { handled_access_fs: ACCESS_EXECUTE | ACCESS_REFER };
        // SAFETY: the kernel reads the attributes, of the given size, and keeps no pointer.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_landlock_create_ruleset,
                &raw const attributes,
                size_of::<RulesetAttributes>(),
                0,
            )
        };
        let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(crate::fd::last_errno)?;
        // SAFETY: the kernel has just created this descriptor; nothing else owns it.
        let ruleset = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        ruleset.grant(ACCESS_REFER, Path::new("/"))?;
        Ok(ruleset)
    }

    /// Allows a file, or all files below a directory. Ignores a missing one.
    ///
    /// # Errors
    /// As `open(2)` and `landlock_add_rule(2)`.
    pub fn allow(&self, path: &Path) -> Result<(), Errno> {
        match self.grant(ACCESS_EXECUTE, path) {
            Err(Errno::NOENT) => Ok(()),
            result => result,
        }
    }

    fn grant(&self, allowed_access: u64, path: &Path) -> Result<(), Errno> {
        let file = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let rule = PathBeneath { allowed_access, parent: file.as_fd().as_raw_fd() };
        // SAFETY: the rule has the layout of its type; the kernel reads it and keeps no pointer.
        let result = unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                self.0.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const rule,
                0,
            )
        };
        if result == 0 { Ok(()) } else { Err(crate::fd::last_errno()) }
    }

    /// Enforces the ruleset on this thread and all its children, irrevocably. Needs `no_new_privs`.
    ///
    /// # Errors
    /// As `landlock_restrict_self(2)`.
    pub fn restrict_self(self) -> Result<(), Errno> {
        // SAFETY: takes no pointers.
        let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.0.as_raw_fd(), 0) };
        if result == 0 { Ok(()) } else { Err(crate::fd::last_errno()) }
    }
}
