//! What is given up for good: the privileges of init, and what the command's process may execute.

use std::path::PathBuf;

use codelia_init::{Failure, Step};
use codelia_sys::{Errno, capability, landlock::Executables};

use crate::{loader, setup::at};

/// The steps. The first two need a capability that the last but one takes away.
pub(crate) fn give_up_privileges() -> Result<(), Failure> {
    capability::lock_secure_bits().map_err(at(Step::LockSecureBits))?;
    capability::drop_bounding_set().map_err(at(Step::DropBoundingSet))?;
    capability::clear_ambient_set().map_err(at(Step::ClearAmbientSet))?;
    capability::drop_all().map_err(at(Step::DropCapabilities))?;
    capability::no_new_privileges().map_err(at(Step::NoNewPrivileges))
}

/// Lets this process execute these files alone, with the loaders that the kernel needs for them. The
/// interpreter of a script is a program like any other and must be among them.
pub(crate) fn execution(executables: &[PathBuf]) -> Result<(), Errno> {
    let allowed = Executables::none()?;
    for path in executables {
        allowed.add(path)?;
        if let Some(loader) = loader::of(path) {
            allowed.add(&loader)?;
        }
    }
    allowed.restrict_self()
}
