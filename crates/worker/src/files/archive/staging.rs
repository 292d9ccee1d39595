//! The place of an import into a directory that does not exist yet. It is next to the workspace,
//! out of reach of commands, until the whole directory is moved to its place.

use std::{
    fs::{self, DirBuilder},
    os::{fd::OwnedFd, unix::fs::DirBuilderExt},
    path::{Path, PathBuf},
};

use codelia_sys::resolve_beneath::{ResolvedPath, open_directory_without_symlinks};
use rustix::fs::{Mode, RenameFlags, mkdirat, renameat_with};
use tokio::runtime::Handle;
use uuid::Uuid;

use super::super::{error::FileError, workspace::Workspace};
use crate::{file_work::unless_exists, workspace::trash};

/// The name of the imported directory.
const TREE: &str = "tree";

/// A directory that is being imported. When it is dropped, what is left of it is removed.
#[derive(Debug)]
pub(super) struct Staging {
    path: PathBuf,
    name: String,
    trash: PathBuf,
    /// The directory at `path`, of the session's user.
    directory: OwnedFd,
    target: ResolvedPath,
}

impl Staging {
    /// Creates an empty directory that will be moved to `target`.
    pub(super) fn create(workspace: &Workspace, target: ResolvedPath) -> Result<Self, FileError> {
        let imports = workspace.imports();
        unless_exists(DirBuilder::new().mode(0o700).create(&imports))?;
        let name = Uuid::new_v4().to_string();
        let path = imports.join(&name);
        let directory = workspace.create_private(&path)?;
        let staging = Self { path, name, trash: workspace.trash(), directory, target };
        let mode = Mode::from_raw_mode(0o755);
        workspace.as_session(|| Ok(mkdirat(&staging.directory, TREE, mode)?))?;
        Ok(staging)
    }

    /// The directory to import into.
    pub(super) fn tree(&self) -> Result<OwnedFd, FileError> {
        Ok(open_directory_without_symlinks(&self.directory, Path::new(TREE))?)
    }

    /// Moves the directory to its place, if nothing has appeared there.
    pub(super) fn publish(self, workspace: &Workspace) -> Result<(), FileError> {
        workspace.check_held()?;
        let parent = &self.target.parent;
        let name = &self.target.name;
        let flags = RenameFlags::NOREPLACE;
        workspace.as_session(|| Ok(renameat_with(&self.directory, TREE, parent, name, flags)?))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Moving it is quick; removing it may not be. A crash in between leaves it to upkeep.
        if let Err(error) = fs::rename(&self.path, self.trash.join(&self.name)) {
            tracing::warn!(%error, "cannot move an import to the trash, leaving it to the next holder");
            return;
        }
        let trash = self.trash.clone();
        let name = self.name.clone();
        let remove = move || {
            if let Err(error) = trash::remove(&trash, Path::new(&name)) {
                tracing::warn!(%error, "cannot remove an import from the trash, leaving it to upkeep");
            }
        };
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}
