//! Checks that init is in the environment that its backend planned, and that nothing is left of its
//! privileges.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    fs,
    path::Path,
};

use codelia_init::{
    ExpectedEnvironment, ExpectedMount, ExpectedNamespace, Failure, FileIdentity, Mask, NAMESPACES,
    Step,
};
use codelia_sys::{
    Errno, Pid, capability,
    proc_self::{self, Mount, Privileges},
    process,
};

use crate::{
    failure::{at, at_io, errno},
    view,
};

/// The seccomp mode of a process with a filter.
const FILTERED: u32 = 2;

/// Compares the environment with the expected one, without the mounts. The errno says what differs:
/// `EXDEV` for something of the host, `EINVAL` for another value.
pub(crate) fn environment(expected: &ExpectedEnvironment) -> Result<(), Failure> {
    ensure(process::own_pid() == Pid::INIT, Step::CheckPid, Errno::XDEV)?;
    namespaces(expected, proc_self::namespace_id).map_err(at(Step::CheckNamespaces))?;
    if let Some(name) = &expected.hostname {
        let own = proc_self::hostname().map_err(at(Step::CheckHostname))?;
        ensure(own == *name, Step::CheckHostname, Errno::INVAL)?;
    }
    ensure(proc_self::ids() == Some((expected.uid, expected.gid)), Step::CheckIds, Errno::INVAL)
}

/// Compares the mounts with the expected ones. The errno says what differs: `EXDEV` for another
/// file, `ENOENT` for something missing, `EEXIST` for an additional mount, `EROFS` and `EPERM` for
/// one that is read-only or writable against the plan, `ENOEXEC` and `EACCES` for one that is
/// executable or not against it, `ENODEV` for another file system.
pub(crate) fn mounts(expected: &ExpectedEnvironment) -> Result<(), Failure> {
    let table = proc_self::mounts().map_err(at(Step::CheckMounts))?;
    mount_table(expected, &table, identity_of).map_err(at(Step::CheckMounts))?;
    if let Some(shown) = &expected.shown_in_proc {
        let hidden = view::hidden_in_proc(shown).map_err(at_io(Step::CheckMounts))?;
        // Not as paths: to compare those takes many times as long.
        let targets: HashSet<&OsStr> = table.iter().map(|mount| mount.target.as_os_str()).collect();
        let is_masked = |mask: &Mask| targets.contains(mask.path.as_os_str());
        ensure(hidden.iter().all(is_masked), Step::CheckMounts, Errno::NOENT)?;
    }
    Ok(())
}

/// Checks that init has no capability and cannot gain one.
pub(crate) fn privileges(expected: &ExpectedEnvironment) -> Result<(), Failure> {
    let check = || {
        if expected.locks_secure_bits && !capability::are_secure_bits_locked()? {
            return Err(Errno::PERM);
        }
        has_none(expected, &proc_self::privileges_of(process::own_pid())?)
    };
    check().map_err(at(Step::CheckPrivileges))
}

/// Checks the command's process: no privileges, and a filter.
pub(crate) fn command(expected: &ExpectedEnvironment, pid: Pid) -> Result<(), Failure> {
    let check = || {
        let privileges = proc_self::privileges_of(pid)?;
        has_none(expected, &privileges)?;
        is_filtered(expected, &privileges)
    };
    check().map_err(at(Step::CheckCommand))
}

fn ensure(condition: bool, step: Step, errno: Errno) -> Result<(), Failure> {
    if condition { Ok(()) } else { Err(Failure::new(step, errno)) }
}

/// Every namespace must be named, so that none is forgotten.
fn namespaces(
    expected: &ExpectedEnvironment,
    own: impl Fn(&str) -> Result<u64, Errno>,
) -> Result<(), Errno> {
    NAMESPACES.iter().try_for_each(|name| match expected.namespaces.get(*name) {
        Some(ExpectedNamespace::Not(host)) if own(name)? == *host => Err(Errno::XDEV),
        Some(_) => Ok(()),
        None => Err(Errno::INVAL),
    })
}

fn mount_table(
    expected: &ExpectedEnvironment,
    table: &[Mount],
    identity_of: impl Fn(&Path) -> Result<FileIdentity, Errno>,
) -> Result<(), Errno> {
    let is_covered =
        |target: &Path| expected.covered.as_ref().is_some_and(|dir| target.starts_with(dir));
    // Of several mounts at one target the last is visible.
    let visible: HashMap<&Path, &Mount> =
        table.iter().map(|mount| (mount.target.as_path(), mount)).collect();
    let is_planned = |mount: &&Mount| {
        let target = &mount.target;
        expected.mounts.contains_key(target)
            || is_covered(target)
            || comes_with_another(expected, mount)
            || is_behind_link(expected, mount)
    };
    if !visible.values().all(is_planned) {
        return Err(Errno::EXIST);
    }
    expected.mounts.iter().try_for_each(|(target, expected)| match visible.get(target.as_path()) {
        Some(mount) => {
            check_mount(expected, mount)?;
            match expected.identity {
                Some(identity) if identity_of(target)? != identity => Err(Errno::XDEV),
                _ => Ok(()),
            }
        }
        None if expected.is_optional => Ok(()),
        None => Err(Errno::NOENT),
    })
}

