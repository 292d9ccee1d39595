//! Checks that init is in the environment that its backend planned.

use codelia_init::{ExpectedEnvironment, ExpectedMount, Failure, Step};
use codelia_sys::{
    Errno, Pid,
    proc_self::{self, Mount},
    process,
};

use crate::setup::at;

/// Compares the environment with the expected one. The errno says what differs: `EXDEV` for
/// something of the host, `ENOENT` for something missing, `EROFS` and `EPERM` for a mount that is
/// read-only or writable against the plan, `EINVAL` for another value.
pub(crate) fn environment(expected: &ExpectedEnvironment) -> Result<(), Failure> {
    ensure(process::own_pid() == Pid::INIT, Step::CheckPid, Errno::XDEV)?;
    for (name, host) in &expected.host_namespaces {
        let own = proc_self::namespace_id(name).map_err(at(Step::CheckNamespaces))?;
        ensure(own != *host, Step::CheckNamespaces, Errno::XDEV)?;
    }
    let mounts = proc_self::mounts().map_err(at(Step::CheckMounts))?;
    expected
        .mounts
        .iter()
        .try_for_each(|expected| check_mount(expected, &mounts).map_err(at(Step::CheckMounts)))?;
    if let Some(name) = &expected.hostname {
        let own = proc_self::hostname().map_err(at(Step::CheckHostname))?;
        ensure(own == *name, Step::CheckHostname, Errno::INVAL)?;
    }
    ensure(proc_self::ids() == Some((expected.uid, expected.gid)), Step::CheckIds, Errno::INVAL)
}

fn ensure(condition: bool, step: Step, errno: Errno) -> Result<(), Failure> {
    if condition { Ok(()) } else { Err(Failure::new(step, errno)) }
}

fn check_mount(expected: &ExpectedMount, mounts: &[Mount]) -> Result<(), Errno> {
    // Of several mounts at one target the last is visible.
    let mount = mounts.iter().rfind(|mount| mount.target == expected.target).ok_or(Errno::NOENT)?;
    match (expected.writable, mount.writable) {
        (Some(true), false) => Err(Errno::ROFS),
        (Some(false), true) => Err(Errno::PERM),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_must_exist_with_the_expected_access() {
        let mounts = [("/a", true), ("/a", false), ("/b", true)]
            .map(|(target, writable)| Mount { target: target.into(), writable });
        let check =
            |target: &str, writable| check_mount(&ExpectedMount { target: target.into(), writable }, &mounts);
        assert_eq!(check("/a", Some(false)), Ok(()));
        assert_eq!(check("/a", Some(true)), Err(Errno::ROFS));
        assert_eq!(check("/b", Some(false)), Err(Errno::PERM));
        assert_eq!(check("/b", None), Ok(()));
        assert_eq!(check("/c", None), Err(Errno::NOENT));
    }
}
