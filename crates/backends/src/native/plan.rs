//! Which part of a plan is made once, in a zygote, and which for each sandbox.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use codelia_init::{FileIdentity, OwnMount, STAGING_DIR, Setup, Zygote, ZygoteMount};
use codelia_policy::{Ids, Mount, Plan, SANDBOX_IDS, VolumeMode};
use codelia_types::{Mode, NetworkMode, SessionId};

use crate::{
    Error,
    isolation::{self, MAX_TERMINALS},
    mounts::{overlay, view},
};

/// A zygote, and everything that makes it another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ZygoteSpec {
    /// First, because it decides most comparisons.
    pub(super) session: SessionId,
    pub(super) ids: Ids,
    pub(super) zygote: Zygote,
    /// Files of the host that its mounts show, which may be replaced while a zygote lives.
    sources: Vec<SourceIdentity>,
}

/// A file or directory of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SourceIdentity {
    file: FileIdentity,
    /// When it changed and how long it is, for a file that is copied.
    content: Option<(i64, i64, u64)>,
}

/// The zygote of a plan. A mount is made for each sandbox if it is a `/proc`, a terminal or a
/// tmpfs, or if it is above or below such a mount that comes earlier in the plan.
pub(super) fn zygote(plan: &Plan, setup: Setup) -> Result<ZygoteSpec, Error> {
    let mut split = Split::default();
    for (index, mount) in plan.mounts.iter().enumerate() {
        split.add(mount, &plan.mounts[index + 1..])?;
    }
    let zygote = Zygote {
        hostname: plan.hostname.clone(),
        uid: SANDBOX_IDS.uid,
        gid: SANDBOX_IDS.gid,
        // For a proxy, init creates the network.
        has_networks: plan.network == NetworkMode::None,
        mounts: split.shared,
        own_mounts: split.own,
        setup,
    };
    Ok(ZygoteSpec {
        session: plan.session,
        ids: isolation::ids(plan)?,
        zygote,
        sources: split.sources,
    })
}

#[derive(Default)]
struct Split {
    shared: Vec<ZygoteMount>,
    own: Vec<OwnMount>,
    /// The mount points of `own`.
    own_targets: Vec<PathBuf>,
    sources: Vec<SourceIdentity>,
}

impl Split {
    fn add(&mut self, mount: &Mount, later: &[Mount]) -> Result<(), Error> {
        let place = mount.target().to_owned();
        // Nothing can be mounted over the root of a process.
        if place == Path::new("/") {
            return Err(Error::Unenforceable { field: "mounts" });
        }
        let overlaps =
            self.own_targets.iter().any(|own| place.starts_with(own) || own.starts_with(&place));
        match mount {
            Mount::Proc => self.add_own(OwnMount::Proc, place),
            Mount::Tmpfs { size_bytes, .. } => {
                let tmpfs = OwnMount::Tmpfs { target: place.clone(), size_bytes: *size_bytes };
                self.add_own(tmpfs, place);
            }
            Mount::Dev | Mount::Runtime { .. } if overlaps => {
                return Err(Error::Unenforceable { field: "mounts" });
            }
            Mount::Dev => {
                let devices = view::DEVICES.map(str::to_owned).to_vec();
                self.shared.push(ZygoteMount::Dev { devices });
                self.add_own(OwnMount::Terminals { max: MAX_TERMINALS }, place.join("pts"));
            }
            Mount::Symlink { to, .. } if overlaps => {
                self.add_own(OwnMount::Symlink { target: place.clone(), to: to.clone() }, place);
            }
            Mount::Symlink { to, .. } => {
                self.shared.push(ZygoteMount::Symlink { target: place, to: to.clone() });
            }
            // codelia-init masks them, for each sandbox.
            Mount::Hidden { .. } => {}
            _ if overlaps => {
                let staged = Path::new(STAGING_DIR).join(format!("own-{}", self.own.len()));
                self.add_shared(mount, staged.clone(), later)?;
                self.add_own(OwnMount::Staged { staged, target: place.clone() }, place);
            }
            _ => self.add_shared(mount, place, later)?,
        }
        Ok(())
    }

    fn add_own(&mut self, mount: OwnMount, target: PathBuf) {
        self.own.push(mount);
        self.own_targets.push(target);
    }

    fn add_shared(&mut self, mount: &Mount, target: PathBuf, later: &[Mount]) -> Result<(), Error> {
        let one = match mount {
            Mount::Bind { source, writable, .. } => {
                self.add_source(&metadata(source)?, false);
                ZygoteMount::Bind { source: source.clone(), target, writable: *writable }
            }
            // A copy of a file that everyone may read is faster than a mount, and no inode is
            // shared.
            Mount::Runtime { path } => {
                let metadata = metadata(path)?;
                let is_copied = metadata.is_file() && view::is_readable(&metadata);
                self.add_source(&metadata, is_copied);
                let source = path.clone();
                if metadata.is_dir() && !view::is_covered(path, later) {
                    ZygoteMount::Runtime { path: source }
                } else if is_copied {
                    ZygoteMount::Copy { source, target }
                } else {
                    ZygoteMount::Bind { source, target, writable: false }
                }
            }
            Mount::Overlay { layer, .. } | Mount::Transaction { layer, .. } => {
                ZygoteMount::Bind { source: overlay::mount_point(layer), target, writable: true }
            }
            Mount::Volume { layer, mode, .. } => {
                let writable = *mode != VolumeMode::ReadOnly;
                ZygoteMount::Bind { source: overlay::mount_point(layer), target, writable }
            }
            Mount::File { text, .. } => ZygoteMount::File { target, text: text.clone() },
            Mount::Tmpfs { .. }
            | Mount::Proc
            | Mount::Dev
            | Mount::Symlink { .. }
            | Mount::Hidden { .. } => {
                return Ok(());
            }
        };
        self.shared.push(one);
        Ok(())
    }

    fn add_source(&mut self, metadata: &Metadata, is_copied: bool) {
        let content = is_copied.then(|| (metadata.ctime(), metadata.ctime_nsec(), metadata.len()));
        self.sources.push(SourceIdentity { file: metadata.into(), content });
    }
}

fn metadata(path: &Path) -> Result<Metadata, Error> {
    let failed = |error: io::Error| Error::Tool {
        mode: Mode::Native,
        message: format!("cannot open {}: {error}", path.display()),
    };
    fs::metadata(path).map_err(failed)
}
