//! Quotas of the file system: by users, since each session has its own, or by projects.
//!
//! With project quotas each session is a project, whose id is that of its user. Everything that is
//! created in the directory of a session inherits its project. Commands cannot change it: the
//! seccomp filter of isolating modes denies the calls.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use codelia_policy::{DiskLimits, Ids};
use codelia_sys::quota::{Amounts, QuotaKind, Quotas, project_of, set_project};
use codelia_types::{DiskMechanism, DiskUsage, Mode};

use super::{
    missing::Missing,
    quota::{Quota, Target},
};

/// An id that no session has, for trying whether limits can be set.
const UNUSED_ID: u32 = u32::MAX - 2;

/// Limits sessions by quotas of their users or projects.
#[derive(Debug)]
pub(crate) struct KernelQuota {
    quotas: Quotas,
    has_projects: bool,
}

impl KernelQuota {
    /// Checks whether the file system of `root` has user quotas that this process can set.
    pub(crate) fn with_users(root: &Path) -> Result<Self, Missing> {
        let remedy = "mount it with `usrquota` (ext4 first needs `tune2fs -O quota`)";
        let quotas = check(root, QuotaKind::User, "user quotas", remedy)?;
        Ok(Self { quotas, has_projects: false })
    }

    /// Checks whether the file system of `root` has project quotas that this process can set.
    pub(crate) fn with_projects(root: &Path) -> Result<Self, Missing> {
        let remedy = "mount it with `prjquota` (ext4 first needs `tune2fs -O project,quota`)";
        let quotas = check(root, QuotaKind::Project, "project quotas", remedy)?;
        let readable = File::open(root).and_then(|directory| Ok(project_of(directory)?));
        readable
            .map_err(|error| Missing::new(format!("files have no projects: {error}"), remedy))?;
        Ok(Self { quotas, has_projects: true })
    }
}

impl Quota for KernelQuota {
    fn mechanism(&self) -> DiskMechanism {
        if self.has_projects { DiskMechanism::ProjectQuota } else { DiskMechanism::UserQuota }
    }

    /// Mode `logical` has no filter, so its commands could leave the project. A session whose files
    /// are older than the quota has none.
    fn covers(&self, target: &Target) -> bool {
        let uid = target.ids.uid;
        if self.has_projects {
            target.mode != Mode::Logical && is_in_project(&target.directory, uid)
        } else {
            uid != codelia_sys::process::own_uid()
        }
    }

    fn set(&self, target: &Target, limits: DiskLimits) -> io::Result<()> {
        // Zero is unlimited to the kernel.
        let amounts = Amounts { bytes: limits.bytes.max(1), inodes: limits.inodes.max(1) };
        self.quotas.set_limits(target.ids.uid, amounts).map_err(io::Error::other)
    }

    fn usage(&self, target: &Target) -> io::Result<DiskUsage> {
        let used = self.quotas.usage(target.ids.uid).map_err(io::Error::other)?;
        Ok(DiskUsage { bytes: used.bytes, inodes: used.inodes })
    }

    fn adopt(&self, directory: &Path, inner: &[PathBuf], ids: Ids) -> io::Result<()> {
        if !self.has_projects || is_in_project(directory, ids.uid) {
            return Ok(());
        }
        for path in inner {
            // Files from before belong to no project: the session is scanned.
            if fs::read_dir(path)?.next().is_some() {
                return Ok(());
            }
        }
        // The outer directory last: it says that all are done.
        for path in inner.iter().map(PathBuf::as_path).chain([directory]) {
            set_project(File::open(path)?, ids.uid)?;
        }
        Ok(())
    }

    fn release(&self, uid: u32) -> io::Result<()> {
        self.quotas.remove_limits(uid).map_err(io::Error::other)
    }
}

fn is_in_project(directory: &Path, id: u32) -> bool {
    let project = File::open(directory).and_then(|directory| Ok(project_of(directory)?));
    project.is_ok_and(|project| project.id == id && project.is_inherited)
}

/// Opens the quotas of a kind and tries to set one. `name` is what they are called.
fn check(
    root: &Path,
    kind: QuotaKind,
    name: &str,
    remedy: &'static str,
) -> Result<Quotas, Missing> {
    let failed = |error: codelia_sys::Error| Missing::new(format!("{name}: {error}"), remedy);
    let quotas = Quotas::open(root, kind).map_err(failed)?;
    if !quotas.are_enforced().map_err(failed)? {
        let off = format!("{name} are off on the file system of {}", root.display());
        return Err(Missing::new(off, remedy));
    }
    let privilege = "give the worker CAP_SYS_ADMIN in the initial user namespace";
    quotas
        .remove_limits(UNUSED_ID)
        .map_err(|error| Missing::new(format!("{name} cannot be set: {error}"), privilege))?;
    Ok(quotas)
}
