//! Volumes of a tenant in a sandbox: which ones a policy mounts, where and how.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{FilesystemPolicy, Mount, Plan, mounts::overlays_dir};

/// The user and group that own the files of volumes on the disk, if each session has a user of its own. In
/// a sandbox they belong to the session's user.
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

impl FilesystemPolicy {
    /// The volumes that a command sees.
    #[must_use]
    pub fn mounted_volumes(&self) -> &[VolumeMount] {
        self.volumes.as_deref().unwrap_or_default()
    }
}

/// The mounts of the volumes of a policy. Their sources are only names: see [`Plan::with_volumes`].
pub(crate) fn volume_mounts(root: &Path, files: &FilesystemPolicy) -> Vec<Mount> {
    let layers = overlays_dir(root);
    let mount = |one: &VolumeMount| Mount::Volume {
        source: one.name.as_str().into(),
        target: one.path.clone(),
        layer: layers.join(format!("volume {}", one.name)),
        mode: one.mode,
    };
    files.mounted_volumes().iter().map(mount).collect()
}

impl Plan {
    /// Has the sandbox mount the directories of its volumes, by the names of the volumes. A backend refuses a
    /// plan with a volume that has no directory.
    #[must_use]
    pub fn with_volumes(mut self, directories: &BTreeMap<String, PathBuf>) -> Self {
        for mount in &mut self.mounts {
            if let Mount::Volume { source, .. } = mount
                && let Some(directory) = source.to_str().and_then(|name| directories.get(name))
            {
                source.clone_from(directory);
            }
        }
        self
    }
}
