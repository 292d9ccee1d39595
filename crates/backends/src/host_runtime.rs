//! The programs and libraries of this host that sandboxes see.

use std::{fs, path::Path};

use codelia_policy::{PathKind, Runtime};

/// Looks up the runtime of this host.
#[must_use]
pub fn host_runtime() -> Runtime {
    let mut etc: Vec<_> =
        fs::read_dir("/etc").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    etc.sort();
    Runtime::detect(&etc, look_up)
}

/// A dangling symbolic link counts as absent.
fn look_up(path: &Path) -> Option<PathKind> {
    path.exists().then(|| fs::read_link(path).map_or(PathKind::FileOrDirectory, PathKind::Symlink))
}
