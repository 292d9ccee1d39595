//! User quotas: each session has its own user, and the file system limits what a user has on it.

use std::{io, path::Path};

use codelia_policy::DiskLimits;
use codelia_sys::quota::{Amounts, QuotaKind, Quotas};
use codelia_types::{DiskMechanism, DiskUsage};

use super::{
    missing::Missing,
    quota::{Quota, Target},
};

/// An id that no session has, for trying whether limits can be set.
const UNUSED_ID: u32 = u32::MAX - 2;

/// Limits sessions by the quotas of their users.
#[derive(Debug)]
pub(crate) struct UserQuota {
    quotas: Quotas,
}

impl UserQuota {
    /// Checks whether the file system of `root` has user quotas that this process can set.
    pub(crate) fn new(root: &Path) -> Result<Self, Missing> {
        let remedy = "mount it with `usrquota` (ext4 first needs `tune2fs -O quota`)";
        Ok(Self { quotas: check_quotas(root, QuotaKind::User, "user quotas", remedy)? })
    }
}

impl Quota for UserQuota {
    fn mechanism(&self) -> DiskMechanism {
        DiskMechanism::UserQuota
    }

    fn covers(&self, target: &Target) -> bool {
        target.ids.uid != codelia_sys::process::own_uid()
    }

    fn set(&self, target: &Target, limits: DiskLimits) -> io::Result<()> {
        self.quotas.set_limits(target.ids.uid, amounts(limits)).map_err(io::Error::other)
    }

    fn usage(&self, target: &Target) -> io::Result<DiskUsage> {
        usage(&self.quotas, target.ids.uid)
    }

    fn forget(&self, _target: &Target) {}

    fn release(&self, uid: u32) -> io::Result<()> {
        self.quotas.remove_limits(uid).map_err(io::Error::other)
    }
}

/// Opens the quotas of a kind and tries to set one. `name` is what they are called.
pub(super) fn check_quotas(
    root: &Path,
    kind: QuotaKind,
    name: &str,
    remedy: &'static str,
) -> Result<Quotas, Missing> {
    let failed = |error: codelia_sys::Error| Missing::new(format!("{name}: {error}"), remedy);
    let quotas = Quotas::open(root, kind).map_err(failed)?;
    if !quotas.are_enforced().map_err(failed)? {
        return Err(Missing::new(
            format!("{name} are off on the file system of {}", root.display()),
            remedy,
        ));
    }
    let privilege = "give the worker CAP_SYS_ADMIN in the initial user namespace";
    quotas
        .remove_limits(UNUSED_ID)
        .map_err(|error| Missing::new(format!("{name} cannot be set: {error}"), privilege))?;
    Ok(quotas)
}

/// Zero is unlimited to the kernel.
pub(super) fn amounts(limits: DiskLimits) -> Amounts {
    Amounts { bytes: limits.bytes.max(1), inodes: limits.inodes.max(1) }
}

pub(super) fn usage(quotas: &Quotas, id: u32) -> io::Result<DiskUsage> {
    let used = quotas.usage(id).map_err(io::Error::other)?;
    Ok(DiskUsage { bytes: used.bytes, inodes: used.inodes })
}
