//! Privileges of this thread, given up for good.

use rustix::{
    io::Errno,
    thread::{self, CapabilitiesSecureBits, CapabilitySet, CapabilitySets},
};

/// Makes user 0 a user like any other, and lets nobody undo that. Without the privilege for it, or in a
/// kernel without such bits, nothing happens: then there is nothing that user 0 could gain either, as long as the bounding set is empty.
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
        answer => answer,
    }
}

/// Empties the bounding set: no program can give a capability any more.
///
/// # Errors
/// `EPERM` if one is left in it and cannot be taken away.
pub fn drop_bounding_set() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match thread::capability_is_in_bounding_set(capability) {
            Ok(true) => thread::remove_capability_from_bounding_set(capability)?,
            Ok(false) => {}
            // The kernel knows no more.
            Err(Errno::INVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Empties the set that survives an exec. A kernel without one is fine.
///
/// # Errors
/// As `prctl(PR_CAP_AMBIENT)`.
pub fn clear_ambient_set() -> Result<(), Errno> {
    match thread::clear_ambient_capability_set() {
        Err(Errno::INVAL) => Ok(()),
        answer => answer,
    }
}

/// Empties the effective, the permitted and the inheritable set.
///
/// # Errors
/// As `capset(2)`.
pub fn drop_all() -> Result<(), Errno> {
    let none = CapabilitySet::empty();
    thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

/// Has no exec give what this thread has not.
///
/// # Errors
/// As `prctl(PR_SET_NO_NEW_PRIVS)`.
pub fn no_new_privileges() -> Result<(), Errno> {
    thread::set_no_new_privs(true)
}
