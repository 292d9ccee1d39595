//! The overlays of sessions. One is mounted once for all sandboxes of its session that live, since two mounts of one layer
//! would not agree, in namespaces that nobody is in but the tools that start there. With the last sandbox they are gone.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use codelia_init::{OVERLAY_MOUNTS_DIR, Overlay, OverlayRequest, Report};
use codelia_policy::{Ids, Mount, Plan};
use tokio::{sync::Mutex as AsyncMutex, time::timeout};

use crate::{
    Error, init,
    sandbox::control::Control,
    tool::mask::{self, Hidden},
    tool::tool_backend,
};

/// The field of a policy that overlays are for.
const FIELD: &str = "policy.filesystem.overlay_paths";

/// How long `codelia-init` may take to mount them: a directory may be on a file system that does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The overlays that are mounted, by the directory of their layers.
#[derive(Debug, Default)]
pub(crate) struct Overlays(Mutex<HashMap<PathBuf, Arc<AsyncMutex<Mounted>>>>);

/// What is mounted for a session.
#[derive(Debug, Default)]
struct Mounted {
    spaces: Weak<Spaces>,
    /// What is left out of each, by its name.
    hidden: BTreeMap<String, Vec<PathBuf>>,
}

/// The namespaces in which the overlays of a session are, as long as somebody holds them.
#[derive(Debug)]
pub(crate) struct Spaces(Vec<OwnedFd>);

impl Spaces {
    /// For a process that starts in them.
    pub(crate) fn copies(&self) -> io::Result<Vec<OwnedFd>> {
        self.0.iter().map(OwnedFd::try_clone).collect()
    }
}

impl Overlays {
    /// Mounts what the plan wants and is not mounted; `None` if it wants none.
    pub(crate) async fn hold(&self, init: &Path, plan: &Plan) -> Result<Option<Arc<Spaces>>, Error> {
        let Some(wanted) = wanted(plan)? else { return Ok(None) };
        let session = self.session(&wanted.directory);
        // One at a time: what one mounts the next one must know of.
        let mounting = async { session.lock().await.mount(init, wanted).await };
        timeout(PATIENCE, mounting).await.map_err(|_| Error::Unresponsive)?.map(Some)
    }

    /// What is mounted for one; forgets those whose sandboxes are gone.
    fn session(&self, directory: &Path) -> Arc<AsyncMutex<Mounted>> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, one| one.try_lock().map_or(true, |mounted| mounted.spaces.strong_count() > 0));
        sessions.entry(directory.to_owned()).or_default().clone()
    }
}

impl Mounted {
    async fn mount(&mut self, init: &Path, wanted: OverlayRequest) -> Result<Arc<Spaces>, Error> {
        let there = self.spaces.upgrade();
        if there.is_none() {
            self.hidden.clear();
        }
        let disagrees = |one: &Overlay| self.hidden.get(&one.name).is_some_and(|known| *known != one.hidden);
        // Somebody moved in whose secrets a living overlay shows.
        if wanted.overlays.iter().any(disagrees) {
            return Err(Error::Unenforceable { field: FIELD });
        }
        let is_all = wanted.overlays.iter().all(|one| self.hidden.contains_key(&one.name));
        let spaces = match there {
            Some(there) if is_all => there,
            Some(there) => ask(init, &wanted, &there.0).await.map(|_| there)?,
            None => Arc::new(Spaces(ask(init, &wanted, &[]).await?)),
        };
        self.spaces = Arc::downgrade(&spaces);
        self.hidden.extend(wanted.overlays.into_iter().map(|one| (one.name, one.hidden)));
        Ok(spaces)
    }
}

/// What a plan wants.
fn wanted(plan: &Plan) -> Result<Option<OverlayRequest>, Error> {
    let mut overlays = Vec::new();
    let mut directory = None;
    for mount in &plan.mounts {
        let Mount::Overlay { source, target, layer } = mount else { continue };
        let (Some(above), Some(name)) = (layer.parent(), layer.file_name().and_then(|name| name.to_str()))
        else {
            return Err(Error::Unenforceable { field: FIELD });
        };
        if !source.is_dir() {
            return Err(Error::Unenforceable { field: FIELD });
        }
        directory = Some(above.to_owned());
        let hidden = left_out(plan, source, target)?;
        overlays.push(Overlay { source: source.clone(), name: name.to_owned(), hidden });
    }
    let Some(directory) = directory else { return Ok(None) };
    let Ids { uid, gid } = tool_backend::ids(plan)?;
    Ok(Some(OverlayRequest { directory, uid, gid, overlays }))
}

