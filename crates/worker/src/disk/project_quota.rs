//! Project quotas: each session is a project of the file system, whose id is that of its user.
//!
//! Everything that is created in the directory of a session inherits its project.
//! Commands cannot change it: the seccomp filter of isolating modes denies the calls.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use codelia_policy::{DiskLimits, Ids};
use codelia_sys::quota::{QuotaKind, Quotas, project_of, set_project};
use codelia_types::{DiskMechanism, DiskUsage, Mode};

use super::{
    Quota, Target,
    missing::Missing,
    user_quota::{amounts, check_quotas, usage},
};

/// Limits sessions by project quotas.
#[derive(Debug)]
pub(crate) struct ProjectQuota {
    quotas: Quotas,
}

impl ProjectQuota {
    /// Checks whether the file system of `root` has project quotas that this process can set.
    pub(crate) fn new(root: &Path) -> Result<Self, Missing> {
        let remedy = "mount it with `prjquota` (ext4 first needs `tune2fs -O project,quota`)";
        let quotas = check_quotas(root, QuotaKind::Project, "project quotas", remedy)?;
        let readable = File::open(root).and_then(|directory| Ok(project_of(directory)?));
        readable
            .map_err(|error| Missing::new(format!("files have no projects: {error}"), remedy))?;
        Ok(Self { quotas })
    }
}

impl Quota for ProjectQuota {
    fn mechanism(&self) -> DiskMechanism {
        DiskMechanism::ProjectQuota
    }

    /// Mode `logical` has no filter, so its commands could leave the project. A session whose files
    /// are older than the quota has none.
    fn covers(&self, target: &Target) -> bool {
        target.mode != Mode::Logical && is_in_project(&target.directory, target.ids.uid)
    }

    fn set(&self, target: &Target, limits: DiskLimits) -> io::Result<()> {
        self.quotas.set_limits(target.ids.uid, amounts(limits)).map_err(io::Error::other)
    }

    fn usage(&self, target: &Target) -> io::Result<DiskUsage> {
        usage(&self.quotas, target.ids.uid)
    }

    fn forget(&self, _target: &Target) {}

    fn adopt(&self, directory: &Path, inner: &[PathBuf], ids: Ids) -> io::Result<()> {
        if is_in_project(directory, ids.uid) {
            return Ok(());
        }
        for path in inner {
            // Its files belong to no project: the session is scanned.
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
