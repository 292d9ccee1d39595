//! Landlock: which files may be executed or read, and which abstract sockets may be reached.
//!
//! The kernel checks the right to execute when it opens a file to execute it: the program, a
//! script's interpreter, a dynamic program's loader. It does not check when a program maps a file
//! (shared libraries) or reads one (a script passed to an interpreter), nor for files without a
//! name.
//!
//! The right to read is checked when a file is opened to read or execute it. A descriptor that
//! another process opened and passed in reads without that right.

use std::{
    mem::size_of,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    path::Path,
};

use nix::libc;
use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
};

use crate::call::{check, new_descriptor};

const ACCESS_EXECUTE: u64 = 1 << 0;
const ACCESS_READ_FILE: u64 = 1 << 2;
/// Linking and renaming into another directory. Every ruleset that does not grant this denies it.
const ACCESS_REFER: u64 = 1 << 13;
const RULE_PATH_BENEATH: libc::c_int = 1;

/// Connecting to abstract sockets that were made outside.
const SCOPE_ABSTRACT_UNIX_SOCKET: u64 = 1 << 0;

/// The kernel takes the first fields alone too; older ones know only those.
#[repr(C)]
#[derive(Default)]
struct RulesetAttributes {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent: RawFd,
}

/// A ruleset of files, not enforced yet.
#[derive(Debug)]
pub struct FileAllowlist {
    ruleset: OwnedFd,
    access: u64,
}

impl FileAllowlist {
    /// Creates a ruleset that allows no file to be executed.
    ///
    /// # Errors
    /// As `landlock_create_ruleset(2)`: a kernel without Landlock, or older than 5.19.
    pub fn of_executables() -> Result<Self, Errno> {
        Self::new(ACCESS_EXECUTE)
    }

    /// Creates a ruleset that allows no file to be read or executed. Directories can be listed.
    ///
    /// # Errors
    /// As `landlock_create_ruleset(2)`: a kernel without Landlock, or older than 5.19.
    pub fn of_readable() -> Result<Self, Errno> {
        Self::new(ACCESS_READ_FILE | ACCESS_EXECUTE)
    }

    fn new(access: u64) -> Result<Self, Errno> {
        let handled_access_fs = access | ACCESS_REFER;
        let attributes = RulesetAttributes { handled_access_fs, ..RulesetAttributes::default() };
        let ruleset = Self { ruleset: create_ruleset(&attributes, size_of::<u64>())?, access };
        ruleset.grant(ACCESS_REFER, Path::new("/"))?;
        Ok(ruleset)
    }

    /// Allows a file, or all files below a directory. Ignores a missing one.
    ///
    /// # Errors
    /// As `open(2)` and `landlock_add_rule(2)`.
    pub fn allow(&self, path: &Path) -> Result<(), Errno> {
        match self.grant(self.access, path) {
            Err(Errno::NOENT) => Ok(()),
            result => result,
        }
    }

    fn grant(&self, allowed_access: u64, path: &Path) -> Result<(), Errno> {
        let file = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let rule = PathBeneath { allowed_access, parent: file.as_fd().as_raw_fd() };
        // SAFETY: the rule has the layout of its type; the kernel reads it and keeps no pointer.
        check(unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                self.ruleset.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const rule,
                0,
            )
        })
    }

    /// Enforces the ruleset on this thread and all its children, irrevocably. Needs `no_new_privs`.
    ///
    /// # Errors
    /// As `landlock_restrict_self(2)`.
    pub fn restrict_self(self) -> Result<(), Errno> {
        restrict_self(&self.ruleset)
    }
}

/// Keeps this thread and all its children from abstract Unix sockets that were made outside,
/// irrevocably. Needs `no_new_privs`. Returns `false` on a kernel older than 6.12, which cannot.
///
/// # Errors
/// As `landlock_create_ruleset(2)` and `landlock_restrict_self(2)`.
pub fn scope_abstract_sockets() -> Result<bool, Errno> {
    match create_scope() {
        Ok(ruleset) => restrict_self(&ruleset).map(|()| true),
        // No Landlock, or one that does not know the field.
        Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::TOOBIG | Errno::INVAL) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether [`scope_abstract_sockets`] has an effect here.
#[must_use]
pub fn can_scope() -> bool {
    create_scope().is_ok()
}

fn create_scope() -> Result<OwnedFd, Errno> {
    let scoped = SCOPE_ABSTRACT_UNIX_SOCKET;
    let attributes = RulesetAttributes { scoped, ..RulesetAttributes::default() };
    create_ruleset(&attributes, size_of::<RulesetAttributes>())
}

/// Creates a ruleset from the first `size` bytes of the attributes.
fn create_ruleset(attributes: &RulesetAttributes, size: usize) -> Result<OwnedFd, Errno> {
    let size = size.min(size_of::<RulesetAttributes>());
    let attributes = std::ptr::from_ref(attributes);
    // SAFETY: the kernel reads the attributes, at most of their size, and keeps no pointer. It
    // returns a new descriptor.
    unsafe { new_descriptor(libc::syscall(libc::SYS_landlock_create_ruleset, attributes, size, 0)) }
}

fn restrict_self(ruleset: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: takes no pointers.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) })
}
