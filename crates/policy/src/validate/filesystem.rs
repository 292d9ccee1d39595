//! Validation of the file system part of a policy.

use std::path::{Path, PathBuf};

use codelia_types::VolumeName;

use super::{
    error::{PolicyError, fail, fail_at},
    field::check_path,
};
use crate::{
    FilesystemMode, FilesystemPolicy, PathTrie, WORKSPACE, merge::values::has_entries,
    mounts::overlay_name,
};

pub(super) const READ_ONLY: &str = "filesystem.read_only_paths";
pub(super) const READ_WRITE: &str = "filesystem.read_write_paths";
pub(super) const OVERLAY: &str = "filesystem.overlay_paths";
pub(super) const VOLUMES: &str = "filesystem.volumes";
const DENIED: &str = "filesystem.denied_paths";

/// The maximum length of a file name, in bytes.
const MAX_NAME: usize = 255;

/// Paths that the sandbox itself provides. No policy mounts over, above or below them.
const SANDBOX_PATHS: [&str; 8] =
    [WORKSPACE, "/proc", "/dev", "/sys", "/tmp", "/var/tmp", "/run", "/.codelia-init"];

/// Where the runtime is. A volume has no place in it.
const RUNTIME_PATHS: [&str; 8] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc"];

impl FilesystemPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        if has_entries(&self.read_write_paths) && self.mode == Some(FilesystemMode::Static) {
            return fail(READ_WRITE, "must be empty in filesystem.mode static; use overlay_paths");
        }
        let writes = has_entries(&self.read_write_paths);
        let overlays = has_entries(&self.overlay_paths);
        if self.mode == Some(FilesystemMode::Dynamic) && (writes || overlays) {
            let field = if writes { READ_WRITE } else { OVERLAY };
            return fail(field, "must be empty in filesystem.mode dynamic; use read_only_paths");
        }
        for (field, paths) in self.lists() {
            for (at, path) in paths.iter().enumerate() {
                check_mount_path(&format!("{field}[{at}]"), path)?;
            }
        }
        let overlays = self.overlay_paths.as_deref().unwrap_or_default();
        let too_long = overlays.iter().position(|path| overlay_name(path).len() > MAX_NAME);
        let message =
            format!("is too long for an overlay: its encoded name exceeds {MAX_NAME} bytes");
        fail_at(OVERLAY, too_long, message)?;
        self.check_conflicts()?;
        self.check_volumes()
    }

    fn check_volumes(&self) -> Result<(), PolicyError> {
        for (at, volume) in self.mounted_volumes().iter().enumerate() {
            if volume.name.parse::<VolumeName>().is_err() {
                return fail(
                    format!("{VOLUMES}[{at}].name"),
                    "must be of [a-z0-9-], 1 to 63 characters",
                );
            }
            let field = format!("{VOLUMES}[{at}].path");
            check_mount_path(&field, &volume.path)?;
            if let Some(own) = RUNTIME_PATHS.iter().find(|own| volume.path.starts_with(own)) {
                return fail(
                    field,
                    format!("must not be in {own}, which shows the runtime; use /cache/NAME"),
                );
            }
        }
        match self.volume_conflict() {
            Some((at, message)) => fail_at(VOLUMES, Some(at), message),
            None => Ok(()),
        }
    }

    /// The first volume that cannot be mounted because of another one or of a path list, and why.
    pub(crate) fn volume_conflict(&self) -> Option<(usize, &'static str)> {
        let volumes = self.mounted_volumes();
        let overlap = |a: &Path, b: &Path| a.starts_with(b) || b.starts_with(a);
        volumes.iter().enumerate().find_map(|(at, one)| {
            let before = &volumes[..at];
            if before.iter().any(|other| other.name == one.name) {
                return Some((at, "names a volume again; mount each once"));
            }
            if before.iter().any(|other| overlap(&other.path, &one.path)) {
                return Some((at, "is above or below another volume"));
            }
            let lists = self.lists();
            let mut paths = lists.iter().flat_map(|(_, paths)| paths.iter());
            paths
                .any(|path| overlap(path, &one.path))
                .then_some((at, "is above or below a path in another list of filesystem"))
        })
    }

    /// The path lists with their fields: read-only, read-write, overlay, denied.
    pub(crate) fn lists(&self) -> [(&'static str, &[PathBuf]); 4] {
        [
            (READ_ONLY, self.read_only_paths.as_deref().unwrap_or_default()),
            (READ_WRITE, self.read_write_paths.as_deref().unwrap_or_default()),
            (OVERLAY, self.overlay_paths.as_deref().unwrap_or_default()),
            (DENIED, &self.denied_paths),
        ]
    }

    fn check_conflicts(&self) -> Result<(), PolicyError> {
        let denied: PathTrie<_> = self.denied_paths.iter().collect();
        for (field, paths) in self.lists().into_iter().take(3) {
            let closed = paths.iter().position(|path| denied.covers(path));
            fail_at(field, closed, "is below a path in filesystem.denied_paths")?;
        }
        match self.below_writable() {
            Some((field, at)) => {
                let message = "is below a writable path, where the command could replace it";
                fail_at(field, Some(at), message)
            }
            None => Ok(()),
        }
    }

    /// The first path that is below a path the command can write to, as field and index. The
    /// command could replace it with a symlink, so nothing can be mounted there.
    pub(crate) fn below_writable(&self) -> Option<(&'static str, usize)> {
        let [_, writable, overlaid, _] = self.lists();
        let uppers =
            [writable, overlaid].map(|(own, paths)| (own, paths.iter().collect::<PathTrie<_>>()));
        let inside = |field, path: &Path| {
            uppers.iter().any(|(own, uppers)| {
                // A path is not below itself.
                let inner = if field == *own { path.parent() } else { Some(path) };
                inner.is_some_and(|inner| uppers.covers(inner))
            })
        };
        self.lists().into_iter().find_map(|(field, paths)| {
            paths.iter().position(|path| inside(field, path)).map(|at| (field, at))
        })
    }
}

