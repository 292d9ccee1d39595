//! Disk quotas of the kernel: limits on the bytes and inodes that a user or a project has on one
//! file system. Setting them needs `CAP_SYS_ADMIN` in the initial user namespace.

mod call;
mod project;

use std::{
    fs::File,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use crate::Error;

pub use project::{Project, project_of, set_project};

/// Whose files a quota counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaKind {
    /// All files of a user.
    User,
    /// All files that have a project id.
    Project,
}

/// Limits of a quota, or what is used of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Bytes of allocated blocks.
    pub bytes: u64,
    /// Files, directories, links and everything else with an inode.
    pub inodes: u64,
}

/// The quotas of one kind on the file system of a directory.
#[derive(Debug)]
pub struct Quotas {
    kind: QuotaKind,
    path: PathBuf,
    directory: OwnedFd,
}

impl Quotas {
    /// Uses the file system of a directory.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn open(directory: &Path, kind: QuotaKind) -> Result<Self, Error> {
        let file = File::open(directory).map_err(Error::io("open", directory))?;
        Ok(Self { kind, path: directory.to_owned(), directory: file.into() })
    }

    /// Whether the kernel counts and refuses what exceeds a limit.
    ///
    /// # Errors
    /// As `quotactl(2)`, except on a file system without quotas.
    pub fn are_enforced(&self) -> Result<bool, Error> {
        match call::state(&self.directory) {
            Ok(state) => Ok(state.is_enforced(self.kind)),
            // No quota of any kind is on, the file system has none, or the kernel has none.
            Err(
                Errno::NOSYS
                | Errno::NODEV
                | Errno::NOTSUP
                | Errno::SRCH
                | Errno::INVAL
                | Errno::NOTBLK,
            ) => Ok(false),
            Err(errno) => Err(self.error("read the quota state of", errno)),
        }
    }

    /// Sets the limits of an id. Zero is unlimited.
    ///
    /// # Errors
    /// As `quotactl(2)`: `EPERM` without the privilege, `ESRCH` if quotas are off.
    pub fn set_limits(&self, id: u32, limits: Amounts) -> Result<(), Error> {
        call::set(&self.directory, self.kind, id, limits)
            .map_err(|errno| self.error("set a quota limit on", errno))
    }

    /// Removes the limits of an id.
    ///
    /// # Errors
    /// As [`Self::set_limits`].
    pub fn remove_limits(&self, id: u32) -> Result<(), Error> {
        self.set_limits(id, Amounts::default())
    }

    /// The amounts that an id uses.
    ///
    /// # Errors
    /// As `quotactl(2)`.
    pub fn usage(&self, id: u32) -> Result<Amounts, Error> {
        Ok(self.get(id)?.0)
    }

    /// The limits of an id.
    ///
    /// # Errors
    /// As `quotactl(2)`.
    pub fn limits(&self, id: u32) -> Result<Amounts, Error> {
        Ok(self.get(id)?.1)
    }

    fn get(&self, id: u32) -> Result<(Amounts, Amounts), Error> {
        match call::get(&self.directory, self.kind, id) {
            // An id that never had a file or a limit.
            Err(Errno::NOENT) => Ok(Default::default()),
            answer => answer.map_err(|errno| self.error("read a quota of", errno)),
        }
    }

    fn error(&self, step: &'static str, errno: Errno) -> Error {
        Error::new(step, &self.path, errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_system_without_quotas_enforces_none() {
        // The kernel's own file systems never have any.
        for kind in [QuotaKind::User, QuotaKind::Project] {
            let quotas = Quotas::open(Path::new("/proc"), kind).unwrap();
            assert!(!quotas.are_enforced().unwrap(), "{kind:?}");
            assert!(quotas.set_limits(4_000_000, Amounts { bytes: 4096, inodes: 1 }).is_err());
        }
    }
}
