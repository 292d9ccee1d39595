//! Limits of one process, inherited by what it starts.

use rustix::{
    io::Errno,
    process::{Rlimit, getrlimit, setrlimit},
};
use serde::{Deserialize, Serialize};

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Open files.
    OpenFiles,
    /// Bytes of a core dump.
    CoreBytes,
}

/// Limits this process, for good. A lower limit that holds already stays.
///
/// # Errors
/// As `setrlimit(2)`.
pub fn lower(resource: Resource, most: u64) -> Result<(), Errno> {
    let resource = match resource {
        Resource::OpenFiles => rustix::process::Resource::Nofile,
        Resource::CoreBytes => rustix::process::Resource::Core,
    };
    let most = getrlimit(resource).maximum.map_or(most, |hard| hard.min(most));
    setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
}
