//! The overlays of sessions.
//!
//! An overlay is mounted once for all live sandboxes of its session, because two mounts of one
//! layer would be inconsistent. It is mounted in namespaces that only the session's tools enter,
//! and is gone with the last sandbox.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use codelia_init::{OVERLAY_MOUNTS_DIR, Overlay, OverlayKind, OverlayRequest};
use codelia_policy::{Ids, Mount, PathTrie, Plan, VOLUME_OWNER, VolumeMode};
use codelia_sys::process::own_uid;
use tokio::{sync::Mutex as AsyncMutex, time::timeout};

use crate::{
    Error, init_binary, isolation,
    mask::{MaskTarget, MountTable},
};

/// The policy field that requests overlays.
const FIELD: &str = "policy.filesystem.overlay_paths";
/// The policy field that requests volumes.
pub(crate) const VOLUMES_FIELD: &str = "policy.filesystem.volumes";

/// How long `codelia-init` may take to mount overlays: a source may be on a file system that hangs.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// The mounted overlays, by the directory of their layers.
#[derive(Debug, Default)]
pub(crate) struct Overlays(Mutex<HashMap<PathBuf, Arc<AsyncMutex<SessionOverlays>>>>);

/// The overlays of one session.
#[derive(Debug, Default)]
struct SessionOverlays {
    namespaces: Weak<Namespaces>,
    /// The paths hidden in each mounted overlay, by the overlay's name.
    hidden: BTreeMap<String, Vec<PathBuf>>,
}

/// The namespaces in which a session's overlays are mounted. They exist while this value does.
#[derive(Debug)]
pub(crate) struct Namespaces(Vec<OwnedFd>);

impl Namespaces {
    /// Duplicates the descriptors for a process that enters the namespaces.
    pub(crate) fn try_clone_fds(&self) -> io::Result<Vec<OwnedFd>> {
        self.0.iter().map(OwnedFd::try_clone).collect()
    }
}

impl Overlays {
    /// Mounts the overlays of a plan that are not mounted yet. Returns `None` if it has none.
    pub(crate) async fn mount(
        &self,
        init: &Path,
        plan: &Plan,
    ) -> Result<Option<Arc<Namespaces>>, Error> {
        let Some(request) = overlay_request(plan)? else { return Ok(None) };
        let session = self.session(&request.directory);
        // The lock serializes mounts of a session: each must know what is mounted already.
        let mounting = async { session.lock().await.mount(init, request).await };
        timeout(MOUNT_TIMEOUT, mounting).await.map_err(|_| Error::InitTimeout)?.map(Some)
    }

    /// The overlays of one session. Drops the entries of sessions without live sandboxes.
    fn session(&self, directory: &Path) -> Arc<AsyncMutex<SessionOverlays>> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, session| {
            session.try_lock().map_or(true, |mounted| mounted.namespaces.strong_count() > 0)
        });
        sessions.entry(directory.to_owned()).or_default().clone()
    }
}

impl SessionOverlays {
    async fn mount(
        &mut self,
        init: &Path,
        request: OverlayRequest,
    ) -> Result<Arc<Namespaces>, Error> {
        let existing = self.namespaces.upgrade();
        if existing.is_none() {
            self.hidden.clear();
        }
        let differs = |overlay: &Overlay| {
            self.hidden.get(&overlay.name).is_some_and(|known| *known != overlay.hidden)
        };
        // A mounted overlay shows something that this plan hides, or the reverse.
        if request.overlays.iter().any(differs) {
            return Err(Error::Unenforceable { field: FIELD });
        }
        let all_mounted =
            request.overlays.iter().all(|overlay| self.hidden.contains_key(&overlay.name));
        let namespaces = match existing {
            Some(existing) if all_mounted => existing,
            Some(existing) => run_init(init, &request, &existing.0).await.map(|_| existing)?,
            None => Arc::new(Namespaces(run_init(init, &request, &[]).await?)),
        };
        self.namespaces = Arc::downgrade(&namespaces);
        self.hidden
            .extend(request.overlays.into_iter().map(|overlay| (overlay.name, overlay.hidden)));
        Ok(namespaces)
    }
}

/// The overlays of a plan. `None` if it has none.
fn overlay_request(plan: &Plan) -> Result<Option<OverlayRequest>, Error> {
    let mut overlays = Vec::new();
    let mut targets = PathTrie::default();
    let mut directory = None;
    for mount in &plan.mounts {
        let (source, target, layer, kind) = match mount {
            Mount::Overlay { source, target, layer } => (source, target, layer, OverlayKind::Host),
            Mount::Transaction { source, target, layer } => {
                (source, target, layer, OverlayKind::Transaction)
            }
            Mount::Volume { source, target, layer, mode } => {
                (source, target, layer, volume_kind(*mode))
            }
            _ => continue,
        };
        let field = if matches!(kind, OverlayKind::Volume { .. }) { VOLUMES_FIELD } else { FIELD };
        let (Some(parent), Some(name)) =
            (layer.parent(), layer.file_name().and_then(|name| name.to_str()))
        else {
            return Err(Error::Unenforceable { field });
        };
        // The source of a volume is only a name until the plan is complete.
        if !source.is_absolute() || !source.is_dir() {
            return Err(Error::Unenforceable { field });
        }
        // The layers of a transaction are not the session's.
        if directory.replace(parent.to_owned()).is_some_and(|other| other != parent) {
            return Err(Error::Unenforceable { field });
        }
        let source = source.clone();
        let name = name.to_owned();
        if matches!(kind, OverlayKind::Volume { .. }) {
            // No policy hides anything in a volume.
            overlays.push(Overlay { source, name, hidden: Vec::new(), kind });
            continue;
        }
        // Two paths may be the same after their symbolic links were resolved.
        if let Some(first) = targets.insert(target, (overlays.len(), target)) {
            targets.insert(target, first);
            continue;
        }
        overlays.push(Overlay { source, name, hidden: Vec::new(), kind });
    }
    let Some(directory) = directory else { return Ok(None) };
    for mount in &plan.mounts {
        let Mount::Hidden { target: hidden, even_if_absent } = mount else { continue };
        for &(index, target) in targets.containing(hidden) {
            let overlay = &mut overlays[index];
            // A mask covers the path: a command must not be able to replace what is hidden.
            if overlay.kind == OverlayKind::Transaction {
                continue;
            }
            overlay.hidden.extend(hidden_path(&overlay.source, target, hidden, *even_if_absent)?);
        }
    }
    let Ids { uid, gid } = isolation::ids(plan)?;
    Ok(Some(OverlayRequest { directory, uid, gid, overlays }))
}

