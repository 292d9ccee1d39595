//! Whether init is where its backend meant it to be, before it goes on.

use codelia_init::{ExpectedEnvironment, ExpectedMount, Failure, Step};
use codelia_sys::{
    Errno, Pid,
    proc_self::{self, Mount},
    process,
};

use crate::setup::at;

/// What is otherwise than expected fails with an errno that says how: `EXDEV` for a place that is the
/// host's, `ENOENT` for what is not there, `EROFS` and `EPERM` for what can be written too little or too
/// much, `EINVAL` for another value.
pub(crate) fn surroundings(expected: &ExpectedEnvironment) -> Result<(), Failure> {
    hold(Step::CheckProcessId, process::own_pid() == Pid::INIT, Errno::XDEV)?;
    for (name, host) in &expected.host_namespaces {
        let own = proc_self::namespace_id(name).map_err(at(Step::CheckNamespaces))?;
        hold(Step::CheckNamespaces, own != *host, Errno::XDEV)?;
    }
    let mounts = proc_self::mounts().map_err(at(Step::CheckMounts))?;
    expected
        .mounts
        .iter()
        .try_for_each(|wanted| check_mount(wanted, &mounts).map_err(at(Step::CheckMounts)))?;
    if let Some(name) = &expected.hostname {
        let own = proc_self::hostname().map_err(at(Step::CheckHostname))?;
        hold(Step::CheckHostname, own == *name, Errno::INVAL)?;
    }
    hold(Step::CheckIds, proc_self::ids() == Some((expected.uid, expected.gid)), Errno::INVAL)
}

fn hold(step: Step, holds: bool, errno: Errno) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure::new(step, errno)) }
}

fn check_mount(wanted: &ExpectedMount, mounts: &[Mount]) -> Result<(), Errno> {
    // The last one is the one that is seen.
    let mount = mounts.iter().rfind(|mount| mount.target == wanted.target).ok_or(Errno::NOENT)?;
    match (wanted.writable, mount.writable) {
        (Some(true), false) => Err(Errno::ROFS),
        (Some(false), true) => Err(Errno::PERM),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_must_be_there_and_as_writable_as_it_should_be() {
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
