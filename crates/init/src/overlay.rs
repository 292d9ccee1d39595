//! OverlayRequest of a session: mounted by this program outside of any sandbox, in namespaces that it makes or is given,
//! and that it hands out before it ends.

use std::{
    fs::{self, DirBuilder, Permissions},
    io::{self, Stdin},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, PermissionsExt, chown},
    },
    path::Path,
};

use codelia_init::{Failure, OVERLAY_MOUNTS_DIR, Overlay, OverlayRequest, Report, Step};
use codelia_sys::{
    Errno, overlay,
    process::{self, SingleThread},
};

use crate::{control::Control, setup::at};

/// Serves one request.
pub(crate) fn serve(control: &mut Control<Stdin>) -> Result<(), Failure> {
    let process = SingleThread::claim().map_err(at(Step::Claim))?;
    let Some(overlays) = control.receive_message::<OverlayRequest>()? else {
        return Err(Failure::new(Step::Understand, Errno::PROTO));
    };
    let spaces = enter(control.take_descriptors(), &overlays.directory)?;
    overlays.overlays.iter().try_for_each(|one| add(&process, &overlays, one))?;
    let spaces: Vec<_> = spaces.iter().map(AsFd::as_fd).collect();
    control.send(&Report::Ready, &spaces)
}

/// Enters the namespaces that came, or new ones.
fn enter(spaces: Vec<OwnedFd>, directory: &Path) -> Result<Vec<OwnedFd>, Failure> {
    if !spaces.is_empty() {
        overlay::enter(&spaces).map_err(at(Step::OverlaySpace))?;
        return Ok(spaces);
    }
    // Passed through by who may see a mounted overlay; layers are ours alone.
    make_directory(directory, 0o711).map_err(failed(Step::OverlayLayer))?;
    let places = directory.join(OVERLAY_MOUNTS_DIR);
    make_directory(&places, 0o711).map_err(failed(Step::OverlayLayer))?;
    overlay::separate().map_err(at(Step::OverlaySpace))?;
    overlay::mount_memory(&places).map_err(at(Step::OverlaySpace))?;
    overlay::spaces().map_err(at(Step::OverlaySpace))
}

/// Mounts one, unless it is there.
fn add(process: &SingleThread, all: &OverlayRequest, one: &Overlay) -> Result<(), Failure> {
    let places = all.directory.join(OVERLAY_MOUNTS_DIR);
    let place = places.join(&one.name);
    make_directory(&place, 0o700).map_err(failed(Step::OverlayLayer))?;
    if overlay::is_mounted(&place).map_err(at(Step::OverlayMount))? {
        return Ok(());
    }
    let layer = all.directory.join(&one.name);
    let (upper, work) = (layer.join("upper"), layer.join("work"));
    make_directory(&layer, 0o700).map_err(failed(Step::OverlayLayer))?;
    make_directory(&work, 0o700).map_err(failed(Step::OverlayLayer))?;
    give_directory(&upper, 0o755, all).map_err(failed(Step::OverlayLayer))?;
    let hidden = places.join(format!("hidden {}", one.name));
    hide(&hidden, all, one).map_err(failed(Step::OverlayHide))?;
    let source = overlay::directory(&one.source).map_err(at(Step::OverlayMount))?;
    let open = |path: &Path| overlay::directory(path).map_err(at(Step::OverlayMount));
    let (hidden, upper, work) = (open(&hidden)?, open(&upper)?, open(&work)?);
    if process::own_uid() != 0 {
        return overlay::mount_overlay(&source, &hidden, &upper, &work, &place)
            .map_err(at(Step::OverlayMount));
    }
    let owned = places.join(format!("owned {}", one.name));
    make_directory(&owned, 0o700).map_err(failed(Step::OverlayLayer))?;
    let lower =
        overlay::mount_owned(process, &source, &owned, all.uid, all.gid).map_err(at(Step::OverlayOwner))?;
    let mounted = overlay::mount_overlay(&lower, &hidden, &upper, &work, &place);
    overlay::detach(&owned).map_err(at(Step::OverlayOwner))?;
    mounted.map_err(at(Step::OverlayMount))
}

/// A layer in which what is hidden is left out, with directories on the way that look as they do in the source.
fn hide(layer: &Path, all: &OverlayRequest, one: &Overlay) -> io::Result<()> {
    give_directory(layer, 0o755, all)?;
    for hidden in &one.hidden {
        let mut way = std::path::PathBuf::new();
        for part in hidden.parent().into_iter().flatten() {
            way.push(part);
            let mode = fs::symlink_metadata(one.source.join(&way))?.permissions().mode();
            give_directory(&layer.join(&way), mode & 0o777, all)?;
        }
        match overlay::leave_out(&layer.join(hidden)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        answer => answer.and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode))),
    }
}

/// The same for the session's user. One that is there stays as its owner has it.
fn give_directory(path: &Path, mode: u32, all: &OverlayRequest) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    make_directory(path, mode)?;
    if process::own_uid() == 0 { chown(path, Some(all.uid), Some(all.gid)) } else { Ok(()) }
}

fn failed(step: Step) -> impl FnOnce(io::Error) -> Failure {
    move |error| Failure::new(step, Errno::from_io_error(&error).unwrap_or(Errno::IO))
}