/// Whether the mount comes with one of the plan, and is not writable against it.
fn comes_with_another(expected: &ExpectedEnvironment, mount: &Mount) -> bool {
    let above = expected.mount_above(&mount.target);
    above.is_some_and(|above| {
        above.is_recursive && (above.writable != Some(false) || !mount.writable)
    })
}

/// Whether a link leads to the mount from where one is planned. Engines follow links of the image.
fn is_behind_link(expected: &ExpectedEnvironment, mount: &Mount) -> bool {
    let leads_there =
        |target: &Path| fs::canonicalize(target).is_ok_and(|path| path == mount.target);
    let mut linked = expected.mounts.iter().filter(|(_, planned)| planned.follows_link);
    !mount.writable
        && linked
            .any(|(target, planned)| check_mount(planned, mount).is_ok() && leads_there(target))
}

fn check_mount(expected: &ExpectedMount, mount: &Mount) -> Result<(), Errno> {
    match (expected.writable, mount.writable) {
        (Some(true), false) => return Err(Errno::ROFS),
        (Some(false), true) => return Err(Errno::PERM),
        _ => {}
    }
    match (expected.executable, mount.executable) {
        (Some(true), false) => return Err(Errno::ACCESS),
        (Some(false), true) => return Err(Errno::NOEXEC),
        _ => {}
    }
    match &expected.file_system {
        Some(file_system) if *file_system != mount.file_system => Err(Errno::NODEV),
        _ => Ok(()),
    }
}

fn identity_of(target: &Path) -> Result<FileIdentity, Errno> {
    let metadata = fs::metadata(target);
    metadata.as_ref().map(FileIdentity::from).map_err(errno)
}

/// All five capability sets are empty, and `no_new_privs` is set.
fn has_none(expected: &ExpectedEnvironment, privileges: &Privileges) -> Result<(), Errno> {
    let is_unknown = |field: bool| field && !expected.reports_restrictions;
    let is_empty = |set: &Option<u64>| *set == Some(0) || is_unknown(set.is_none());
    let no_new_privs = privileges.no_new_privs;
    let holds = privileges.capabilities.iter().all(is_empty)
        && (no_new_privs == Some(true) || is_unknown(no_new_privs.is_none()));
    if holds { Ok(()) } else { Err(Errno::PERM) }
}