/// What the plan hides in an overlay, from its source on.
fn left_out(plan: &Plan, source: &Path, target: &Path) -> Result<Vec<PathBuf>, Error> {
    let shown = [Mount::Bind { source: source.to_owned(), target: target.to_owned(), writable: false }];
    let mut found = Vec::new();
    for mount in &plan.mounts {
        let Mount::Hidden { target: secret, even_if_absent } = mount else { continue };
        if !secret.starts_with(target) {
            continue;
        }
        let (Hidden::Directory(place) | Hidden::File(place)) = mask::find(&shown, secret, *even_if_absent)?
        else {
            continue;
        };
        // The whole of it is covered by a mount.
        if let Ok(below) = place.strip_prefix(target)
            && !below.as_os_str().is_empty()
        {
            found.push(below.to_owned());
        }
    }
    Ok(found)
}

/// Where an overlay is mounted, for those that start in its namespaces.
pub(crate) fn place(layer: &Path) -> PathBuf {
    let name = layer.file_name().unwrap_or_default();
    layer.parent().unwrap_or(layer).join(OVERLAY_MOUNTS_DIR).join(name)
}

/// Removes the layers of a probe. Of what the kernel made for itself there not everybody may look into.
pub(crate) fn remove(layers: &Path) -> io::Result<()> {
    let Ok(found) = fs::read_dir(layers) else { return Ok(()) };
    for layer in found {
        let work = layer?.path().join("work/work");
        if work.exists() {
            fs::remove_dir(work)?;
        }
    }
    fs::remove_dir_all(layers)
}

/// Has `codelia-init` mount them; answers the namespaces. It ends with this.
async fn ask(init: &Path, wanted: &OverlayRequest, spaces: &[OwnedFd]) -> Result<Vec<OwnedFd>, Error> {
    let (mut control, there) = Control::pair()?;
    let mut process = init::start(init, &["--overlays"], there)?;
    let fds: Vec<_> = spaces.iter().map(AsFd::as_fd).collect();
    let sent = control.send(wanted, &fds).await;
    // Who does not listen may have said why.
    let report = control.receive().await?;
    process.ended().await?;
    match report {
        Some(Report::Ready) => Ok(control.take_descriptors()),
        Some(Report::Failed(failure)) => Err(Error::Overlay(failure)),
        Some(Report::Launched | Report::Exited(_)) => Err(Error::OutOfTurn),
        None => sent.and(Err(Error::InitEnded)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use codelia_policy::Enforceable;
    use codelia_types::Mode;

    use super::*;
    use crate::probe;

    /// A plan with an overlay whose layer is there.
    fn plan(layers: &Path) -> Plan {
        let mut plan = probe::isolated(Mode::Bwrap, Enforceable::EVERYTHING, None).unwrap();
        let (source, target) = ("/usr".into(), "/usr".into());
        plan.mounts.push(Mount::Overlay { source, target, layer: layers.join("usr") });
        plan
    }

    #[tokio::test]
    async fn a_session_whose_overlays_do_not_come_is_refused_in_time_holds_up_no_other_and_leaves_no_process()
    {
        let temp = tempfile::tempdir().unwrap();
        let [silent, alive, one, other] =
            ["silent", "alive", "one", "other"].map(|name| temp.path().join(name));
        fs::write(&silent, format!("#!/bin/sh\necho $$ > {}\nexec sleep 1000\n", alive.display())).unwrap();
        fs::set_permissions(&silent, fs::Permissions::from_mode(0o700)).unwrap();
        let overlays = Overlays::default();
        let (one, other) = (plan(&one), plan(&other));

        let mut stuck = Box::pin(overlays.hold(&silent, &one));
        let started = async {
            while fs::read_to_string(&alive).map_or(true, |pid| !pid.ends_with('\n')) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            done = &mut stuck => panic!("it does not end: {done:?}"),
            () = started => {}
        }
        let answer = overlays.hold(Path::new("/bin/true"), &other).await;
        assert!(matches!(answer, Err(Error::InitEnded | Error::Control(_))), "{answer:?}");

        let answer = stuck.await;
        assert!(matches!(answer, Err(Error::Unresponsive)), "{answer:?}");
        let pid = fs::read_to_string(&alive).unwrap();
        while Path::new("/proc").join(pid.trim()).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
