//! Hides every path in a sandbox that leads to a hidden one: the host may mount a directory twice,
//! and a policy may open a directory through a symbolic link. Hard links cannot be found.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
};

use codelia_policy::{Mount, Plan};
use codelia_sys::mount_alias::MountAliases;
use codelia_types::Mode;
use tokio::task::spawn_blocking;

use crate::Error;

/// The plan with a mount for each other path of what it hides, and for each path of the worker's
/// secrets.
///
/// # Errors
/// The mount table cannot be read.
pub(crate) async fn hide<'a>(plan: &'a Plan, secrets: &[PathBuf]) -> Result<Cow<'a, Plan>, Error> {
    let is_affected = |mount: &Mount| match mount {
        Mount::Hidden { .. } => true,
        Mount::Bind { source, .. }
        | Mount::Overlay { source, .. }
        | Mount::Transaction { source, .. } => {
            secrets.iter().any(|secret| secret.starts_with(source))
        }
        _ => false,
    };
    if !plan.mounts.iter().any(is_affected) {
        return Ok(Cow::Borrowed(plan));
    }
    let mut plan = plan.clone();
    let secrets = secrets.to_vec();
    let hidden = spawn_blocking(move || -> io::Result<Plan> {
        let aliases = find(&plan, &secrets, &MountAliases::read()?);
        let hide = |target| Mount::Hidden { target, even_if_absent: false };
        plan.mounts.extend(aliases.into_iter().map(hide));
        Ok(plan)
    });
    Ok(Cow::Owned(hidden.await.map_err(io::Error::from)??))
}

fn find(plan: &Plan, secrets: &[PathBuf], table: &MountAliases) -> BTreeSet<PathBuf> {
    let hidden: BTreeSet<&Path> = plan
        .mounts
        .iter()
        .filter(|mount| matches!(mount, Mount::Hidden { .. }))
        .map(Mount::target)
        .collect();
    let mut shown: BTreeMap<PathBuf, Vec<&Path>> = BTreeMap::new();
    for mount in &plan.mounts {
        if let Mount::Bind { source, .. }
        | Mount::Overlay { source, .. }
        | Mount::Transaction { source, .. }
        | Mount::Runtime { path: source } = mount
            && let Ok(source) = source.canonicalize()
        {
            shown.entry(source).or_default().push(mount.target());
        }
    }
    // Engines bind without the mounts below a directory, the tools with them.
    let is_bound =
        |source: &Path, mount: &Path| plan.mode != Mode::Container || source.starts_with(mount);
    let mut found = BTreeSet::new();
    // Paths of the workspace have other names on the host.
    let on_host = hidden.iter().copied().filter(|path| !path.starts_with(&plan.workspace));
    let on_host = on_host.chain(secrets.iter().map(PathBuf::as_path));
    for alias in
        on_host.filter_map(|path| path.canonicalize().ok()).flat_map(|path| table.find(&path))
    {
        for source in alias.path.ancestors().filter(|source| is_bound(source, &alias.mount)) {
            let Ok(rest) = alias.path.strip_prefix(source) else { continue };
            for target in shown.get(source).into_iter().flatten() {
                let inside: PathBuf = target.components().chain(rest.components()).collect();
                if !hidden.contains(inside.as_path()) {
                    found.insert(inside);
                }
            }
        }
    }
    found
}
