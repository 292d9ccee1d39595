//! The status of a process of this host.

use std::{fs, path::Path};

/// Fields of `/proc/PID/status`.
pub(super) struct ProcessStatus {
    pub(super) name: String,
    pub(super) parent: u32,
    pub(super) uid: u32,
}

impl ProcessStatus {
    /// `None` if the process is gone.
    pub(super) fn read(dir: &Path) -> Option<Self> {
        let status = fs::read_to_string(dir.join("status")).ok()?;
        let field =
            |name: &str| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        let number = |name: &str| field(name)?.split_whitespace().next()?.parse().ok();
        Some(Self {
            name: field("Name:")?.to_owned(),
            parent: number("PPid:")?,
            uid: number("Uid:")?,
        })
    }
}
