//! Dropping the capabilities of this thread, irrevocably.

use rustix::{
    io::Errno,
    thread::{self, CapabilitiesSecureBits, CapabilitySet, CapabilitySets},
};

/// No special treatment of user 0, no capabilities through a change of users or the ambient set,
/// and all of that locked.
const LOCKED: CapabilitiesSecureBits = CapabilitiesSecureBits::NO_ROOT
    .union(CapabilitiesSecureBits::NO_ROOT_LOCKED)
    .union(CapabilitiesSecureBits::NO_SETUID_FIXUP)
    .union(CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED)
    .union(CapabilitiesSecureBits::KEEP_CAPS_LOCKED)
    .union(CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE)
    .union(CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED);

/// Removes the special treatment of user 0 and locks that setting.
///
/// # Errors
/// As `prctl(PR_SET_SECUREBITS)`: `EPERM` without `CAP_SETPCAP`.
pub fn lock_secure_bits() -> Result<(), Errno> {
    thread::set_capabilities_secure_bits(LOCKED)
}

/// Whether [`lock_secure_bits`] was successful.
///
/// # Errors
/// As `prctl(PR_GET_SECUREBITS)`.
pub fn are_secure_bits_locked() -> Result<bool, Errno> {
    Ok(thread::capabilities_secure_bits()?.contains(LOCKED))
}

/// Empties the bounding set: no exec can add a capability afterwards.
///
/// # Errors
/// `EPERM` if a capability is left and cannot be removed.
pub fn drop_bounding_set() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // Past the last capability that the kernel knows.
            Err(Errno::INVAL) => break,
            // This thread may not remove any, which is fine if there is none.
            Err(errno) => match thread::capability_is_in_bounding_set(capability) {
                Ok(false) => {}
                Err(Errno::INVAL) => break,
                _ => return Err(errno),
            },
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
    thread::set_capabilities(
        None,
        CapabilitySets { effective: none, permitted: none, inheritable: none },
    )
}

/// Sets `no_new_privs`: no exec can grant privileges that this thread lacks.
///
/// # Errors
/// As `prctl(PR_SET_NO_NEW_PRIVS)`.
pub fn set_no_new_privs() -> Result<(), Errno> {
    thread::set_no_new_privs(true)
}
