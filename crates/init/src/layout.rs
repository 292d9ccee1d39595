//! The layout of a workspace: makes it read-only or not executable, except for some of its
//! directories.
//!
//! Commands and callers may have put symbolic links anywhere in a workspace. None is followed.

use std::path::Path;

use codelia_init::{LayoutEntry, WorkspaceLayout};
use codelia_sys::{Errno, mount, resolve_beneath};

/// Changes the mounts. The workspace is writable before.
pub(crate) fn apply(layout: &WorkspaceLayout) -> Result<(), Errno> {
    let workspace = resolve_beneath::open_directory(&layout.workspace)?;
    // A clone has the access of what it is cloned from, so all are made before anything is
    // restricted.
    let clone = |entry: &LayoutEntry| {
        let directory = resolve_beneath::open_directory_without_symlinks(&workspace, &entry.path)?;
        mount::clone_beneath(&directory, Path::new(""))
    };
    let clones = layout.directories.iter().map(clone).collect::<Result<Vec<_>, _>>()?;
    mount::restrict_access(&workspace, layout.writable, layout.executable)?;
    for (entry, tree) in layout.directories.iter().zip(clones) {
        mount::restrict_access(&tree, entry.writable, entry.executable)?;
        // Opened again: an entry above it has covered it.
        let place = resolve_beneath::open_directory_across_mounts(&workspace, &entry.path)?;
        mount::attach_on(&tree, &place)?;
    }
    layout.not_executable.iter().try_for_each(|path| mount::deny_execution(path))
}
