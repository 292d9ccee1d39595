//! Measures a directory of a session or a volume: what is allocated for its files.
//!
//! The tree is untrusted and changes meanwhile. A walk follows no link, stays on the device of the
//! directory, works in short slices, and needs little memory for each level: of a tree of any depth
//! it keeps the descriptors of the first levels, and returns to deeper ones through `..`.

use std::{
    collections::HashSet,
    ffi::{CStr, CString},
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use codelia_sys::{Pid, resolve_beneath::proc_fd_path};
use codelia_types::DiskUsage;
use rustix::{
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, RawDir, SeekFrom, Stat, chmod, fstat, openat, seek,
        statat,
    },
    io::Errno,
    path::Arg,
};

use super::open_files::OpenFiles;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Levels whose descriptors and names of subdirectories are kept.
const KEPT_LEVELS: usize = 64;
const BUFFER_BYTES: usize = 32 * 1024;
/// Holds at least one entry.
const SMALL_BUFFER_BYTES: usize = 1024;
/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// How often a measurement in one go looks whether it is to stop.
const STOP_INTERVAL: Duration = Duration::from_millis(10);

/// The state of a walk at the end of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// There is more.
    Unfinished,
    Done(Found),
}

/// The result of a walk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) usage: DiskUsage,
    /// The walk ended early, since it found more than it was to count. There is at least this much.
    pub(super) is_over: bool,
    /// A deep directory was moved away while the walk was in it: something may be missing.
    pub(super) is_disturbed: bool,
}

/// A walk through the directory of a session.
#[derive(Debug)]
pub(super) struct Walk {
    device: u64,
    levels: Vec<Level>,
    /// Inodes with several names, and those of unlinked files: each counts once.
    counted: HashSet<u64>,
    usage: DiskUsage,
    /// The walk ends when it has found more.
    max: DiskUsage,
    is_disturbed: bool,
    open_files: OpenFiles,
}

/// A directory that the walk is in.
#[derive(Debug)]
struct Level {
    /// `None` for a deep level while the walk is below it.
    directory: Option<OwnedFd>,
    inode: u64,
    /// Where to continue to read it; `None` at its end.
    next: Option<u64>,
    /// Subdirectories that were read and not visited yet.
    pending: Vec<CString>,
}

impl Walk {
    /// Begins at a directory. Files that only `processes` still have open count too. The walk ends
    /// early when it has found more than `max`.
    pub(super) fn begin(path: &Path, processes: Vec<Pid>, max: DiskUsage) -> io::Result<Self> {
        Self::begin_in(open(CWD, path)?, processes, max)
    }

    fn begin_in(directory: OwnedFd, processes: Vec<Pid>, max: DiskUsage) -> io::Result<Self> {
        let stat = fstat(&directory)?;
        let mut walk = Self {
            device: stat.st_dev,
            levels: Vec::new(),
            counted: HashSet::new(),
            usage: DiskUsage::default(),
            max,
            is_disturbed: false,
            open_files: OpenFiles::new(processes, stat.st_dev),
        };
        walk.count(&stat);
        walk.enter(directory, stat.st_ino);
        Ok(walk)
    }

    /// Continues until the walk ends or `until`.
    pub(super) fn advance(&mut self, until: Instant) -> io::Result<Progress> {
        while !self.levels.is_empty() {
            self.step()?;
            if self.is_over() {
                return Ok(self.done());
            }
            if Instant::now() >= until {
                return Ok(Progress::Unfinished);
            }
        }
        loop {
            let Some(found) = self.open_files.next_slice(until) else { return Ok(self.done()) };
            for stat in found {
                if self.counted.insert(stat.inode) {
                    self.add(stat.blocks);
                }
            }
            if self.is_over() {
                return Ok(self.done());
            }
            if Instant::now() >= until {
                return Ok(Progress::Unfinished);
            }
        }
    }

    fn done(&self) -> Progress {
        let usage = self.usage;
        let is_over = self.is_over();
        let is_disturbed = self.is_disturbed;
        Progress::Done(Found { usage, is_over, is_disturbed })
    }

