//! Volumes of a tenant, as a policy names them.

use std::path::PathBuf;

use codelia_types::words;
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

words! {
    /// How a session mounts a volume.
    #[derive(Default, PartialOrd, Ord, Hash)]
    pub enum VolumeMode {
        /// The command only reads it.
        ReadOnly = "read_only",
        /// The command reads it; its changes stay in the session and are dropped with it.
        #[default]
        Copy = "copy",
        /// The command writes to it, and no other session may while this one is open.
        Exclusive = "exclusive",
    }
}
