//! The layout of a workspace: creates its directories, and says what `codelia-init` changes in the
//! mounts and must find then.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use codelia_init::{ExpectedMount, LayoutEntry, WorkspaceLayout};
use codelia_policy::{Ids, LayoutMount, Plan};
use codelia_sys::{Errno, process, resolve_beneath};
use codelia_types::Reason;

use crate::Error;

/// The changes that init makes; `None` without a layout.
pub(crate) fn for_init(plan: &Plan) -> Option<WorkspaceLayout> {
    let layout = plan.layout.as_ref()?;
    let entry = |mount: &LayoutMount| LayoutEntry {
        path: mount.path.clone(),
        writable: mount.writable,
        executable: mount.executable,
    };
    Some(WorkspaceLayout {
        workspace: plan.workspace.clone(),
        writable: layout.writable,
        executable: layout.executable,
        directories: layout.mounts.iter().map(entry).collect(),
        not_executable: layout.not_executable.clone(),
    })
}

/// Changes what init must find.
pub(crate) fn expect(plan: &Plan, mounts: &mut BTreeMap<PathBuf, ExpectedMount>) {
    let Some(layout) = &plan.layout else { return };
    if let Some(workspace) = mounts.get_mut(&plan.workspace) {
        (workspace.writable, workspace.executable) =
            (Some(layout.writable), no_execution(layout.executable));
    }
    for target in &layout.not_executable {
        mounts.entry(target.clone()).and_modify(|mount| mount.executable = Some(false));
    }
    let entries = layout.mounts.iter().map(|mount| {
        let expected = ExpectedMount {
            writable: Some(mount.writable),
            executable: no_execution(mount.executable),
            ..ExpectedMount::default()
        };
        (plan.workspace.join(&mount.path), expected)
    });
    mounts.extend(entries);
}

/// Only a restriction is checked: the sessions may be on a host's `noexec` mount.
fn no_execution(executable: bool) -> Option<bool> {
    (!executable).then_some(false)
}

/// Creates the directories of a layout in the session's directory. They belong to the session's
/// user.
pub(crate) fn create_directories(plan: &Plan) -> Result<(), Error> {
    let Some(layout) = &plan.layout else { return Ok(()) };
    let failed = |path: &Path, errno: Errno| match errno {
        // Only a caller or an earlier command of the session can have put it there.
        Errno::LOOP | Errno::NOTDIR => Error::refused(
            Reason::LaunchFailed,
            format!(
                "policy.layout: {} is not a directory in the workspace; remove it",
                path.display()
            ),
        ),
        errno => Error::Root { path: plan.root.join(path), errno },
    };
    let owner =
        plan.ids.filter(|ids| ids.uid != process::own_uid()).map(|Ids { uid, gid }| (uid, gid));
    let root =
        resolve_beneath::open_directory(&plan.root).map_err(|errno| failed(&plan.root, errno))?;
    layout.directories.iter().try_for_each(|path| {
        let created = resolve_beneath::create_directories_without_symlinks(&root, path, owner);
        created.map(drop).map_err(|errno| failed(path, errno))
    })
}