    fn is_over(&self) -> bool {
        self.usage.bytes > self.max.bytes || self.usage.inodes > self.max.inodes
    }

    /// Visits the next subdirectory, reads the next entries, or leaves a directory.
    fn step(&mut self) -> io::Result<()> {
        let depth = self.levels.len();
        let Some(level) = self.levels.last_mut() else { return Ok(()) };
        let Some(directory) = &level.directory else { return Ok(()) };
        if let Some(name) = level.pending.pop() {
            match open_child(directory, &name)? {
                Child::Open(child, stat) if stat.st_dev == self.device => {
                    if depth > KEPT_LEVELS {
                        level.directory = None;
                    }
                    self.enter(child, stat.st_ino);
                }
                Child::Open(..) | Child::Absent => {}
                Child::Denied => self.is_disturbed = true,
            }
            return Ok(());
        }
        match level.next {
            Some(from) => self.read(from),
            None => self.leave(),
        }
    }

    fn enter(&mut self, directory: OwnedFd, inode: u64) {
        let next = Some(0);
        let pending = Vec::new();
        self.levels.push(Level { directory: Some(directory), inode, next, pending });
    }

    /// Reads entries from a position and counts them. Stops at a subdirectory in a deep level, so
    /// that no names are kept there.
    fn read(&mut self, from: u64) -> io::Result<()> {
        let is_deep = self.levels.len() > KEPT_LEVELS;
        let Some(mut level) = self.levels.pop() else { return Ok(()) };
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let buffer = if is_deep { &mut buffer[..SMALL_BUFFER_BYTES] } else { &mut buffer[..] };
        level.next = None;
        if let Some(directory) = &level.directory {
            let mut entries = match seek(directory, SeekFrom::Start(from)) {
                Ok(_) => RawDir::new(directory, buffer),
                // The position of a directory that was removed may be out of range.
                Err(errno) => return self.skip(level, errno),
            };
            while let Some(entry) = entries.next() {
                let entry = match entry {
                    Ok(entry) => entry,
                    Err(errno) => return self.skip(level, errno),
                };
                level.next = Some(entry.next_entry_cookie());
                if let Some(name) = self.visit(directory, entry.file_name()) {
                    level.pending.push(name);
                    if is_deep {
                        break;
                    }
                }
                if entries.is_buffer_empty() {
                    break;
                }
            }
        }
        self.levels.push(level);
        Ok(())
    }

    /// Leaves out the rest of a directory that cannot be read. Usually it was removed.
    fn skip(&mut self, mut level: Level, errno: Errno) -> io::Result<()> {
        if matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM) {
            return Err(errno.into());
        }
        let removed = |directory: &OwnedFd| fstat(directory).is_ok_and(|stat| stat.st_nlink == 0);
        self.is_disturbed |= !level.directory.as_ref().is_some_and(removed);
        level.next = None;
        self.levels.push(level);
        Ok(())
    }

    /// Counts an entry. Returns the name of a directory.
    fn visit(&mut self, directory: &OwnedFd, name: &CStr) -> Option<CString> {
        if matches!(name.to_bytes(), b"." | b"..") {
            return None;
        }
        let stat = searching(directory, || statat(directory, name, AtFlags::SYMLINK_NOFOLLOW));
        self.is_disturbed |= matches!(stat, Err(Errno::ACCESS));
        // A file that was removed or cannot be looked at counts nothing.
        let stat = stat.ok()?;
        if stat.st_dev != self.device {
            return None;
        }
        self.count(&stat);
        (FileType::from_raw_mode(stat.st_mode) == FileType::Directory).then(|| name.to_owned())
    }

    fn count(&mut self, stat: &Stat) {
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if is_directory || stat.st_nlink <= 1 || self.counted.insert(stat.st_ino) {
            self.add(u64::try_from(stat.st_blocks).unwrap_or_default());
        }
    }

    fn add(&mut self, blocks: u64) {
        self.usage.bytes = self.usage.bytes.saturating_add(blocks.saturating_mul(BLOCK_BYTES));
        self.usage.inodes += 1;
    }

    /// Returns to the directory above.
    fn leave(&mut self) -> io::Result<()> {
        let Some(left) = self.levels.pop() else { return Ok(()) };
        let Some(above) = self.levels.last_mut() else { return Ok(()) };
        if above.directory.is_some() {
            return Ok(());
        }
        let Some(directory) = left.directory else { return Ok(()) };
        if let Child::Open(parent, stat) = open_child(&directory, c"..")?
            && (stat.st_dev, stat.st_ino) == (self.device, above.inode)
        {
            above.directory = Some(parent);
            return Ok(());
        }
        // The directory was moved: continue in the deepest level that is still open.
        self.is_disturbed = true;
        while self.levels.last().is_some_and(|level| level.directory.is_none()) {
            self.levels.pop();
        }
        Ok(())
    }
}

