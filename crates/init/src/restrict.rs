//! Irrevocable restrictions: dropping init's privileges, and limiting what the command's process
//! may execute.

use std::path::PathBuf;

use codelia_init::{Failure, Step};
use codelia_sys::{Errno, capability, landlock::ExecAllowlist};

use crate::{loader, setup::at};

/// The steps, in order. The first two need a capability that the fourth drops.
pub(crate) fn drop_privileges() -> Result<(), Failure> {
    capability::lock_secure_bits().map_err(at(Step::LockSecureBits))?;
    capability::drop_bounding_set().map_err(at(Step::DropBoundingSet))?;
    capability::clear_ambient_set().map_err(at(Step::ClearAmbientSet))?;
    capability::drop_all().map_err(at(Step::DropCapabilities))?;
    capability::set_no_new_privs().map_err(at(Step::SetNoNewPrivs))
}

/// Lets this process execute only these files and the loaders that they need. The interpreter of a
/// script is a program like any other and must be listed.
pub(crate) fn execution(executables: &[PathBuf]) -> Result<(), Errno> {
    let allowlist = ExecAllowlist::new()?;
    for path in executables {
        allowlist.allow(path)?;
        if let Some(loader) = loader::of(path) {
            allowlist.allow(&loader)?;
        }
    }
    allowlist.restrict_self()
}
