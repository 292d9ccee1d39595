//! Being somebody else, as far as files are concerned, on one thread and for one piece of work.

use nix::{
    libc,
    unistd::{Gid, Uid, getgroups, setfsgid, setfsuid},
};
use rustix::io::Errno;

use crate::{fd::last_errno, process};

/// Takes the identity back, also when the work panics.
struct Before {
    uid: Uid,
    gid: Gid,
    /// The other groups, if they were given up.
    groups: Option<Vec<Gid>>,
}

impl Drop for Before {
    fn drop(&mut self) {
        setfsgid(self.gid);
        setfsuid(self.uid);
        if let Some(groups) = &self.groups {
            // Who could give them up can take them back; a thread without them could only do less.
            let _ = set_groups(groups);
        }
    }
}

/// Does something as this user and group: files belong to them, and the kernel allows what it
/// allows them, whatever the process itself may. Other threads are not touched. Who has these ids
/// already needs no privilege for it, and keeps its other groups.
///
/// # Errors
/// `EPERM` if the process may not; nothing was done then.
pub fn as_user<T>(uid: u32, gid: u32, work: impl FnOnce() -> T) -> Result<T, Errno> {
    let is_own = (uid, gid) == (process::own_uid(), process::own_gid());
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let groups = if is_own { None } else { Some(give_up_groups()?) };
    // The group first: who gave up its user may not be allowed to any more.
    let group_before = setfsgid(gid);
    let before = Before { uid: setfsuid(uid), gid: group_before, groups };
    // Neither call tells whether it was obeyed: asking for an id that nobody has tells who we are.
    let became = (setfsuid(Uid::from_raw(u32::MAX)), setfsgid(Gid::from_raw(u32::MAX)));
    if became != (uid, gid) {
        return Err(Errno::PERM);
    }
    let done = work();
    drop(before);
    Ok(done)
}

/// Leaves this thread in no other groups. Answers those it was in.
fn give_up_groups() -> Result<Vec<Gid>, Errno> {
    let groups = getgroups().map_err(process::from_nix)?;
    set_groups(&[])?;
    Ok(groups)
}

/// The call itself: the library's would change every thread.
fn set_groups(groups: &[Gid]) -> Result<(), Errno> {
    let raw: Vec<libc::gid_t> = groups.iter().map(|group| group.as_raw()).collect();
    // SAFETY: the pointer is to as many ids as are told, and the kernel only reads them.
    let answer = unsafe { libc::syscall(libc::SYS_setgroups, raw.len(), raw.as_ptr()) };
    if answer == 0 { Ok(()) } else { Err(last_errno()) }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::ErrorKind,
        os::unix::fs::{MetadataExt, PermissionsExt},
    };

    use super::*;

    const SOMEBODY: u32 = 300_123;

    #[test]
    fn files_are_made_and_refused_as_of_the_other_user_and_afterwards_no_more() {
        if !rustix::process::geteuid().is_root() {
            assert_eq!(as_user(SOMEBODY, SOMEBODY, || ()), Err(Errno::PERM));
            return println!("skipped: only root becomes another user");
        }
        let temp = tempfile::tempdir().unwrap();
        fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let (secret, made) = (temp.path().join("secret"), temp.path().join("made"));
        fs::write(&secret, "x").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let denied = as_user(SOMEBODY, SOMEBODY, || {
            fs::write(&made, "x").unwrap();
            fs::read(&secret).unwrap_err().kind()
        });
        assert_eq!(denied, Ok(ErrorKind::PermissionDenied));
        let owner = fs::metadata(&made).unwrap();
        assert_eq!((owner.uid(), owner.gid()), (SOMEBODY, SOMEBODY));
        assert!(fs::read(&secret).is_ok(), "the identity is back");
    }

    #[test]
    fn groups_of_the_process_are_not_those_of_the_other_user() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root becomes another user");
        }
        // A thread of its own: what it changes ends with it.
        std::thread::spawn(|| {
            let shared = Gid::from_raw(300_124);
            set_groups(&[shared]).unwrap();
            let temp = tempfile::tempdir().unwrap();
            fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o777)).unwrap();
            let file = temp.path().join("of the group");
            fs::write(&file, "x").unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
            std::os::unix::fs::chown(&file, None, Some(shared.as_raw())).unwrap();
            let denied = as_user(SOMEBODY, SOMEBODY, || fs::read(&file).unwrap_err().kind());
            assert_eq!(denied, Ok(ErrorKind::PermissionDenied));
            assert_eq!(getgroups().unwrap(), [shared], "the groups are back");
            // The control: its group may read it.
            assert!(as_user(SOMEBODY, shared.as_raw(), || fs::read(&file)).unwrap().is_ok());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn who_one_is_already_one_may_be() {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        assert_eq!(as_user(uid, gid, || 7), Ok(7));
    }
}
