//! Being somebody else, as far as files are concerned, on one thread and for one piece of work.

use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use rustix::io::Errno;

/// Takes the identity back, also when the work panics.
struct Before {
    uid: Uid,
    gid: Gid,
}

impl Drop for Before {
    fn drop(&mut self) {
        setfsgid(self.gid);
        setfsuid(self.uid);
    }
}

/// Does something as this user and group: files belong to them, and the kernel allows what it
/// allows them, whatever the process itself may. Other threads are not touched. Who has these ids
/// already needs no privilege for it.
///
/// # Errors
/// `EPERM` if the process may not; nothing was done then.
pub fn as_user<T>(uid: u32, gid: u32, work: impl FnOnce() -> T) -> Result<T, Errno> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    // The group first: who gave up its user may not be allowed to any more.
    let group_before = setfsgid(gid);
    let before = Before { uid: setfsuid(uid), gid: group_before };
    // Neither call tells whether it was obeyed: asking for an id that nobody has tells who we are.
    let became = (setfsuid(Uid::from_raw(u32::MAX)), setfsgid(Gid::from_raw(u32::MAX)));
    if became != (uid, gid) {
        return Err(Errno::PERM);
    }
    let done = work();
    drop(before);
    Ok(done)
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
    fn who_one_is_already_one_may_be() {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        assert_eq!(as_user(uid, gid, || 7), Ok(7));
    }
}
