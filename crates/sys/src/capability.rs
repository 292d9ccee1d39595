//! Dropping the capabilities of this thread, irrevocably.

use rustix::{
    io::Errno,
    thread::{self, CapabilitiesSecureBits, CapabilitySet, CapabilitySets},
};

/// Removes the special treatment of user 0 and locks that setting.
///
/// Does nothing where the process may not set the bits or the kernel lacks one of them. User 0
/// gains nothing then either, as long as the bounding set is empty.
///
/// # Errors
/// As `prctl(PR_SET_SECUREBITS)`.
pub fn lock_secure_bits() -> Result<(), Errno> {
    let bits = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    match thread::set_capabilities_secure_bits(bits) {
        Err(Errno::PERM | Errno::INVAL) => Ok(()),
        result => result,
    }
}

/// Empties the bounding set: no exec can add a capability afterwards.
///
/// # Errors
/// `EPERM` if a capability is left and cannot be removed.
pub fn drop_bounding_set() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match thread::capability_is_in_bounding_set(capability) {
            Ok(true) => thread::remove_capability_from_bounding_set(capability)?,
            Ok(false) => {}
            // Past the last capability that the kernel knows.
            Err(Errno::INVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Empties the ambient set, which survives an exec. Succeeds on kernels without one.
///
/// # Errors
/// As `prctl(PR_CAP_AMBIENT)`.
pub fn clear_ambient_set() -> Result<(), Errno> {
    match thread::clear_ambient_capability_set() {
        Err(Errno::INVAL) => Ok(()),
        result => result,
    }
}

/// Empties the effective, permitted and inheritable sets.
///
/// # Errors
/// As `capset(2)`.
pub fn drop_all() -> Result<(), Errno> {
    let none = CapabilitySet::empty();
    thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

/// Sets `no_new_privs`: no exec can grant privileges that this thread lacks.
///
/// # Errors
/// As `prctl(PR_SET_NO_NEW_PRIVS)`.
pub fn set_no_new_privs() -> Result<(), Errno> {
    thread::set_no_new_privs(true)
}
