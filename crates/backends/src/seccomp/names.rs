//! Names and numbers of this machine's system calls.

use libseccomp::ScmpSyscall;

/// Calls that the installed libseccomp may be too old to know. Recent calls have the same number on
/// every architecture.
const RECENT: [(&str, i32); 19] = [
    ("cachestat", 451),
    ("fchmodat2", 452),
    ("map_shadow_stack", 453),
    ("futex_wake", 454),
    ("futex_wait", 455),
    ("futex_requeue", 456),
    ("statmount", 457),
    ("listmount", 458),
    ("lsm_get_self_attr", 459),
    ("lsm_set_self_attr", 460),
    ("lsm_list_modules", 461),
    ("mseal", 462),
    ("setxattrat", 463),
    ("getxattrat", 464),
    ("listxattrat", 465),
    ("removexattrat", 466),
    ("open_tree_attr", 467),
    ("file_getattr", 468),
    ("file_setattr", 469),
];

/// The number of a call. `None` if this machine does not have it.
pub(crate) fn number(name: &str) -> Option<i32> {
    if let Some((_, number)) = RECENT.iter().find(|(recent, _)| *recent == name) {
        return Some(*number);
    }
    // libseccomp gives calls of other architectures negative numbers.
    ScmpSyscall::from_name(name).ok().map(ScmpSyscall::as_raw_syscall).filter(|number| *number >= 0)
}

/// The name of a call. `None` if it is too new to be known.
pub(crate) fn name(number: i32) -> Option<String> {
    if let Some((name, _)) = RECENT.iter().find(|(_, recent)| *recent == number) {
        return Some((*name).to_owned());
    }
    ScmpSyscall::from_raw_syscall(number).get_name().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_match() {
        for known in ["read", "ptrace", "umount2", "mseal", "openat2"] {
            assert_eq!(name(number(known).unwrap()).as_deref(), Some(known));
        }
        assert_eq!(name(100_000), None);
        assert_eq!(number("no_such_call"), None);
    }
}
