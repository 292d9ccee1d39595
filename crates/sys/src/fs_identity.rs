//! File access as another user, on one thread and for one closure.

use nix::{
    libc,
    unistd::{Gid, Uid, getgroups, setfsgid, setfsuid},
};
use rustix::{
    io::Errno,
    thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities},
};

use crate::{
    call::{check, from_nix},
    process,
};

/// Restores the identity of the thread when dropped, also after a panic.
struct RestoreIdentity {
    uid: Uid,
    gid: Gid,
    /// The privileges that were dropped, unless these were the ids of the process already.
    dropped: Option<Dropped>,
}

/// Privileges that a thread has in addition to its ids.
struct Dropped {
    groups: Vec<Gid>,
    capabilities: CapabilitySets,
}

impl Drop for RestoreIdentity {
    fn drop(&mut self) {
        // The capabilities first: the rest needs them. A thread that could drop something can
        // restore it; on failure it can only do less.
        if let Some(dropped) = &self.dropped {
            let _ = set_capabilities(None, dropped.capabilities);
        }
        setfsgid(self.gid);
        setfsuid(self.uid);
        if let Some(dropped) = &self.dropped {
            let _ = set_groups(&dropped.groups);
        }
    }
}

/// Runs `work` with the file-system ids of this user and group: new files belong to them, and the
/// kernel checks their permissions instead of those of the process. Other threads are not affected.
///
/// `work` has no supplementary groups and no effective capabilities. The kernel itself would leave
/// `CAP_SYS_RESOURCE`, which passes quotas and takes the blocks that are reserved for root. If
/// these are the ids of the process already, no privilege is needed and it keeps both.
///
/// # Errors
/// `EPERM` if the process may not change its ids; `work` did not run then.
pub fn as_user<T>(uid: u32, gid: u32, work: impl FnOnce() -> T) -> Result<T, Errno> {
    let is_own = (uid, gid) == (process::own_uid(), process::own_gid());
    let uid = Uid::from_raw(uid);
    let gid = Gid::from_raw(gid);
    let dropped = if is_own { None } else { Some(drop_groups()?) };
    // The group first: without its user id the thread may lose the privilege to change it.
    let previous_gid = setfsgid(gid);
    let restore = RestoreIdentity { uid: setfsuid(uid), gid: previous_gid, dropped };
    // Neither call reports failure. Requesting an invalid id changes nothing and returns the
    // current one.
    let current = (setfsuid(Uid::from_raw(u32::MAX)), setfsgid(Gid::from_raw(u32::MAX)));
    if current != (uid, gid) {
        return Err(Errno::PERM);
    }
    if let Some(dropped) = &restore.dropped {
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, ..dropped.capabilities })?;
    }
    let result = work();
    drop(restore);
    Ok(result)
}

/// Drops the supplementary groups of this thread. Returns them and its capabilities.
fn drop_groups() -> Result<Dropped, Errno> {
    let groups = getgroups().map_err(from_nix)?;
    let capabilities = capabilities(None)?;
    set_groups(&[])?;
    Ok(Dropped { groups, capabilities })
}

/// Calls the kernel directly: libc's `setgroups` changes every thread.
fn set_groups(groups: &[Gid]) -> Result<(), Errno> {
    let raw: Vec<libc::gid_t> = groups.iter().map(|group| group.as_raw()).collect();
    // SAFETY: the pointer is valid for `raw.len()` ids, which the kernel only reads.
    check(unsafe { libc::syscall(libc::SYS_setgroups, raw.len(), raw.as_ptr()) })
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::ErrorKind,
        os::unix::fs::{MetadataExt, PermissionsExt},
    };

    use super::*;
    use crate::require::available;

    const OTHER_ID: u32 = 300_123;

    fn can_change_user() -> bool {
        let is_root = rustix::process::geteuid().is_root();
        available("root", (!is_root).then_some("only root can change the user"))
    }

    #[test]
    fn file_access_uses_the_other_user() {
        if !rustix::process::geteuid().is_root() {
            assert_eq!(as_user(OTHER_ID, OTHER_ID, || ()), Err(Errno::PERM));
        }
        if !can_change_user() {
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let (secret, created) = (temp.path().join("secret"), temp.path().join("created"));
        fs::write(&secret, "x").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let denied = as_user(OTHER_ID, OTHER_ID, || {
            fs::write(&created, "x").unwrap();
            fs::read(&secret).unwrap_err().kind()
        });
        assert_eq!(denied, Ok(ErrorKind::PermissionDenied));
        let owner = fs::metadata(&created).unwrap();
        assert_eq!((owner.uid(), owner.gid()), (OTHER_ID, OTHER_ID));
        assert!(fs::read(&secret).is_ok(), "the identity was not restored");
    }

    #[test]
    fn supplementary_groups_do_not_carry_over() {
        if !can_change_user() {
            return;
        }
        // On a separate thread, whose groups end with it.
        std::thread::spawn(|| {
            let shared = Gid::from_raw(300_124);
            set_groups(&[shared]).unwrap();
            let temp = tempfile::tempdir().unwrap();
            fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o777)).unwrap();
            let file = temp.path().join("of the group");
            fs::write(&file, "x").unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
            std::os::unix::fs::chown(&file, None, Some(shared.as_raw())).unwrap();
            let denied = as_user(OTHER_ID, OTHER_ID, || fs::read(&file).unwrap_err().kind());
            assert_eq!(denied, Ok(ErrorKind::PermissionDenied));
            assert_eq!(getgroups().unwrap(), [shared], "the groups were not restored");
            // Control: a member of the group may read the file.
            assert!(as_user(OTHER_ID, shared.as_raw(), || fs::read(&file)).unwrap().is_ok());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn no_capability_is_effective() {
        if !can_change_user() {
            return;
        }
        let effective = || capabilities(None).unwrap().effective;
        let before = effective();
        assert!(!before.is_empty(), "control: root has capabilities");
        assert_eq!(as_user(OTHER_ID, OTHER_ID, effective), Ok(CapabilitySet::empty()));
        assert_eq!(effective(), before, "the capabilities were not restored");
    }

    #[test]
    fn own_ids_need_no_privilege() {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        assert_eq!(as_user(uid, gid, || 7), Ok(7));
    }
}
