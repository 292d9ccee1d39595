//! Finds the directories to watch. Each is opened from the top of the watch by its path, never
//! through a link, and watched by its descriptor, so what a command swaps meanwhile cannot lead
//! out.

use std::{
    ffi::{OsStr, OsString},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::Path,
};

use codelia_sys::{
    Errno,
    resolve_beneath::{Entry, open_directory_without_symlinks, proc_fd_path},
};
use codelia_types::Reason;
use rustix::fs::{
    Dir, FileType,
    inotify::{self, WatchFlags},
};

use super::{
    super::{error::FileError, workspace::Workspace},
    limiter::WatchPermit,
    tree::{Descriptor, Tree},
};

/// Levels of watched directories.
pub(super) const MAX_DEPTH: usize = 100;
/// The kernel's limit for a path.
const MAX_PATH: usize = 4095;
/// Entries that one scan reads.
const MAX_ENTRIES: usize = 200_000;

const CHANGES: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::EXCL_UNLINK);

/// Watches a directory by its descriptor. Call it as the session.
pub(super) fn watch(inotify: impl AsFd, directory: impl AsFd) -> Result<Descriptor, FileError> {
    // The link in `/proc` is the only one that is followed.
    match inotify::add_watch(inotify, proc_fd_path(directory), CHANGES) {
        // Not a full disk: the kernel has no watch left for this user.
        Err(Errno::NOSPC) => {
            tracing::warn!(
                "cannot watch a directory of a session; raise fs.inotify.max_user_watches"
            );
            Err(Reason::WatchLimit.into())
        }
        watched => Ok(watched?),
    }
}

/// The parts of a watch that a scan uses.
pub(super) struct Scan<'a> {
    pub(super) workspace: &'a Workspace,
    pub(super) inotify: &'a OwnedFd,
    /// The top of the watch and its path in the workspace.
    pub(super) top: &'a Entry,
    pub(super) top_path: &'a Path,
    pub(super) tree: &'a mut Tree,
    pub(super) permit: &'a mut WatchPermit,
}

impl Scan<'_> {
    /// Watches a directory that is or was at this place, and those in it. Reports each file that it
    /// finds there. Returns `false` if the directory is not there any more. Call it as the session.
    pub(super) fn add(
        &mut self,
        above: Descriptor,
        name: &OsStr,
        mut found: impl FnMut(&Path),
    ) -> Result<bool, FileError> {
        let mut is_there = false;
        let mut open = vec![(above, name.to_owned())];
        let mut entries = 0;
        while let Some((above, name)) = open.pop() {
            let Some(path) = self.tree.path(above).map(|above| above.join(&name)) else { continue };
            let Some((directory, is_new)) = self.watch_at(&path, above, &name)? else { continue };
            is_there = true;
            if is_new {
                let descriptor = directory.descriptor;
                let names = self.list(&directory.entry, &path, &mut entries, &mut found)?;
                open.extend(names.into_iter().map(|name| (descriptor, name)));
            }
        }
        Ok(is_there)
    }

    /// Watches all directories in the top. Call it as the session.
    pub(super) fn add_all(&mut self) -> Result<(), FileError> {
        let mut entries = 0;
        let names = self.list(self.top, Path::new(""), &mut entries, &mut |_| ())?;
        let top = self.tree.top();
        names.into_iter().try_for_each(|name| self.add(top, &name, |_| ()).map(drop))
    }

    /// Watches the directory at this path; `None` if there is none to be watched. One that is
    /// watched already gets its place.
    fn watch_at(
        &mut self,
        path: &Path,
        above: Descriptor,
        name: &OsStr,
    ) -> Result<Option<(Watched, bool)>, FileError> {
        let is_too_deep = path.iter().count() > MAX_DEPTH || path.as_os_str().len() > MAX_PATH;
        if is_too_deep || !self.workspace.may_see(&self.top_path.join(path)) {
            return Ok(None);
        }
        let opened = open_directory_without_symlinks(self.top, path).and_then(Entry::from_fd);
        let Some(entry) = existing(opened)? else { return Ok(None) };
        let descriptor = match watch(self.inotify, &entry) {
            Err(error) if matches!(error.reason, Reason::FilePermission | Reason::FileNotFound) => {
                return Ok(None);
            }
            watched => watched?,
        };
        let is_new = !self.tree.contains(descriptor);
        self.tree.place(descriptor, above, name);
        if is_new && !self.permit.try_set_directories(self.tree.len()) {
            return Err(Reason::WatchLimit.into());
        }
        Ok(Some((Watched { descriptor, entry }, is_new)))
    }

    /// Reports the files in a directory. Returns the names of those that may be directories.
    fn list(
        &self,
        directory: &Entry,
        path: &Path,
        entries: &mut usize,
        found: &mut impl FnMut(&Path),
    ) -> Result<Vec<OsString>, FileError> {
        let mut directories = Vec::new();
        let Some(file) = existing(directory.open())? else { return Ok(directories) };
        for entry in Dir::new(file)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            *entries += 1;
            if *entries > MAX_ENTRIES {
                return Err(Reason::WatchLimit.into());
            }
            found(&path.join(name));
            // Some file systems do not say what an entry is.
            if matches!(entry.file_type(), FileType::Directory | FileType::Unknown) {
                directories.push(OsString::from_vec(name.as_bytes().to_vec()));
            }
        }
        Ok(directories)
    }
}

/// A directory that is watched.
struct Watched {
    descriptor: Descriptor,
    entry: Entry,
}

/// The opened value; `None` if it is gone, a link or a file by now, or not readable for the
/// session's user.
fn existing<T>(opened: Result<T, Errno>) -> Result<Option<T>, FileError> {
    match opened {
        Err(
            Errno::NOENT
            | Errno::NOTDIR
            | Errno::LOOP
            | Errno::XDEV
            | Errno::ACCESS
            | Errno::NAMETOOLONG,
        ) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}
