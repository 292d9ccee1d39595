//! Irrevocable restrictions: dropping init's privileges and system calls, and limiting what the
//! command's process may execute and read.

use std::{fs::File, path::PathBuf};

use codelia_init::{ExpectedEnvironment, Failure, Setup, Step};
use codelia_sys::{Errno, capability, elf, landlock::FileAllowlist, seccomp};

use crate::failure::at;

/// The steps, in order. The first two need a capability that the fourth drops.
///
/// The secure bits stay unlocked where init never had that capability: they decide what user 0 and
/// an exec gain, and with an empty bounding set and `no_new_privs` that is nothing.
pub(crate) fn drop_privileges(expected: &ExpectedEnvironment) -> Result<(), Failure> {
    if expected.locks_secure_bits {
        capability::lock_secure_bits().map_err(at(Step::LockSecureBits))?;
    }
    capability::drop_bounding_set().map_err(at(Step::DropBoundingSet))?;
    capability::clear_ambient_set().map_err(at(Step::ClearAmbientSet))?;
    capability::drop_all().map_err(at(Step::DropCapabilities))?;
    capability::set_no_new_privs().map_err(at(Step::SetNoNewPrivs))
}

/// Leaves init only the system calls that supervising takes. Any other kills it, and its sandbox.
pub(crate) fn supervision(setup: &Setup) -> Result<(), Failure> {
    let Some(security) = &setup.security else { return Ok(()) };
    seccomp::install(&security.init_filter, false).map(drop).map_err(at(Step::InstallInitFilter))
}

/// Lets this process execute only these files and the loaders that they need. The interpreter of a
/// script is a program like any other and must be listed.
pub(crate) fn execution(executables: &[PathBuf]) -> Result<(), Errno> {
    let allowlist = FileAllowlist::of_executables()?;
    for path in executables {
        allowlist.allow(path)?;
        let program = File::open(path).ok().and_then(|file| elf::read(&file));
        if let Some(loader) = program.and_then(|program| program.interpreter) {
            allowlist.allow(&loader)?;
        }
    }
    allowlist.restrict_self()
}

/// Lets this process read and execute only what is below these paths. Other files are read only
/// through descriptors that the backend passes in.
pub(crate) fn reading(paths: &[PathBuf]) -> Result<(), Errno> {
    let allowlist = FileAllowlist::of_readable()?;
    paths.iter().try_for_each(|path| allowlist.allow(path))?;
    allowlist.restrict_self()
}