/// Measures a directory in one go and returns what is allocated. Blocking. `None` if that is more
/// than `max`, if something moves directories away from the walk, or if `is_stopped`.
pub(crate) fn measure(
    directory: &OwnedFd,
    max: DiskUsage,
    is_stopped: impl Fn() -> bool,
) -> io::Result<Option<u64>> {
    let mut walk = Walk::begin_in(open(directory, c".")?, Vec::new(), max)?;
    while !is_stopped() {
        if let Progress::Done(found) = walk.advance(Instant::now() + STOP_INTERVAL)? {
            return Ok((!found.is_over && !found.is_disturbed).then_some(found.usage.bytes));
        }
    }
    Ok(None)
}

/// The state of a subdirectory when a walk comes to it.
#[derive(Debug)]
enum Child {
    Open(OwnedFd, Stat),
    /// The directory is gone, was replaced, or the worker may not read directories of its user.
    Absent,
    /// The mode, or that of the directory above, changes all the time.
    Denied,
}

fn open_child(directory: &OwnedFd, name: &CStr) -> io::Result<Child> {
    let opened = match open(directory, name) {
        Err(Errno::ACCESS) => open_unreadable(directory, name),
        opened => opened,
    };
    match opened {
        Ok(child) => Ok(fstat(&child).map_or(Child::Absent, |stat| Child::Open(child, stat))),
        Err(Errno::ACCESS) => Ok(Child::Denied),
        Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(errno.into()),
        Err(_) => Ok(Child::Absent),
    }
}

/// Opens a directory, if possible without a trace of it in the time of the last access.
fn open<P: Arg + Copy>(at: impl AsFd + Copy, path: P) -> Result<OwnedFd, Errno> {
    match openat(at, path, DIRECTORY | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => openat(at, path, DIRECTORY, Mode::empty()),
        opened => opened,
    }
}

/// Opens a directory whose mode, or that of the one above, keeps its own user out.
fn open_unreadable(directory: &OwnedFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = searching(directory, || openat(directory, name, flags, Mode::empty()))?;
    let open = || openat(&found, c".", DIRECTORY, Mode::empty());
    with_permissions(&found, Mode::RUSR | Mode::XUSR, open)
}

/// Does something in a directory that needs the permission to search it, also if its mode denies
/// that to its own user.
fn searching<T>(directory: &OwnedFd, work: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    match work() {
        Err(Errno::ACCESS) => with_permissions(directory, Mode::XUSR, work),
        done => done,
    }
}

