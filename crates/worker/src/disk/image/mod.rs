//! Images: each session has an ext4 file system of its own, in the sparse file `images/ID`, mounted
//! on its directory.
//!
//! `images/ID` is locked while a worker mounts or unmounts it. Each worker that holds the session
//! also has a shared lock on `images/ID.users`; the last one unmounts it. A mount that a killed
//! worker left is used by the next holder, or removed with the session.

mod format;

use std::{
    collections::HashMap,
    fs::{self, DirBuilder, File},
    io::{self, ErrorKind},
    mem,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use codelia_policy::DiskLimits;
use codelia_sys::{
    Errno,
    loop_device::{LoopDevice, unmount},
};
use codelia_types::{DiskMechanism, DiskUsage, SessionId};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock, statvfs};
use uuid::Uuid;

use self::format::{Formatter, NEW, RESERVED_INODES};
use super::{
    missing::Missing,
    quota::{Quota, Target},
};
use crate::file_work::{if_exists, unless_exists};

const REMEDY: &str = "run the worker as root, with loop devices and Debian's `e2fsprogs`";
/// Starts the name of a directory in which a worker tries whether images work.
const TRIAL: &str = "trial-";
const TRIAL_LIMITS: DiskLimits = DiskLimits { bytes: 1 << 20, inodes: 64 };
/// Files and directories that are older were left by killed workers.
const LEFTOVER_AGE: Duration = Duration::from_secs(600);

/// Limits sessions by file systems of their own.
#[derive(Debug)]
pub(crate) struct Images {
    directory: PathBuf,
    formatter: Formatter,
    mounts: Mutex<Mounts>,
}

/// The images that this worker uses.
#[derive(Debug, Default)]
struct Mounts {
    held: HashMap<SessionId, Mount>,
    /// Of sessions that it gave up: [`Quota::close`] unmounts them.
    released: Vec<(SessionId, Mount)>,
}

#[derive(Debug)]
struct Mount {
    directory: PathBuf,
    limits: DiskLimits,
    /// The shared lock.
    users: File,
}

impl Images {
    /// Uses images below a session root, if making and mounting one works.
    pub(crate) fn new(root: &Path) -> Result<Self, Missing> {
        let directory = root.join("images");
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        created.and_then(|()| sweep(&directory)).map_err(missing)?;
        Self::check(&directory)?;
        Ok(Self {
            directory,
            formatter: Formatter::find().map_err(missing)?,
            mounts: Mutex::default(),
        })
    }

    /// Makes and mounts an image in a new directory in `parent`, and removes it.
    pub(super) fn check(parent: &Path) -> Result<(), Missing> {
        let directory = parent.join(format!("{TRIAL}{}", Uuid::new_v4()));
        let formatter = Formatter::find().map_err(missing)?;
        let attempt = || {
            DirBuilder::new().mode(0o700).create(&directory)?;
            let images = Self { directory: directory.clone(), formatter, mounts: Mutex::default() };
            let session = SessionId::generate();
            let target = directory.join("target");
            let opened = images.open(session, &target, TRIAL_LIMITS);
            opened.and(images.remove(session, &target))
        };
        let tried = attempt();
        let removed = fs::remove_dir_all(&directory);
        tried.map(drop).and(removed).map_err(missing)
    }

    fn image(&self, session: SessionId) -> PathBuf {
        self.directory.join(session.to_string())
    }

    fn users(&self, session: SessionId) -> PathBuf {
        self.directory.join(format!("{session}.users"))
    }

    /// Mounts an image on a directory, unless it is. A new image was never mounted.
    fn mount(&self, image: &Path, directory: &Path, is_new: bool) -> io::Result<()> {
        unless_exists(DirBuilder::new().mode(0o700).create(directory))?;
        if is_mount_point(directory)? {
            return Ok(());
        }
        // Not the descriptor with the lock: the device keeps this one open.
        let file = File::options().read(true).write(true).open(image)?;
        let attached =
            if is_new { None } else { LoopDevice::attached_to(&file).map_err(io::Error::other)? };
        let device = match attached {
            // Another mount namespace has it mounted: both then show one file system.
            Some(device) => device,
            None => {
                if !is_new {
                    self.formatter.check(image)?;
                }
                LoopDevice::attach(&file, image).map_err(io::Error::other)?
            }
        };
        device.mount_ext4(directory).map_err(io::Error::other)
    }