/// Checks that a policy may mount something at the path.
fn check_mount_path(field: &str, path: &Path) -> Result<(), PolicyError> {
    check_path(field, path)?;
    match SANDBOX_PATHS.iter().find(|own| path.starts_with(own) || Path::new(own).starts_with(path))
    {
        Some(own) => {
            fail(field, format!("conflicts with {own}, which the sandbox itself provides"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    /// Paths with few names, so that they overlap. `a-b` sorts between `a` and `a/b` by bytes.
    fn paths() -> impl Strategy<Value = Vec<PathBuf>> {
        let path = vec(select(vec!["a", "b", "a-b"]), 1..4)
            .prop_map(|names| iter::once("/").chain(names).collect());
        vec(path, 0..4)
    }

    /// The first path below a writable one, by comparing all pairs.
    fn below_writable_pairwise(policy: &FilesystemPolicy) -> Option<(&'static str, usize)> {
        let [_, writable, overlaid, _] = policy.lists();
        let inside = |field, path: &PathBuf| {
            [writable, overlaid].iter().any(|(own, uppers)| {
                uppers
                    .iter()
                    .any(|upper| path.starts_with(upper) && (field != *own || path != upper))
            })
        };
        policy.lists().into_iter().find_map(|(field, paths)| {
            paths.iter().position(|path| inside(field, path)).map(|at| (field, at))
        })
    }

    proptest! {
        #[test]
        fn conflicts_equal_pairwise_comparison(
            read_only in paths(), read_write in paths(), overlay in paths(), denied_paths in paths()
        ) {
            let policy = FilesystemPolicy {
                read_only_paths: Some(read_only),
                read_write_paths: Some(read_write),
                overlay_paths: Some(overlay),
                denied_paths,
                ..FilesystemPolicy::default()
            };
            prop_assert_eq!(policy.below_writable(), below_writable_pairwise(&policy));
            let is_denied = |path: &PathBuf| policy.denied_paths.iter().any(|denied| path.starts_with(denied));
            let below_denied = policy.lists().into_iter().take(3).find_map(|(field, paths)| {
                paths.iter().position(is_denied).map(|at| (field, at))
            });
            let expected = below_denied.or(below_writable_pairwise(&policy));
            let found = policy.check_conflicts().err().map(|error| error.field);
            prop_assert_eq!(found, expected.map(|(field, at)| format!("{field}[{at}]")));
        }
    }
}
