//! The disk space of the files of a session, and how it is limited.

use serde::{Deserialize, Serialize};

use crate::words;

/// Space that is allocated for the files of a session, without the holes of sparse files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DiskUsage {
    /// Allocated blocks, in bytes.
    pub bytes: u64,
    /// Files, directories and links. A file with several names counts once.
    pub inodes: u64,
}

words! {
    /// A way to limit the disk space of sessions on a worker, best first.
    #[derive(Hash)]
    pub enum DiskMechanism {
        /// The file system has project quotas, and each session a project.
        ProjectQuota = "project_quota",
        /// The file system has user quotas, and each session a user.
        UserQuota = "user_quota",
        /// Each session has a file system of its own, in a file.
        Image = "image",
        /// The worker measures the directories of sessions and stops runs that exceed their limit.
        Scan = "scan",
    }
}