fn is_filtered(expected: &ExpectedEnvironment, privileges: &Privileges) -> Result<(), Errno> {
    match privileges.seccomp {
        Some(FILTERED) => Ok(()),
        None if !expected.reports_restrictions => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: FileIdentity = FileIdentity { device: 1, inode: 2 };

    fn mount(target: &str, writable: bool, file_system: &str) -> Mount {
        Mount {
            target: target.into(),
            writable,
            executable: true,
            file_system: file_system.to_owned(),
        }
    }

    fn expected_mount() -> ExpectedMount {
        ExpectedMount {
            is_optional: false,
            writable: Some(true),
            executable: None,
            file_system: Some("ext4".to_owned()),
            identity: Some(IDENTITY),
            is_recursive: false,
            follows_link: false,
        }
    }

    fn expected(mount: ExpectedMount) -> ExpectedEnvironment {
        let mut expected = ExpectedEnvironment { reports_restrictions: true, ..Default::default() };
        expected.mounts.insert("/a".into(), mount);
        expected
    }

    #[test]
    fn mount_table_must_be_as_planned() {
        let check = |planned: ExpectedMount, table: &[Mount]| {
            mount_table(&expected(planned), table, |_| Ok(IDENTITY))
        };
        let planned = expected_mount;
        let good = mount("/a", true, "ext4");
        assert_eq!(check(planned(), std::slice::from_ref(&good)), Ok(()), "the control");
        assert_eq!(check(planned(), &[]), Err(Errno::NOENT));
        assert_eq!(check(ExpectedMount { is_optional: true, ..planned() }, &[]), Ok(()));
        assert_eq!(check(planned(), &[mount("/a", false, "ext4")]), Err(Errno::ROFS));
        let read_only = ExpectedMount { writable: Some(false), ..planned() };
        assert_eq!(check(read_only, std::slice::from_ref(&good)), Err(Errno::PERM));
        let executable = |executable| ExpectedMount { executable: Some(executable), ..planned() };
        let denied = Mount { executable: false, ..good.clone() };
        assert_eq!(check(executable(true), std::slice::from_ref(&good)), Ok(()));
        assert_eq!(check(executable(false), std::slice::from_ref(&good)), Err(Errno::NOEXEC));
        assert_eq!(check(executable(true), &[denied]), Err(Errno::ACCESS));
        assert_eq!(check(planned(), &[mount("/a", true, "tmpfs")]), Err(Errno::NODEV));
        let covered = [good.clone(), mount("/a", true, "tmpfs")];
        assert_eq!(check(planned(), &covered), Err(Errno::NODEV), "the last mount is visible");
        assert_eq!(check(planned(), &[good.clone(), mount("/b", true, "ext4")]), Err(Errno::EXIST));
        let other = FileIdentity { inode: 3, ..IDENTITY };
        let another = ExpectedMount { identity: Some(other), ..planned() };
        assert_eq!(check(another, &[good]), Err(Errno::XDEV));
    }

    #[test]
    fn mount_may_be_where_a_link_leads_to() {
        // A link that every process has.
        let link = "/proc/self";
        let behind = fs::canonicalize(link).unwrap();
        let behind = behind.to_str().unwrap();
        let check = |follows_link, mount: Mount| {
            let planned = ExpectedMount {
                is_optional: true,
                writable: Some(false),
                follows_link,
                ..ExpectedMount::default()
            };
            let mut expected = ExpectedEnvironment::default();
            expected.mounts.insert(link.into(), planned);
            mount_table(&expected, &[mount], |_| Ok(IDENTITY))
        };
        assert_eq!(check(true, mount(behind, false, "ext4")), Ok(()));
        assert_eq!(
            check(false, mount(behind, false, "ext4")),
            Err(Errno::EXIST),
            "only where it is expected"
        );
        assert_eq!(check(true, mount(behind, true, "ext4")), Err(Errno::EXIST), "only read-only");
        assert_eq!(check(true, mount("/b", false, "ext4")), Err(Errno::EXIST), "nowhere else");
    }

    #[test]
    fn mounts_of_the_host_may_come_with_a_planned_one() {
        let check = |is_recursive, writable, table: &[Mount]| {
            let planned = ExpectedMount {
                is_recursive,
                writable: Some(writable),
                ..ExpectedMount::default()
            };
            mount_table(&expected(planned), table, |_| Ok(IDENTITY))
        };
        let [read_only, writable] =
            [false, true].map(|below| [mount("/a", below, "ext4"), mount("/a/b", below, "ext4")]);
        assert_eq!(check(true, false, &read_only), Ok(()));
        assert_eq!(check(true, true, &writable), Ok(()));
        assert_eq!(check(false, false, &read_only), Err(Errno::EXIST));
        let mixed = [read_only[0].clone(), writable[1].clone()];
        assert_eq!(check(true, false, &mixed), Err(Errno::EXIST));
    }

    #[test]
    fn mounts_below_a_mask_do_not_matter() {
        let table = [mount("/a", true, "ext4"), mount("/sys/x", true, "sysfs")];
        let mut expected = expected(expected_mount());
        assert_eq!(mount_table(&expected, &table, |_| Ok(IDENTITY)), Err(Errno::EXIST));
        expected.covered = Some("/sys".into());
        assert_eq!(mount_table(&expected, &table, |_| Ok(IDENTITY)), Ok(()));
    }

    #[test]
    fn every_namespace_must_differ_from_the_host() {
        let own = |_: &str| Ok(7);
        let namespaces_of_host =
            NAMESPACES.map(|name| (name.to_owned(), ExpectedNamespace::Not(1))).into();
        let expected = ExpectedEnvironment { namespaces: namespaces_of_host, ..Default::default() };
        assert_eq!(namespaces(&expected, own), Ok(()), "the control");
        for name in NAMESPACES {
            let mut changed = expected.clone();
            changed.namespaces.insert(name.to_owned(), ExpectedNamespace::Not(7));
            assert_eq!(namespaces(&changed, own), Err(Errno::XDEV), "{name}");
            changed.namespaces.insert(name.to_owned(), ExpectedNamespace::Shared);
            assert_eq!(namespaces(&changed, own), Ok(()), "{name}");
            changed.namespaces.remove(name);
            assert_eq!(namespaces(&changed, own), Err(Errno::INVAL), "{name} is not named");
        }
    }

    #[test]
    fn remaining_privilege_is_refused() {
        let expected = expected(expected_mount());
        let check = |privileges: Privileges| {
            has_none(&expected, &privileges).and_then(|()| is_filtered(&expected, &privileges))
        };
        let none = Privileges {
            capabilities: [Some(0); 5],
            no_new_privs: Some(true),
            seccomp: Some(FILTERED),
        };
        assert_eq!(check(none), Ok(()), "the control");
        for set in 0..none.capabilities.len() {
            let mut changed = none;
            changed.capabilities[set] = Some(1);
            assert_eq!(check(changed), Err(Errno::PERM), "{set}");
            changed.capabilities[set] = None;
            assert_eq!(check(changed), Err(Errno::PERM), "{set}");
        }
        assert_eq!(check(Privileges { no_new_privs: Some(false), ..none }), Err(Errno::PERM));
        assert_eq!(check(Privileges { seccomp: Some(0), ..none }), Err(Errno::INVAL));
        assert_eq!(check(Privileges { seccomp: None, ..none }), Err(Errno::INVAL));
    }
}
