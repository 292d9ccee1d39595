//! One watch: reads the events of inotify and keeps the watched directories up to date. Methods
//! without `async` block.

use std::{
    ffi::{OsStr, OsString},
    io,
    mem::{MaybeUninit, take},
    os::{fd::OwnedFd, unix::ffi::OsStringExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_policy::FileAccess;
use codelia_proto::v1::{self, FileEventKind as Kind};
use codelia_sys::{
    Errno,
    resolve_beneath::{Entry, FinalSymlink},
};
use codelia_types::Reason;
use rustix::fs::{
    FileType, fstat,
    inotify::{self, CreateFlags, ReadFlags, Reader},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::{
    super::{error::FileError, workspace::Workspace},
    batch::Batch,
    limiter::WatchPermit,
    scan::{self, MAX_DEPTH, Scan},
    tree::{Descriptor, Tree},
};

/// Bytes of events that are read at once.
const BUFFER: usize = 16 * 1024;
/// Events that are read before a pause, and those in the buffer.
const MAX_EVENTS: usize = 1_024;
/// How long to wait at least before all directories are looked for again.
const MIN_SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// Looking for all directories takes at most one in this many parts of the time.
const SCAN_FACTOR: u32 = 10;

/// A directory that is being watched.
#[derive(Debug)]
pub(in super::super) struct Watcher {
    workspace: Arc<Workspace>,
    inotify: Arc<AsyncFd<OwnedFd>>,
    /// The directory, and its path in the workspace.
    top: Entry,
    top_path: PathBuf,
    is_recursive: bool,
    tree: Tree,
    permit: WatchPermit,
    batch: Batch,
    /// The first half of a move.
    moved: Option<Moved>,
    /// Whether the kernel may have more events.
    has_more: bool,
    /// Whether events are missing, so that directories may be, too.
    must_scan: bool,
    scan_at: Instant,
}

/// A file that was moved from a watched directory.
#[derive(Debug)]
struct Moved {
    cookie: u32,
    directory: Descriptor,
    name: OsString,
    path: PathBuf,
    is_directory: bool,
}

/// An event about a name in a watched directory.
#[derive(Debug)]
struct Event {
    directory: Descriptor,
    flags: ReadFlags,
    cookie: u32,
    name: OsString,
}

impl Watcher {
    /// Begins to watch a directory.
    pub(in super::super) fn begin(
        mut workspace: Workspace,
        permit: WatchPermit,
        request: &v1::WatchFilesRequest,
    ) -> Result<Self, FileError> {
        let (top, top_path) = workspace.as_session(|| {
            let (target, entry) =
                workspace.find_entry(&request.path, FinalSymlink::Follow, FileAccess::Read)?;
            match entry.kind() {
                FileType::Directory => Ok((entry, target.path)),
                _ => Err(Reason::NotADirectory.into()),
            }
        })?;
        // A watch may last, and only reads: transactional runs need not wait for it.
        workspace.leave();
        let inotify = new_inotify()?;
        let tree =
            Tree::new(workspace.as_session(|| scan::watch(inotify.get_ref(), &top))?, MAX_DEPTH);
        let mut watcher = Self {
            workspace: Arc::new(workspace),
            inotify,
            top,
            top_path,
            is_recursive: request.recursive,
            tree,
            permit,
            batch: Batch::default(),
            moved: None,
            has_more: false,
            must_scan: false,
            scan_at: Instant::now(),
        };
        if !watcher.permit.try_set_directories(1) {
            return Err(Reason::WatchLimit.into());
        }
        if watcher.is_recursive {
            watcher.clone_workspace().as_session(|| watcher.scan().add_all())?;
        }
        Ok(watcher)
    }

    /// Whether there is work that no event announces.
    pub(super) fn has_more(&self) -> bool {
        self.has_more || self.moved.is_some()
    }

    /// Waits until there are events.
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.inotify.readable().await.map(|mut ready| ready.clear_ready())
    }

    /// Checks that the watch may continue, and reads what has happened.
    pub(super) fn work(&mut self) -> Result<Vec<v1::WatchFilesResponse>, FileError> {
        let workspace = self.clone_workspace();
        workspace.check_held()?;
        workspace.as_session(|| {
            // The second half of a move is in the queue at once, if there is one.
            let waited = self.moved.as_ref().map(|moved| moved.cookie);
            self.read()?;
            if waited.is_some() && self.moved.as_ref().map(|moved| moved.cookie) == waited {
                self.end_move();
            }
            self.scan_again()
        })?;
        self.check_place()?;
        Ok(take(&mut self.batch).into_messages())
    }

    fn clone_workspace(&self) -> Arc<Workspace> {
        self.workspace.clone()
    }

    /// Fails if the directory is not at its path any more.
    fn check_place(&self) -> Result<(), FileError> {
        let found = match self.workspace.open_directory(&self.top_path) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {
                return Err(Reason::FileChanged.into());
            }
            Err(_) => return Ok(()),
            Ok(found) => fstat(found)?,
        };
        let top = &self.top.stat;
        if (found.st_dev, found.st_ino) == (top.st_dev, top.st_ino) {
            Ok(())
        } else {
            Err(Reason::FileChanged.into())
        }
    }

    fn read(&mut self) -> Result<(), FileError> {
        let inotify = self.inotify.clone();
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(inotify.get_ref(), &mut buffer);
        let mut count = 0;
        self.has_more = true;
        // Events in the buffer would be lost.
        while count < MAX_EVENTS || !reader.is_buffer_empty() {
            match reader.next() {
                Ok(event) => {
                    count += 1;
                    let name = event.file_name().map(|name| name.to_bytes()).unwrap_or_default();
                    let event = Event {
                        directory: event.wd(),
                        flags: event.events(),
                        cookie: event.cookie(),
                        name: OsString::from_vec(name.to_vec()),
                    };
                    self.handle(event)?;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.has_more = false;
                    return Ok(());
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), FileError> {
        if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.end_move();
            self.must_scan = true;
            return Ok(());
        }
        if event.directory == self.tree.top()
            && event
                .flags
                .intersects(ReadFlags::MOVE_SELF | ReadFlags::IGNORED | ReadFlags::UNMOUNT)
        {
            return Err(Reason::FileChanged.into());
        }
        if event.flags.contains(ReadFlags::IGNORED) {
            self.forget(event.directory);
            return Ok(());
        }
        // Events about a directory itself have no name; the one above it reports them.
        match self.tree.path(event.directory) {
            Some(above) if !event.name.is_empty() => {
                let path = above.join(&event.name);
                self.handle_named(event, path)
            }
            _ => Ok(()),
        }
    }

    fn handle_named(&mut self, event: Event, path: PathBuf) -> Result<(), FileError> {
        let is_directory = event.flags.contains(ReadFlags::ISDIR);
        let moved = self.moved.take_if(|moved| {
            event.flags.contains(ReadFlags::MOVED_TO) && moved.cookie == event.cookie
        });
        if let Some(moved) = moved {
            return self.rename(&moved, &event, &path);
        }
        self.end_move();
        if event.flags.contains(ReadFlags::MOVED_FROM) {
            let Event { cookie, directory, name, .. } = event;
            self.moved = Some(Moved { cookie, directory, name, path, is_directory });
        } else if event.flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            self.report(Kind::Created, &path);
            if is_directory {
                self.add_directory(event.directory, &event.name)?;
            }
        } else if event.flags.contains(ReadFlags::DELETE) {
            self.report(Kind::Removed, &path);
            if is_directory {
                self.remove_directory(event.directory, &event.name);
            }
        } else if event.flags.intersects(ReadFlags::MODIFY | ReadFlags::ATTRIB) {
            self.report(Kind::Modified, &path);
        }
        Ok(())
    }

    /// Reports a move within the watched directories.
    fn rename(&mut self, from: &Moved, event: &Event, path: &Path) -> Result<(), FileError> {
        match (self.may_see(&from.path), self.may_see(path)) {
            (true, true) => {
                self.batch.add_renamed(&self.top_path.join(&from.path), &self.top_path.join(path));
            }
            (true, false) => self.report(Kind::Removed, &from.path),
            (false, _) => self.report(Kind::Created, path),
        }
        if !from.is_directory || self.add_directory(event.directory, &event.name)? {
            return Ok(());
        }
        // The directory has been moved again, which a later event says.
        if let Some(known) = self.tree.child(from.directory, &from.name) {
            self.tree.place(known, event.directory, &event.name);
        }
        Ok(())
    }

    /// Reports a move whose second half is not in the watched directories.
    fn end_move(&mut self) {
        if let Some(moved) = self.moved.take() {
            self.report(Kind::Removed, &moved.path);
            if moved.is_directory {
                self.remove_directory(moved.directory, &moved.name);
            }
        }
    }

    /// Watches a directory that has appeared. What was created in it before is reported. Returns
    /// whether it is there.
    fn add_directory(&mut self, above: Descriptor, name: &OsStr) -> Result<bool, FileError> {
        if !self.is_recursive {
            return Ok(true);
        }
        let workspace = self.clone_workspace();
        let top_path = self.top_path.clone();
        let mut batch = take(&mut self.batch);
        let added = self.scan().add(above, name, |path| {
            let path = top_path.join(path);
            if workspace.may_see(&path) {
                batch.add(Kind::Created, &path);
            }
        });
        self.batch = batch;
        added
    }

    fn remove_directory(&mut self, above: Descriptor, name: &OsStr) {
        if let Some(directory) = self.tree.child(above, name) {
            self.forget(directory);
        }
    }

    /// Ends the watches of a directory and of those in it.
    fn forget(&mut self, directory: Descriptor) {
        for removed in self.tree.remove(directory) {
            // Fails if the kernel has removed it already.
            let _ = inotify::remove_watch(self.inotify.get_ref(), removed);
        }
        // Fewer are always allowed.
        self.permit.try_set_directories(self.tree.len());
    }

    /// After lost events, watches all directories again, with a new queue.
    fn scan_again(&mut self) -> Result<(), FileError> {
        if !self.must_scan || (self.is_recursive && Instant::now() < self.scan_at) {
            return Ok(());
        }
        if self.is_recursive {
            let begun = Instant::now();
            self.inotify = new_inotify()?;
            self.tree = Tree::new(scan::watch(self.inotify.get_ref(), &self.top)?, MAX_DEPTH);
            self.moved = None;
            self.has_more = true;
            self.scan().add_all()?;
            self.permit.try_set_directories(self.tree.len());
            let pause = (begun.elapsed() * SCAN_FACTOR).max(MIN_SCAN_INTERVAL);
            self.scan_at = Instant::now() + pause;
        }
        self.must_scan = false;
        self.batch.lose();
        Ok(())
    }

    fn scan(&mut self) -> Scan<'_> {
        Scan {
            workspace: &self.workspace,
            inotify: self.inotify.get_ref(),
            top: &self.top,
            top_path: &self.top_path,
            tree: &mut self.tree,
            permit: &mut self.permit,
        }
    }

    fn report(&mut self, kind: Kind, path: &Path) {
        if self.may_see(path) {
            self.batch.add(kind, &self.top_path.join(path));
        }
    }

    fn may_see(&self, path: &Path) -> bool {
        self.workspace.may_see(&self.top_path.join(path))
    }
}

/// The deprecation is about types whose descriptor may change; this one keeps its own.
#[allow(deprecated)]
fn new_inotify() -> Result<Arc<AsyncFd<OwnedFd>>, FileError> {
    let inotify = match inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK) {
        Err(Errno::MFILE) => {
            tracing::warn!("cannot watch files of a session; raise fs.inotify.max_user_instances");
            return Err(Reason::WatchLimit.into());
        }
        inotify => inotify?,
    };
    let inotify =
        AsyncFd::try_with_interest(inotify, Interest::READABLE).map_err(io::Error::from)?;
    Ok(Arc::new(inotify))
}
