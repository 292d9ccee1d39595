//! What of this host's programs and libraries sandboxes show.

use std::{fs, path::Path};

use codelia_policy::{PathKind, Runtime};

/// The runtime of this host.
#[must_use]
pub fn host_runtime() -> Runtime {
    let mut etc: Vec<_> =
        fs::read_dir("/etc").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    etc.sort();
    Runtime::detect(&etc, look)
}

/// A link that leads nowhere is not there.
fn look(path: &Path) -> Option<PathKind> {
    path.exists().then(|| fs::read_link(path).map_or(PathKind::FileOrDirectory, PathKind::Symlink))
}