    /// Unmounts the image of a session unless another worker holds it. What is still open keeps it
    /// mounted, for the next holder.
    fn unmount(&self, session: SessionId, mount: &Mount) -> io::Result<()> {
        let Some(_lock) = locked(&self.image(session))? else { return Ok(()) };
        match flock(&mount.users, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_mount_point(&mount.directory)? => {
                unmount(&mount.directory).map_err(io::Error::other)
            }
            Ok(()) | Err(Errno::WOULDBLOCK) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Quota for Images {
    fn mechanism(&self) -> DiskMechanism {
        DiskMechanism::Image
    }

    /// A session that existed before images were chosen has none.
    fn covers(&self, target: &Target) -> bool {
        self.mounts.lock().held.contains_key(&target.session)
    }

    /// The size of an image never changes.
    fn limits_runs(&self) -> bool {
        false
    }

    fn set(&self, _target: &Target, _limits: DiskLimits) -> io::Result<()> {
        Ok(())
    }

    /// An image is slightly larger than the limits: what is beyond them does not count.
    fn usage(&self, target: &Target) -> io::Result<DiskUsage> {
        let found = statvfs(&target.directory)?;
        let bytes = found.f_blocks.saturating_sub(found.f_bfree).saturating_mul(found.f_frsize);
        let inodes = found.f_files.saturating_sub(found.f_ffree).saturating_sub(RESERVED_INODES);
        let limits = self.mounts.lock().held.get(&target.session).map(|mount| mount.limits);
        let limits = limits.unwrap_or(DiskLimits { bytes: u64::MAX, inodes: u64::MAX });
        Ok(DiskUsage { bytes: bytes.min(limits.bytes), inodes: inodes.min(limits.inodes) })
    }

    fn forget(&self, target: &Target) {
        let mut mounts = self.mounts.lock();
        if let Some(mount) = mounts.held.remove(&target.session) {
            mounts.released.push((target.session, mount));
        }
    }

    fn close(&self, all: bool) {
        let released = {
            let mut mounts = self.mounts.lock();
            let mut released = mem::take(&mut mounts.released);
            if all {
                released.extend(mounts.held.drain());
            }
            released
        };
        for (session, mount) in released {
            if let Err(error) = self.unmount(session, &mount) {
                tracing::warn!(%error, %session, "disk image stays mounted until its session is used again");
            }
        }
    }

    fn open(&self, session: SessionId, directory: &Path, limits: DiskLimits) -> io::Result<()> {
        let image = self.image(session);
        let is_new = !image.try_exists()?;
        if is_new {
            if directory.join("workspace").try_exists()? {
                return Ok(());
            }
            self.formatter.create(&self.directory, &image, limits)?;
        }
        let gone = || io::Error::new(ErrorKind::NotFound, "the disk image was removed meanwhile");
        let _lock = locked(&image)?.ok_or_else(gone)?;
        let users = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(self.users(session))?;
        flock(&users, FlockOperation::LockShared)?;
        self.mount(&image, directory, is_new)?;
        self.mounts
            .lock()
            .held
            .insert(session, Mount { directory: directory.to_owned(), limits, users });
        Ok(())
    }

    fn remove(&self, session: SessionId, directory: &Path) -> io::Result<u64> {
        self.mounts.lock().held.remove(&session);
        let image = self.image(session);
        let Some(lock) = locked(&image)? else { return Ok(0) };
        if directory.try_exists()? && is_mount_point(directory)? {
            unmount(directory).map_err(io::Error::other)?;
        }
        let bytes = lock.metadata()?.blocks() * 512;
        for path in [self.users(session), image] {
            if_exists(fs::remove_file(&path))?;
        }
        Ok(bytes)
    }
}

fn missing(error: io::Error) -> Missing {
    Missing::new(format!("cannot use a disk image: {error}"), REMEDY)
}

/// Removes what killed workers were making.
fn sweep(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let path = entry.path();
        let name = name.to_string_lossy();
        let is_old = || {
            Ok::<_, io::Error>(
                entry.metadata()?.modified()?.elapsed().is_ok_and(|age| age > LEFTOVER_AGE),
            )
        };
        if name.starts_with(NEW) && is_old()? {
            fs::remove_file(&path)?;
        } else if name.starts_with(TRIAL) && is_old()? {
            let target = path.join("target");
            if target.exists() && is_mount_point(&target)? {
                unmount(&target).map_err(io::Error::other)?;
            }
            fs::remove_dir_all(&path)?;
        }
    }
    Ok(())
}

/// Locks an image. `None` if there is none.
fn locked(image: &Path) -> io::Result<Option<File>> {
    let Some(file) = if_exists(File::open(image))? else { return Ok(None) };
    flock(&file, FlockOperation::LockExclusive)?;
    // Another worker may have removed it before.
    Ok((file.metadata()?.nlink() > 0).then_some(file))
}

/// Whether a file system is mounted on a directory.
fn is_mount_point(directory: &Path) -> io::Result<bool> {
    let parent = directory.parent().ok_or(ErrorKind::InvalidInput)?;
    Ok(fs::symlink_metadata(directory)?.dev() != fs::symlink_metadata(parent)?.dev())
}

#[cfg(test)]
mod tests;
