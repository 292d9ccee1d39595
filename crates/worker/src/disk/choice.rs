//! Chooses what limits the disk space of sessions on this host.

use std::{env, fmt, path::Path, str::FromStr, sync::Arc};

use codelia_types::{DiskMechanism, UnknownValue};

use super::{image::Images, kernel_quota::KernelQuota, missing::Missing, quota::Quota};

/// The operator's choice of a mechanism.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DiskChoice {
    /// The best one that works here without preparation: never an image.
    #[default]
    Auto,
    /// This one; the worker does not start without it.
    Only(DiskMechanism),
}

impl FromStr for DiskChoice {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let allowed = "auto, project_quota, user_quota, image, scan";
        text.parse().map(Self::Only).map_err(|unknown| UnknownValue { allowed, ..unknown })
    }
}

impl fmt::Display for DiskChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Only(mechanism) => mechanism.fmt(f),
        }
    }
}

/// A chosen mechanism does not work here.
#[derive(Debug, thiserror::Error)]
#[error("worker.disk: {mechanism} does not work here: {missing}")]
pub struct DiskError {
    mechanism: DiskMechanism,
    missing: Missing,
}

/// The mechanism that a worker uses, and why not those that were tried before it.
#[derive(Debug)]
pub struct DiskReport {
    /// The mechanism that limits sessions.
    pub mechanism: DiskMechanism,
    /// Better ones that do not work here.
    pub rejected: Vec<(DiskMechanism, Missing)>,
}

/// The mechanism that a worker with the session root `root` would use. Changes nothing in `root`,
/// which must exist.
///
/// # Errors
/// The chosen mechanism does not work.
pub fn check_disk(
    root: &Path,
    choice: DiskChoice,
    separate_users: bool,
) -> Result<DiskReport, DiskError> {
    if choice == DiskChoice::Only(DiskMechanism::Image) {
        let mechanism = DiskMechanism::Image;
        Images::check(&env::temp_dir()).map_err(|missing| DiskError { mechanism, missing })?;
        return Ok(DiskReport { mechanism, rejected: Vec::new() });
    }
    choose(root, choice, separate_users).map(|(_, report)| report)
}

/// Returns the chosen mechanism. `None` is the scan.
pub(crate) fn choose(
    root: &Path,
    choice: DiskChoice,
    separate_users: bool,
) -> Result<(Option<Arc<dyn Quota>>, DiskReport), DiskError> {
    let mut rejected = Vec::new();
    if let DiskChoice::Only(mechanism) = choice {
        let quota = open(mechanism, root, separate_users)
            .map_err(|missing| DiskError { mechanism, missing })?;
        return Ok((quota, DiskReport { mechanism, rejected }));
    }
    for mechanism in [DiskMechanism::ProjectQuota, DiskMechanism::UserQuota] {
        match open(mechanism, root, separate_users) {
            Ok(quota) => return Ok((quota, DiskReport { mechanism, rejected })),
            Err(missing) => rejected.push((mechanism, missing)),
        }
    }
    Ok((None, DiskReport { mechanism: DiskMechanism::Scan, rejected }))
}

fn open(
    mechanism: DiskMechanism,
    root: &Path,
    separate_users: bool,
) -> Result<Option<Arc<dyn Quota>>, Missing> {
    let with_users = || {
        let remedy = "run the worker as root; `sandbox.uid_base` sets the ids in a user namespace";
        let missing = Missing::new("sessions have no users of their own", remedy);
        if separate_users { Ok(()) } else { Err(missing) }
    };
    Ok(match mechanism {
        DiskMechanism::ProjectQuota => {
            with_users()?;
            Some(Arc::new(KernelQuota::with_projects(root)?))
        }
        DiskMechanism::UserQuota => {
            with_users()?;
            Some(Arc::new(KernelQuota::with_users(root)?))
        }
        DiskMechanism::Image => Some(Arc::new(Images::new(root)?)),
        DiskMechanism::Scan => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_mechanism_that_cannot_work_is_an_error() {
        // The kernel's own file systems have no quotas.
        let root = Path::new("/proc");
        for mechanism in [DiskMechanism::ProjectQuota, DiskMechanism::UserQuota] {
            let refused = choose(root, DiskChoice::Only(mechanism), true).unwrap_err().to_string();
            assert!(
                refused.contains("worker.disk") && refused.contains("mount it with"),
                "{refused}"
            );
            let refused = choose(root, DiskChoice::Only(mechanism), false).unwrap_err().to_string();
            assert!(refused.contains("run the worker as root"), "{refused}");
        }
        let (quota, report) = choose(root, DiskChoice::Auto, true).unwrap();
        assert!(quota.is_none());
        let rejected: Vec<_> = report.rejected.iter().map(|(mechanism, _)| *mechanism).collect();
        assert_eq!(rejected, [DiskMechanism::ProjectQuota, DiskMechanism::UserQuota]);
    }

    #[test]
    fn choice_is_one_of_the_words() {
        assert_eq!("auto".parse(), Ok(DiskChoice::Auto));
        assert_eq!("image".parse(), Ok(DiskChoice::Only(DiskMechanism::Image)));
        let refused = "quota".parse::<DiskChoice>().unwrap_err().to_string();
        assert!(refused.contains("auto"), "{refused}");
    }
}