fn volume_kind(mode: VolumeMode) -> OverlayKind {
    let owner = if own_uid() == 0 { VOLUME_OWNER } else { own_uid() };
    OverlayKind::Volume { owner, is_copy: mode == VolumeMode::Copy }
}

/// A hidden path of an overlay, relative to its source. `None` if nothing is to be hidden there, or
/// the whole overlay: a mount covers it then.
fn hidden_path(
    source: &Path,
    target: &Path,
    hidden: &Path,
    even_if_absent: bool,
) -> Result<Option<PathBuf>, Error> {
    let shown =
        Mount::Bind { source: source.to_owned(), target: target.to_owned(), writable: false };
    let mut mounts = MountTable::default();
    mounts.add(&shown);
    let (MaskTarget::Directory(path) | MaskTarget::File(path)) =
        mounts.resolve(hidden, even_if_absent)?
    else {
        return Ok(None);
    };
    let relative =
        path.strip_prefix(target).ok().filter(|relative| !relative.as_os_str().is_empty());
    Ok(relative.map(Path::to_owned))
}

/// Where an overlay is mounted inside the session's namespaces.
pub(crate) fn mount_point(layer: &Path) -> PathBuf {
    let name = layer.file_name().unwrap_or_default();
    layer.parent().unwrap_or(layer).join(OVERLAY_MOUNTS_DIR).join(name)
}

/// Removes the layers of a probe. The kernel's `work/work` directories are removed first: they are
/// empty, but only root can list them.
pub(crate) fn remove_layers(layers: &Path) -> io::Result<()> {
    let Ok(entries) = fs::read_dir(layers) else { return Ok(()) };
    for layer in entries {
        let work = layer?.path().join("work/work");
        if work.exists() {
            fs::remove_dir(work)?;
        }
    }
    fs::remove_dir_all(layers)
}

/// Has a separate `codelia-init` mount the overlays, in these namespaces or in new ones. Returns
/// the new namespaces.
async fn run_init(
    init: &Path,
    request: &OverlayRequest,
    namespaces: &[OwnedFd],
) -> Result<Vec<OwnedFd>, Error> {
    let fds: Vec<_> = namespaces.iter().map(AsFd::as_fd).collect();
    init_binary::call(init, "--overlays", request, &fds).await.map_err(|error| match error {
        Error::InitFailed(failure) => Error::Overlay(failure),
        error => error,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use codelia_policy::Enforceable;
    use codelia_types::Mode;

    use super::*;
    use crate::probe;

    /// A plan with one overlay.
    fn plan(layers: &Path) -> Plan {
        let mut plan =
            probe::isolated_plan(Mode::Bwrap, Path::new("/init"), Enforceable::EVERYTHING, None)
                .unwrap();
        let (source, target) = ("/usr".into(), "/usr".into());
        plan.mounts.push(Mount::Overlay { source, target, layer: layers.join("usr") });
        plan
    }

    #[tokio::test]
    async fn hanging_mount_times_out_without_blocking_other_sessions() {
        let temp = tempfile::tempdir().unwrap();
        let [silent, pid_file, one, other] =
            ["silent", "pid", "one", "other"].map(|name| temp.path().join(name));
        let script = format!("#!/bin/sh\necho $$ > {}\nexec sleep 1000\n", pid_file.display());
        fs::write(&silent, script).unwrap();
        fs::set_permissions(&silent, fs::Permissions::from_mode(0o700)).unwrap();
        let overlays = Overlays::default();
        let (one, other) = (plan(&one), plan(&other));

        let mut stuck = Box::pin(overlays.mount(&silent, &one));
        let started = async {
            while fs::read_to_string(&pid_file).map_or(true, |pid| !pid.ends_with('\n')) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            result = &mut stuck => panic!("the mount ended: {result:?}"),
            () = started => {}
        }
        let result = overlays.mount(Path::new("/bin/true"), &other).await;
        assert!(matches!(result, Err(Error::InitExited | Error::Control(_))), "{result:?}");

        let result = stuck.await;
        assert!(matches!(result, Err(Error::InitTimeout)), "{result:?}");
        // No process is left.
        let pid = fs::read_to_string(&pid_file).unwrap();
        while Path::new("/proc").join(pid.trim()).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