/// Does something while a directory gives more permissions to its own user, which the worker's may
/// be: a command could hide files from it. Its mode is back after a moment.
fn with_permissions<T>(
    directory: &OwnedFd,
    more: Mode,
    work: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    let mode = Mode::from_raw_mode(fstat(directory)?.st_mode) & Mode::from_raw_mode(0o7777);
    let path = proc_fd_path(directory);
    chmod(&path, mode | more)?;
    let done = work();
    chmod(&path, mode)?;
    done
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File, Permissions},
        io::Write,
        os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink},
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use codelia_sys::fs_identity::as_user;
    use codelia_tests::{available, is_root};

    use super::*;

    const NO_LIMIT: DiskUsage = DiskUsage { bytes: u64::MAX, inodes: u64::MAX };
    const MIB: u64 = 1 << 20;

    fn walk(path: &Path, max: DiskUsage) -> Found {
        finish(Walk::begin(path, Vec::new(), max).unwrap())
    }

    fn finish(mut walk: Walk) -> Found {
        loop {
            // A slice of no time at all makes one step.
            if let Progress::Done(found) = walk.advance(Instant::now()).unwrap() {
                return found;
            }
        }
    }

    fn usage(path: &Path) -> DiskUsage {
        walk(path, NO_LIMIT).usage
    }

    fn write(path: &Path, bytes: u64) {
        let mut file = File::create(path).unwrap();
        file.write_all(&vec![1; usize::try_from(bytes).unwrap()]).unwrap();
        file.sync_all().unwrap();
    }

    #[test]
    fn allocated_blocks_count_and_holes_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let before = usage(dir.path());
        assert_eq!(before.inodes, 1);
        write(&dir.path().join("full"), 2 * MIB);
        let sparse = File::create(dir.path().join("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        sparse.write_all_at(b"x", 1 << 39).unwrap();
        sparse.sync_all().unwrap();
        let after = usage(dir.path());
        assert_eq!(after.inodes, 3);
        let grown = after.bytes - before.bytes;
        assert!((2 * MIB..3 * MIB).contains(&grown), "{grown}");
    }

    #[test]
    fn file_with_several_names_counts_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        write(&dir.path().join("a/file"), MIB);
        let before = usage(dir.path());
        for name in ["b", "c", "a/d"] {
            fs::hard_link(dir.path().join("a/file"), dir.path().join(name)).unwrap();
        }
        assert_eq!(usage(dir.path()), before);
    }

    #[test]
    fn links_are_not_followed() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(&outside.path().join("file"), MIB);
        symlink(outside.path(), dir.path().join("directory")).unwrap();
        symlink(outside.path().join("file"), dir.path().join("file")).unwrap();
        symlink(".", dir.path().join("loop")).unwrap();
        let found = usage(dir.path());
        assert_eq!(found.inodes, 4);
        assert!(found.bytes < MIB, "{found:?}");
    }

    #[test]
    fn other_devices_do_not_count() {
        let device = |path: &str| fs::metadata(path).unwrap().dev();
        assert_ne!(device("/dev"), device("/dev/shm"), "a mount on every Linux host");
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        write(file.path(), 8 * MIB);
        assert!(usage(Path::new("/dev")).bytes < 8 * MIB);
        assert!(usage(Path::new("/dev/shm")).bytes >= 8 * MIB, "the control");
    }

    #[test]
    fn deep_tree_is_measured_with_few_descriptors() {
        const DEPTH: u64 = 3000;
        let dir = tempfile::tempdir().unwrap();
        let mut at: OwnedFd = open(CWD, dir.path()).unwrap();
        for _ in 0..DEPTH {
            rustix::fs::mkdirat(&at, c"d", Mode::RWXU).unwrap();
            rustix::fs::mkdirat(&at, c"e", Mode::RWXU).unwrap();
            at = open(&at, c"d").unwrap();
        }
        let mut walk = Walk::begin(dir.path(), Vec::new(), NO_LIMIT).unwrap();
        let mut most = 0;
        let found = loop {
            most = most.max(walk.levels.iter().filter(|level| level.directory.is_some()).count());
            if let Progress::Done(found) = walk.advance(Instant::now()).unwrap() {
                break found;
            }
        };
        assert_eq!((found.usage.inodes, found.is_disturbed), (2 * DEPTH + 1, false));
        assert!(most <= KEPT_LEVELS + 1, "{most}");
        let parent = dir.path().parent().unwrap().to_owned();
        let name = dir.keep();
        crate::workspace::trash::remove(&parent, Path::new(name.file_name().unwrap())).unwrap();
    }

    #[test]
    fn walk_ends_when_there_is_too_much() {
        let dir = tempfile::tempdir().unwrap();
        for name in 0..5000 {
            File::create(dir.path().join(name.to_string())).unwrap();
        }
        let found = walk(dir.path(), DiskUsage { bytes: u64::MAX, inodes: 100 });
        assert!(found.is_over && (101..5000).contains(&found.usage.inodes), "{found:?}");
        write(&dir.path().join("file"), 2 * MIB);
        let found = walk(dir.path(), DiskUsage { bytes: MIB, inodes: u64::MAX });
        assert!(found.is_over && found.usage.bytes > MIB, "{found:?}");
        assert!(!walk(dir.path(), NO_LIMIT).is_over);
    }

    /// Measures `hidden/below/file` while both directories have a mode that keeps their user out.
    fn measure_hidden(dir: &Path) {
        let (hidden, below) = (dir.join("hidden"), dir.join("hidden/below"));
        fs::create_dir_all(&below).unwrap();
        write(&below.join("file"), MIB);
        let set_mode =
            |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        for mode in [0o000, 0o100, 0o200, 0o300, 0o400, 0o600] {
            set_mode(&below, mode);
            set_mode(&hidden, mode);
            let found = walk(dir, NO_LIMIT);
            let is_kept =
                |path: &Path| assert_eq!(fs::metadata(path).unwrap().mode() & 0o7777, mode);
            is_kept(&hidden);
            set_mode(&hidden, 0o700);
            is_kept(&below);
            assert!(found.usage.bytes >= MIB && found.usage.inodes == 4, "{mode:o}: {found:?}");
            assert!(!found.is_disturbed, "{mode:o}");
        }
        set_mode(&below, 0o700);
    }

    #[test]
    fn unreadable_directories_count() {
        measure_hidden(tempfile::tempdir().unwrap().path());
    }

    /// A worker that is not root has the user of its sessions.
    #[test]
    fn unreadable_directories_count_for_ordinary_user() {
        const USER: u32 = 65_534;
        if !available("root", (!is_root()).then_some("only root can act as another user")) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        chown(dir.path(), Some(USER), Some(USER)).unwrap();
        as_user(USER, USER, || measure_hidden(dir.path())).unwrap();
    }

    #[test]
    fn directories_may_move_and_vanish_during_a_walk() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            fs::create_dir_all(dir.path().join(name).join("x/y/z")).unwrap();
            write(&dir.path().join(name).join("x/y/z/file"), 4096);
        }
        let path = dir.path().to_owned();
        /// Stops the other thread, also when an assertion fails.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let _stop = Stop(&stop);
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    fs::rename(path.join("a/x"), path.join("b/moved")).unwrap();
                    fs::create_dir_all(path.join("new/below")).unwrap();
                    fs::rename(path.join("b/moved"), path.join("a/x")).unwrap();
                    fs::remove_dir_all(path.join("new")).unwrap();
                }
            });
            let until = Instant::now() + Duration::from_millis(500);
            while Instant::now() < until {
                let found = usage(dir.path());
                // What moves may count twice or not at all, never more.
                assert!((10..=24).contains(&found.inodes), "{found:?}");
            }
        });
        assert_eq!(usage(dir.path()).inodes, 16);
    }

    #[test]
    fn unlinked_file_counts_while_it_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        write(&path, 2 * MIB);
        let open = File::open(&path).unwrap();
        let twice = open.try_clone().unwrap();
        fs::remove_file(&path).unwrap();
        let me = || vec![rustix::process::getpid()];
        let of_me = || finish(Walk::begin(dir.path(), me(), NO_LIMIT).unwrap()).usage;
        assert_eq!(usage(dir.path()).inodes, 1, "the control: without processes it is not seen");
        let seen = of_me();
        assert!(seen.bytes >= 2 * MIB && seen.inodes >= 2, "{seen:?}");
        drop((open, twice));
        assert!(of_me().bytes < seen.bytes);
    }
}
