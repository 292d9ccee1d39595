//! Validation of the file system part of a policy.

use std::path::{Path, PathBuf};

use super::{
    PolicyError, fail,
    field::{MAX_ENTRIES, check_entries, check_path},
};
use crate::{FilesystemMode, FilesystemPolicy, WORKSPACE, mounts::overlay_name};

pub(super) const READ_ONLY: &str = "filesystem.read_only_paths";
pub(super) const READ_WRITE: &str = "filesystem.read_write_paths";
pub(super) const OVERLAY: &str = "filesystem.overlay_paths";
const DENIED: &str = "filesystem.denied_paths";

/// The maximum length of a file name, in bytes.
const MAX_NAME: usize = 255;

/// Paths that the sandbox itself provides. No policy mounts over, above or below them.
const SANDBOX_PATHS: [&str; 8] =
    [WORKSPACE, "/proc", "/dev", "/sys", "/tmp", "/var/tmp", "/run", "/.codelia-init"];

impl FilesystemPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        if self.root_path.as_deref().is_some_and(|path| path != Path::new(WORKSPACE)) {
            return fail("filesystem.root_path", format!("must be {WORKSPACE}"));
        }
        let has_writable = self.read_write_paths.as_ref().is_some_and(|paths| !paths.is_empty());
        if has_writable && self.mode == Some(FilesystemMode::Static) {
            return fail(READ_WRITE, "must be empty in filesystem.mode static; use overlay_paths");
        }
        if self.max_total_bytes.is_some() {
            return fail("filesystem.max_total_bytes", "is not supported yet; remove it");
        }
        for (field, paths) in self.lists() {
            check_entries(field, paths.len(), MAX_ENTRIES)?;
            for (at, path) in paths.iter().enumerate() {
                check_mount_path(&format!("{field}[{at}]"), path)?;
            }
        }
        let overlays = self.overlay_paths.as_deref().unwrap_or_default();
        if let Some(at) = overlays.iter().position(|path| overlay_name(path).len() > MAX_NAME) {
            return fail(
                format!("{OVERLAY}[{at}]"),
                format!("is too long for an overlay: its encoded name exceeds {MAX_NAME} bytes"),
            );
        }
        self.check_conflicts()
    }

    /// The path lists with their fields: read-only, read-write, overlay, denied.
    fn lists(&self) -> [(&'static str, &[PathBuf]); 4] {
        [
            (READ_ONLY, self.read_only_paths.as_deref().unwrap_or_default()),
            (READ_WRITE, self.read_write_paths.as_deref().unwrap_or_default()),
            (OVERLAY, self.overlay_paths.as_deref().unwrap_or_default()),
            (DENIED, &self.denied_paths),
        ]
    }

    fn check_conflicts(&self) -> Result<(), PolicyError> {
        for (field, paths) in self.lists().into_iter().take(3) {
            let is_denied = |path: &PathBuf| self.denied_paths.iter().any(|denied| path.starts_with(denied));
            if let Some(at) = paths.iter().position(is_denied) {
                return fail(format!("{field}[{at}]"), "is below a path in filesystem.denied_paths");
            }
        }
        match self.below_writable() {
            Some((field, at)) => {
                fail(format!("{field}[{at}]"), "is below a writable path, where the command could replace it")
            }
            None => Ok(()),
        }
    }

    /// The first path that is below a path the command can write to, as field and index. The command
    /// could replace it with a symlink, so nothing can be mounted there.
    pub(crate) fn below_writable(&self) -> Option<(&'static str, usize)> {
        let [_, writable, overlaid, _] = self.lists();
        let inside = |field, path: &PathBuf| {
            let within = |own, paths: &[PathBuf]| {
                paths.iter().any(|upper| path.starts_with(upper) && (field != own || path != upper))
            };
            within(READ_WRITE, writable.1) || within(OVERLAY, overlaid.1)
        };
        self.lists().into_iter().find_map(|(field, paths)| {
            paths.iter().position(|path| inside(field, path)).map(|at| (field, at))
        })
    }
}

/// Checks that a policy may mount something at the path.
fn check_mount_path(field: &str, path: &Path) -> Result<(), PolicyError> {
    check_path(field, path)?;
    match SANDBOX_PATHS.iter().find(|own| path.starts_with(own) || Path::new(own).starts_with(path)) {
        Some(own) => fail(field, format!("conflicts with {own}, which the sandbox itself provides")),
        None => Ok(()),
    }
}
