//! What the files of a session use, and how that is limited.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::UnknownValue;

/// What is allocated for the files of a session. Holes of sparse files are not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DiskUsage {
    /// Allocated blocks, in bytes.
    pub bytes: u64,
    /// Files, directories and links. A file with several names counts once.
    pub inodes: u64,
}

/// What limits the disk space of sessions on a worker, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskMechanism {
    /// The file system has project quotas, and each session a project.
    ProjectQuota,
    /// The file system has user quotas, and each session a user.
    UserQuota,
    /// Each session has a file system of its own, in a file.
    Image,
    /// The worker measures the directories of sessions and stops runs that exceed their limit.
    Scan,
}

impl DiskMechanism {
    /// All mechanisms, best first.
    pub const ALL: [Self; 4] = [Self::ProjectQuota, Self::UserQuota, Self::Image, Self::Scan];

    /// The word for the mechanism in configuration, metrics and the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ProjectQuota => "project_quota",
            Self::UserQuota => "user_quota",
            Self::Image => "image",
            Self::Scan => "scan",
        }
    }
}

impl fmt::Display for DiskMechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for DiskMechanism {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        Self::ALL.into_iter().find(|mechanism| mechanism.as_str() == text).ok_or_else(|| {
            UnknownValue {
                value: text.to_owned(),
                allowed: "project_quota, user_quota, image, scan",
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mechanisms_are_read_as_written() {
        for mechanism in DiskMechanism::ALL {
            assert_eq!(mechanism.to_string().parse(), Ok(mechanism));
            assert_eq!(serde_json::to_value(mechanism).unwrap(), mechanism.as_str());
        }
        assert!("quota".parse::<DiskMechanism>().is_err());
    }
}
