//! The overlays of sessions. One is mounted once for all sandboxes of its session that live, since two mounts of one layer
//! would not agree, in namespaces that nobody is in but the tools that start there. With the last sandbox they are gone.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use codelia_init::{Decoder, OVERLAY_PLACES, Overlay, Overlays as Wanted, Report, encode};
use codelia_policy::{Ids, Mount, Plan};
use codelia_sys::fd;

use crate::{
    Error,
    hidden::{self, Hidden},
    isolating,
};

/// The field of a policy that overlays are for.
const FIELD: &str = "policy.filesystem.overlay_paths";

/// The overlays that are mounted, by the directory of their layers.
#[derive(Debug, Default)]
pub(crate) struct Overlays(Mutex<HashMap<PathBuf, Mounted>>);

/// What is mounted for a session.
#[derive(Debug)]
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
    pub(crate) async fn hold(
        self: &Arc<Self>,
        init: &Path,
        plan: &Plan,
    ) -> Result<Option<Arc<Spaces>>, Error> {
        let Some(wanted) = wanted(plan)? else { return Ok(None) };
        let (overlays, init) = (self.clone(), init.to_owned());
        let mounting = tokio::task::spawn_blocking(move || overlays.mount(&init, wanted));
        mounting.await.map_err(|panic| Error::Control(panic.into()))?.map(Some)
    }

    /// One at a time: what one mounts the next one must know of.
    fn mount(&self, init: &Path, wanted: Wanted) -> Result<Arc<Spaces>, Error> {
        let mut mounted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        mounted.retain(|_, mounted| mounted.spaces.strong_count() > 0);
        let known = mounted.get(&wanted.directory);
        let there = known.and_then(|known| Some((known.spaces.upgrade()?, known.hidden.clone())));
        let (there, mut hidden) = there.map(|(spaces, hidden)| (Some(spaces), hidden)).unwrap_or_default();
        let disagrees = |one: &Overlay| hidden.get(&one.name).is_some_and(|known| *known != one.hidden);
        // Somebody moved in whose secrets a living overlay shows.
        if wanted.overlays.iter().any(disagrees) {
            return Err(Error::Unenforceable { field: FIELD });
        }
        let is_all = wanted.overlays.iter().all(|one| hidden.contains_key(&one.name));
        hidden.extend(wanted.overlays.iter().map(|one| (one.name.clone(), one.hidden.clone())));
        let spaces = match there {
            Some(there) if is_all => there,
            Some(there) => ask(init, &wanted, &there.0).map(|_| there)?,
            None => Arc::new(Spaces(ask(init, &wanted, &[])?)),
        };
        mounted.insert(wanted.directory, Mounted { spaces: Arc::downgrade(&spaces), hidden });
        Ok(spaces)
    }
}

/// What a plan wants.
fn wanted(plan: &Plan) -> Result<Option<Wanted>, Error> {
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
    let Ids { uid, gid } = isolating::ids(plan)?;
    Ok(Some(Wanted { directory, uid, gid, overlays }))
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
        let (Hidden::Directory(place) | Hidden::File(place)) = hidden::find(&shown, secret, *even_if_absent)?
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
    layer.parent().unwrap_or(layer).join(OVERLAY_PLACES).join(name)
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

/// Has `codelia-init` mount them; answers the namespaces.
fn ask(init: &Path, wanted: &Wanted, spaces: &[OwnedFd]) -> Result<Vec<OwnedFd>, Error> {
    let (here, there) = fd::socket_pair().map_err(io::Error::from)?;
    let mut child = Command::new(init)
        .arg("--overlays")
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(there))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|source| Error::InitStart { path: init.to_owned(), source })?;
    let answer = converse(&here, wanted, spaces);
    child.wait()?;
    answer
}

fn converse(socket: &OwnedFd, wanted: &Wanted, spaces: &[OwnedFd]) -> Result<Vec<OwnedFd>, Error> {
    let frame = encode(wanted)?;
    let fds: Vec<_> = spaces.iter().map(AsFd::as_fd).collect();
    let (mut rest, mut fds) = (frame.as_slice(), fds.as_slice());
    while !rest.is_empty() {
        let sent = fd::send(socket, rest, fds).map_err(io::Error::from)?;
        (rest, fds) = (&rest[sent..], &[]);
    }
    let (mut decoder, mut bytes, mut received) = (Decoder::default(), [0; 4096], Vec::new());
    loop {
        let count = fd::receive(socket, &mut bytes, &mut received).map_err(io::Error::from)?;
        decoder.push(&bytes[..count]);
        match decoder.next_message()? {
            Some(Report::Ready) => return Ok(received),
            Some(Report::Failed(failure)) => return Err(Error::Overlay(failure)),
            Some(Report::Launched | Report::Exited(_)) => return Err(Error::OutOfTurn),
            None if count == 0 => return Err(Error::InitEnded),
            None => {}
        }
    }
}
