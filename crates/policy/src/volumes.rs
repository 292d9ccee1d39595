//! Volumes of a tenant, as a policy names them.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

/// The user and group that own the files of volumes on the disk, if each session has a user of its
/// own. In a sandbox they belong to the session's user.
pub const VOLUME_OWNER: u32 = 65_534;

/// The word for the limit of a volume in outcomes.
pub const VOLUME_BYTES: &str = "volume_bytes";

/// A volume that a command sees.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeMount {
    /// The name of a volume of the tenant.
    pub name: String,
    /// Where it is in the sandbox.
    pub path: PathBuf,
    /// Who may write to it.
    #[serde(default)]
    pub mode: VolumeMode,
}

/// How a session mounts a volume.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum VolumeMode {
    /// The command only reads it.
    ReadOnly,
    /// The command reads it; its changes stay in the session and are dropped with it.
    #[default]
    Copy,
    /// The command writes to it, and no other session may while this one is open.
    Exclusive,
}

impl VolumeMode {
    /// The word for the mode, as in documents.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ReadOnly => "read_only",
            Self::Copy => "copy",
            Self::Exclusive => "exclusive",
        }
    }
}

impl fmt::Display for VolumeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
