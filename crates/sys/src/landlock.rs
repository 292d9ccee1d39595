//! Landlock: which files may be executed.
//!
//! The kernel asks for the right whenever it opens a file to execute it: the program, the interpreter of
//! a script, the loader of a dynamic program. It does not ask when a program maps a file (its shared
//! libraries) or reads one (a script given to an interpreter), nor for files without a name.

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
/// To link and rename into another directory: refused by every ruleset that does not grant it.
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

/// Files that may be executed, in the making.
#[derive(Debug)]
pub struct Executables(OwnedFd);

impl Executables {
    /// None yet.
    ///
    /// # Errors
    /// As `landlock_create_ruleset(2)`: a kernel without it, or before 5.19.
    pub fn none() -> Result<Self, Errno> {
        let attributes = RulesetAttributes { handled_access_fs: ACCESS_EXECUTE | ACCESS_REFER };
        // SAFETY: the kernel reads the attributes, of the size given, and keeps no pointer.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_landlock_create_ruleset,
                &raw const attributes,
                size_of::<RulesetAttributes>(),
                0,
            )
        };
        let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(crate::fd::last_errno)?;
        // SAFETY: the kernel has just made it for us.
        let ruleset = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        ruleset.grant(ACCESS_REFER, Path::new("/"))?;
        Ok(ruleset)
    }

    /// Adds a file, or all files below a directory. What is not there cannot be executed anyway.
    ///
    /// # Errors
    /// As `open(2)` and `landlock_add_rule(2)`.
    pub fn add(&self, path: &Path) -> Result<(), Errno> {
        match self.grant(ACCESS_EXECUTE, path) {
            Err(Errno::NOENT) => Ok(()),
            answer => answer,
        }
    }

    fn grant(&self, allowed_access: u64, path: &Path) -> Result<(), Errno> {
        let file = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let rule = PathBeneath { allowed_access, parent: file.as_fd().as_raw_fd() };
        // SAFETY: the kernel reads the rule, whose form this kind of rule has, and keeps no pointer.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                self.0.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const rule,
                0,
            )
        };
        if answer == 0 { Ok(()) } else { Err(crate::fd::last_errno()) }
    }

    /// Lets this thread, and all it starts, execute these alone, for good. Needs `no_new_privs`.
    ///
    /// # Errors
    /// As `landlock_restrict_self(2)`.
    pub fn restrict_self(self) -> Result<(), Errno> {
        // SAFETY: takes no pointers.
        let answer = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.0.as_raw_fd(), 0) };
        if answer == 0 { Ok(()) } else { Err(crate::fd::last_errno()) }
    }
}
