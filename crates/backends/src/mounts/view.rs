//! Changes of `codelia-init` in the mounts that a tool makes, and the mounts that it must find
//! then.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use codelia_init::{
    ExpectedEnvironment, ExpectedMount, FileIdentity, Mask, PrivatePath, STAGING_DIR, StagedMount,
    View,
};
use codelia_policy::{Mount, Plan};
use codelia_sys::{Errno, proc_self};

use crate::{
    Error,
    isolation::INIT,
    mask::{MaskTarget, Masks},
    mounts::layout,
};

/// The entries of a minimal `/dev`, which are mounts of the host's devices.
pub(crate) const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// The view in the mounts that a tool makes. `copies_files` says that the tool copies files of the
/// runtime by itself.
pub(crate) fn in_tool(plan: &Plan, masks: &Masks, copies_files: bool) -> Result<View, Error> {
    let mut view = View { layout: layout::for_init(plan), ..View::default() };
    for (index, (mount, target)) in masks.zip(&plan.mounts).enumerate() {
        view.masked.extend(mask(target));
        if let Mount::Runtime { path } = mount
            && !is_covered(path, &plan.mounts[index + 1..])
        {
            view.private.extend(private_path(path, plan, copies_files)?);
        }
    }
    Ok(view)
}

/// Where the tool makes a mount or file of the plan, by its index. One below a directory of the
/// runtime is made elsewhere, and `codelia-init` mounts it in its place.
pub(crate) fn place(plan: &Plan, index: usize) -> PathBuf {
    let target = plan.mounts[index].target();
    let is_above = |(runtime, mount): (usize, &Mount)| {
        let Mount::Runtime { path } = mount else { return false };
        target != path && target.starts_with(path) && !is_covered(path, &plan.mounts[runtime + 1..])
    };
    if is_mounted(&plan.mounts[index]) && plan.mounts.iter().enumerate().any(is_above) {
        Path::new(STAGING_DIR).join(index.to_string())
    } else {
        target.to_owned()
    }
}

/// Adds the mounts that the tool makes in addition to those of the plan, and masks what no command
/// needs of them.
pub(crate) fn expect_tool_mounts(expected: &mut ExpectedEnvironment, view: &mut View) {
    expected.mounts.insert(INIT.into(), ExpectedMount::read_only(None));
    let staged = view.private.iter().flat_map(|private| &private.below);
    for StagedMount { staged, target, .. } in staged {
        // A layout changes a mount in its place.
        let planned = expected.mounts.get(target).cloned();
        let planned = planned.map(|mount| ExpectedMount { executable: None, ..mount });
        expected.mounts.extend(planned.map(|mount| (staged.clone(), mount)));
    }
    // The inode of init is the host's.
    view.masked.push(Mask { path: INIT.into(), is_directory: false });
    if view.private.iter().any(|private| !private.below.is_empty()) {
        view.masked.push(staging_mask());
    }
    expect_root_and_devices(expected);
}

/// The view in the mounts that a zygote makes: the zygote has made the runtime private.
pub(crate) fn in_zygote(plan: &Plan, masks: &Masks, expected: &mut ExpectedEnvironment) -> View {
    expected.covered = Some(STAGING_DIR.into());
    expect_root_and_devices(expected);
    let masked = masks.zip(&plan.mounts).filter_map(|(_, target)| mask(target));
    let masked = masked.chain([staging_mask()]).collect();
    View { private: Vec::new(), layout: layout::for_init(plan), masked, owns_mounts: true }
}

fn expect_root_and_devices(expected: &mut ExpectedEnvironment) {
    expected.mounts.insert("/".into(), ExpectedMount::read_only(None));
    let dev = Path::new("/dev");
    if expected.mounts.contains_key(dev) {
        let entries =
            DEVICES.iter().chain(&["pts"]).map(|name| (dev.join(name), ExpectedMount::default()));
        expected.mounts.extend(entries);
    }
}

fn staging_mask() -> Mask {
    Mask { path: STAGING_DIR.into(), is_directory: true }
}

/// Whether a later mount covers the path.
pub(crate) fn is_covered(path: &Path, later: &[Mount]) -> bool {
    later.iter().any(|mount| is_mounted(mount) && path.starts_with(mount.target()))
}

/// Whether every tool makes a mount for it, or a file that can be mounted elsewhere.
fn is_mounted(mount: &Mount) -> bool {
    !matches!(mount, Mount::Proc | Mount::Dev | Mount::Symlink { .. } | Mount::Hidden { .. })
}

/// `None` for what needs no view: what the tool copies, and files that a command cannot open, so
/// that it can neither watch nor lock them.
fn private_path(
    path: &Path,
    plan: &Plan,
    copies_files: bool,
) -> Result<Option<PrivatePath>, Error> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_dir() && (copies_files || !is_readable(&metadata)) {
        return Ok(None);
    }
    let below = plan.mounts.iter().enumerate().filter(|(_, mount)| {
        is_mounted(mount) && mount.target() != path && mount.target().starts_with(path)
    });
    let staged = |(index, mount): (usize, &Mount)| StagedMount {
        staged: place(plan, index),
        target: mount.target().to_owned(),
        is_copied: matches!(mount, Mount::File { .. }),
    };
    Ok(Some(PrivatePath {
        path: path.to_owned(),
        identity: FileIdentity::from(&metadata),
        host_mounts: host_mounts_below(path)?,
        below: below.map(staged).collect(),
    }))
}

/// The host's mounts, read once.
static HOST_MOUNTS: LazyLock<Result<Vec<proc_self::Mount>, Errno>> =
    LazyLock::new(proc_self::mounts);

fn host_mounts_below(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let mounts = HOST_MOUNTS.as_ref().map_err(|errno| io::Error::from(*errno))?;
    let targets = mounts.iter().map(|mount| &mount.target);
    Ok(targets.filter(|target| *target != path && target.starts_with(path)).cloned().collect())
}

/// Whether everyone may read a file.
pub(crate) fn is_readable(metadata: &Metadata) -> bool {
    metadata.permissions().mode() & 0o004 != 0
}

fn mask(target: &MaskTarget) -> Option<Mask> {
    match target {
        MaskTarget::Directory(path) => Some(Mask { path: path.clone(), is_directory: true }),
        MaskTarget::File(path) => Some(Mask { path: path.clone(), is_directory: false }),
        MaskTarget::Absent => None,
    }
}
