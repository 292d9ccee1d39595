//! `codelia-init --overlays`: mounts the overlays of a session outside any sandbox, in namespaces
//! that it creates or receives and hands back.

use std::{
    fs::{self, DirBuilder, Permissions},
    io::{self, Stdin},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
};

use codelia_init::{
    Failure, OVERLAY_MOUNTS_DIR, Overlay, OverlayKind, OverlayRequest, Report, Step,
};
use codelia_sys::{
    Errno, overlay,
    process::{self, SingleThread},
    resolve_beneath::open_directory,
};

use crate::{
    control::Control,
    failure::{at, at_io},
};

/// Serves one request.
pub(crate) fn serve(control: &mut Control<Stdin>) -> Result<(), Failure> {
    let process = SingleThread::claim().map_err(at(Step::ClaimSingleThread))?;
    let request: OverlayRequest = control.expect_message()?;
    let namespaces = enter_namespaces(control.take_descriptors(), &request.directory)?;
    request.overlays.iter().try_for_each(|overlay| mount(&process, &request, overlay))?;
    let namespaces: Vec<_> = namespaces.iter().map(AsFd::as_fd).collect();
    control.send(&Report::Ready, &namespaces)
}

/// Enters the received namespaces, or creates new ones.
fn enter_namespaces(received: Vec<OwnedFd>, directory: &Path) -> Result<Vec<OwnedFd>, Failure> {
    if !received.is_empty() {
        overlay::enter_namespaces(&received).map_err(at(Step::OverlayNamespaces))?;
        return Ok(received);
    }
    // Mode 0711: the session's user can reach a mounted overlay, but list nothing. Layers are 0700.
    make_directory(directory, 0o711).map_err(at_io(Step::OverlayLayers))?;
    let mounts = directory.join(OVERLAY_MOUNTS_DIR);
    make_directory(&mounts, 0o711).map_err(at_io(Step::OverlayLayers))?;
    overlay::unshare_mounts().map_err(at(Step::OverlayNamespaces))?;
    overlay::mount_tmpfs(&mounts).map_err(at(Step::OverlayNamespaces))?;
    overlay::open_namespaces().map_err(at(Step::OverlayNamespaces))
}

/// Mounts one overlay, unless it is mounted already.
fn mount(process: &SingleThread, request: &OverlayRequest, one: &Overlay) -> Result<(), Failure> {
    let mounts = request.directory.join(OVERLAY_MOUNTS_DIR);
    let target = mounts.join(&one.name);
    make_directory(&target, 0o700).map_err(at_io(Step::OverlayLayers))?;
    if overlay::is_mounted(&target).map_err(at(Step::OverlayMount))? {
        return Ok(());
    }
    let owner = match one.kind {
        OverlayKind::Volume { owner, is_copy: false } => {
            let source = open_directory(&one.source).map_err(at(Step::OverlayMount))?;
            return overlay::mount_volume(
                process,
                &source,
                &target,
                owner,
                (request.uid, request.gid),
            )
            .map_err(at(Step::OverlayIdmap));
        }
        OverlayKind::Volume { owner, is_copy: true } => owner,
        OverlayKind::Host | OverlayKind::Transaction => 0,
    };
    let layer = request.directory.join(&one.name);
    let upper = layer.join("upper");
    let work = layer.join("work");
    make_directory(&layer, 0o700).map_err(at_io(Step::OverlayLayers))?;
    make_directory(&work, 0o700).map_err(at_io(Step::OverlayLayers))?;
    let is_transaction = one.kind == OverlayKind::Transaction;
    if is_transaction {
        make_copy_of_directory(&upper, &one.source).map_err(at_io(Step::OverlayLayers))?;
    } else {
        make_session_directory(&upper, 0o755, request).map_err(at_io(Step::OverlayLayers))?;
    }
    let open = |path: &Path| open_directory(path).map_err(at(Step::OverlayMount));
    let source = open(&one.source)?;
    let upper = open(&upper)?;
    let work = open(&work)?;
    if is_transaction {
        return overlay::mount_overlay(&[&source], &upper, &work, &target, true)
            .map_err(at(Step::OverlayMount));
    }
    let hidden = mounts.join(format!("hidden {}", one.name));
    make_hidden_layer(&hidden, request, one).map_err(at_io(Step::OverlayHide))?;
    let hidden = open(&hidden)?;
    if process::own_uid() != 0 {
        return overlay::mount_overlay(&[&hidden, &source], &upper, &work, &target, false)
            .map_err(at(Step::OverlayMount));
    }
    // As root: below the overlay, files of the owner must belong to the session's user.
    let idmapped = mounts.join(format!("owned {}", one.name));
    make_directory(&idmapped, 0o700).map_err(at_io(Step::OverlayLayers))?;
    let lower =
        overlay::mount_idmapped(process, &source, &idmapped, owner, (request.uid, request.gid))
            .map_err(at(Step::OverlayIdmap))?;
    let mounted = overlay::mount_overlay(&[&hidden, &lower], &upper, &work, &target, false);
    overlay::detach(&idmapped).map_err(at(Step::OverlayIdmap))?;
    mounted.map_err(at(Step::OverlayMount))
}

/// Creates a layer with whiteouts for the hidden paths. Their parent directories get the modes that
/// they have in the source.
fn make_hidden_layer(layer: &Path, request: &OverlayRequest, one: &Overlay) -> io::Result<()> {
    make_session_directory(layer, 0o755, request)?;
    for hidden in &one.hidden {
        let mut parent = PathBuf::new();
        for component in hidden.parent().into_iter().flatten() {
            parent.push(component);
            let mode = fs::symlink_metadata(one.source.join(&parent))?.permissions().mode();
            make_session_directory(&layer.join(&parent), mode & 0o777, request)?;
        }
        match overlay::create_whiteout(&layer.join(hidden)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Creates a directory with exactly this mode. One that exists keeps its mode.
fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result.and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode))),
    }
}

/// Creates an empty directory with the mode and owner of another one.
fn make_copy_of_directory(path: &Path, other: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(other)?;
    make_directory(path, 0o700)?;
    if process::own_uid() == 0 {
        chown(path, Some(metadata.uid()), Some(metadata.gid()))?;
    }
    // Last: a change of the owner clears bits.
    fs::set_permissions(path, Permissions::from_mode(metadata.mode() & 0o7777))
}

/// Creates a directory of the session's user. One that exists keeps its owner and mode.
fn make_session_directory(path: &Path, mode: u32, request: &OverlayRequest) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    make_directory(path, mode)?;
    if process::own_uid() == 0 { chown(path, Some(request.uid), Some(request.gid)) } else { Ok(()) }
}
