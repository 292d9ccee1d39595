//! Places below a root that strangers change while we look: found one step after another, each by
//! `openat2` on the directory that was found before, so that no name is looked at twice.
//!
//! Symlinks are followed by us, as the stranger sees them: an absolute one leads to its own root.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};

/// As many links are followed as the kernel follows.
const MOST_LINKS: usize = 40;
/// Neither out of the root, nor through `/proc`'s links, nor onto another mount.
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS).union(ResolveFlags::NO_XDEV);
const STEP: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const DIRECTORY: OFlags = STEP.union(OFlags::DIRECTORY);

/// A directory that nothing found below it leaves.
#[derive(Debug)]
pub struct Root {
    fd: OwnedFd,
    /// Where the stranger sees it: absolute symlinks that begin with it are followed.
    seen_at: PathBuf,
}

/// What becomes of a symlink at the end of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Last {
    /// It is followed.
    Follow,
    /// It is what was looked for.
    Keep,
}

/// Where a path leads.
#[derive(Debug)]
pub struct Place {
    /// The directory it is in.
    pub parent: OwnedFd,
    /// Its name there; `.` for the root itself.
    pub name: OsString,
    /// The whole way from the root, without symlinks; empty for the root itself.
    pub path: PathBuf,
    /// What is there.
    pub entry: Option<Entry>,
}

/// Something that was found. It is not opened: looking at it does nothing to it.
#[derive(Debug)]
pub struct Entry {
    fd: OwnedFd,
    /// What it is.
    pub stat: Stat,
}

/// A place that cannot be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// The path leads out of the root.
    #[error("leads out of the root")]
    LeadsOut,
    /// The kernel refuses.
    #[error(transparent)]
    Refused(#[from] Errno),
}

impl Root {
    /// Opens a directory as a root.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn open(path: &Path, seen_at: &Path) -> Result<Self, Errno> {
        let fd = rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty())?;
        Ok(Self { fd, seen_at: seen_at.to_owned() })
    }

    /// Finds where a relative path leads. Only its last part may be missing.
    ///
    /// # Errors
    /// If it leads out, or the kernel refuses a step.
    pub fn find(&self, path: &Path, last: Last) -> Result<Place, NotFound> {
        let mut walk = Walk {
            root: self,
            at: self.fd.try_clone().map_err(from_io)?,
            names: Vec::new(),
            left: Vec::new(),
            links: 0,
        };
        walk.prepend(path)?;
        walk.finish(last)
    }
}

/// On the way.
struct Walk<'a> {
    root: &'a Root,
    /// The directory reached so far …
    at: OwnedFd,
    /// … and its names from the root.
    names: Vec<OsString>,
    /// The steps that are left, the next one last.
    left: Vec<Step>,
    links: usize,
}

enum Step {
    Up,
    Into(OsString),
}

impl Walk<'_> {
    fn finish(mut self, last: Last) -> Result<Place, NotFound> {
        loop {
            let name = match self.left.pop() {
                Some(Step::Up) => {
                    self.names.pop().ok_or(NotFound::LeadsOut)?;
                    self.at = self.again()?;
                    continue;
                }
                Some(Step::Into(name)) => name,
                // It ends in a directory that we are in: found again by its name, or it is the root.
                None => match self.names.pop() {
                    Some(name) => {
                        self.at = self.again()?;
                        name
                    }
                    None => return self.at_root(),
                },
            };
            if let Some(found) = self.step(name, last)? {
                return Ok(found);
            }
        }
    }

    /// One step; the place if it was the last one.
    fn step(&mut self, name: OsString, last: Last) -> Result<Option<Place>, NotFound> {
        let is_last = self.left.is_empty();
        let fd = match open(&self.at, Path::new(&name), STEP, ResolveFlags::NO_SYMLINKS) {
            Err(Errno::NOENT) if is_last => return self.place(name, None).map(Some),
            answer => answer?,
        };
        let entry = Entry::of(fd)?;
        match (entry.kind(), is_last) {
            (FileType::Symlink, false) => self.follow(&entry)?,
            (FileType::Symlink, true) if last == Last::Follow => self.follow(&entry)?,
            (_, true) => return self.place(name, Some(entry)).map(Some),
            (FileType::Directory, false) => {
                self.at = entry.fd;
                self.names.push(name);
            }
            (_, false) => return Err(Errno::NOTDIR.into()),
        }
        Ok(None)
    }

    fn follow(&mut self, link: &Entry) -> Result<(), NotFound> {
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        let target = PathBuf::from(link.link_target()?);
        if !target.is_absolute() {
            return self.prepend(&target);
        }
        let inside = target.strip_prefix(&self.root.seen_at).map_err(|_| NotFound::LeadsOut)?;
        self.names.clear();
        self.at = self.again()?;
        self.prepend(inside)
    }

    fn prepend(&mut self, path: &Path) -> Result<(), NotFound> {
        for part in path.components().rev() {
            match part {
                Component::Normal(name) => self.left.push(Step::Into(name.to_owned())),
                Component::ParentDir => self.left.push(Step::Up),
                Component::CurDir => {}
                Component::RootDir | Component::Prefix(_) => return Err(NotFound::LeadsOut),
            }
        }
        Ok(())
    }

    /// The directory with the names so far, from the root.
    fn again(&self) -> Result<OwnedFd, Errno> {
        let path: PathBuf =
            [OsStr::new(".")].into_iter().chain(self.names.iter().map(OsString::as_os_str)).collect();
        open(&self.root.fd, &path, DIRECTORY, ResolveFlags::NO_SYMLINKS)
    }

    fn place(&mut self, name: OsString, entry: Option<Entry>) -> Result<Place, NotFound> {
        let path = self.names.iter().chain([&name]).collect();
        Ok(Place { parent: self.at.try_clone().map_err(from_io)?, name, path, entry })
    }

    fn at_root(self) -> Result<Place, NotFound> {
        let entry = Entry::of(self.at.try_clone().map_err(from_io)?)?;
        Ok(Place { parent: self.at, name: ".".into(), path: PathBuf::new(), entry: Some(entry) })
    }
}

impl Place {
    /// A file without a name on the same file system as the place, to be written and then linked.
    /// It is gone when it is closed.
    ///
    /// # Errors
    /// As `open(2)` with `O_TMPFILE`.
    pub fn unnamed_file(&self) -> Result<File, Errno> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        // The kernel takes a mode with this flag; the caller sets the one that is meant.
        let mode = Mode::RUSR | Mode::WUSR;
        retried(|| rustix::fs::openat2(&self.parent, ".", flags, mode, BENEATH)).map(File::from)
    }

    /// Looks again at what has the name now. A symlink is not followed.
    ///
    /// # Errors
    /// As `openat2(2)`, but for nothing being there.
    pub fn look(&self) -> Result<Option<Entry>, Errno> {
        look(&self.parent, &self.name)
    }
}

impl Entry {
    /// What a descriptor stands for, as it is now.
    ///
    /// # Errors
    /// As `fstat(2)`.
    pub fn of(fd: OwnedFd) -> Result<Self, Errno> {
        rustix::fs::fstat(&fd).map(|stat| Self { fd, stat })
    }

    /// The same file, as it is now.
    ///
    /// # Errors
    /// As `fstat(2)`.
    pub fn again(self) -> Result<Self, Errno> {
        Self::of(self.fd)
    }

    /// What kind of file it is.
    #[must_use]
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// Opens this very file for reading, whatever its name leads to by now.
    ///
    /// # Errors
    /// `EINVAL` for what is neither a file nor a directory: that is never opened; else as `open(2)`.
    pub fn open(&self) -> Result<File, Errno> {
        if !matches!(self.kind(), FileType::RegularFile | FileType::Directory) {
            return Err(Errno::INVAL);
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        retried(|| rustix::fs::openat(CWD, name_of(&self.fd), flags, Mode::empty())).map(File::from)
    }

    /// Looks at what has a name in this directory. A symlink is not followed.
    ///
    /// # Errors
    /// As `openat2(2)`, but for nothing being there.
    pub fn look(&self, name: &OsStr) -> Result<Option<Self>, Errno> {
        look(&self.fd, name)
    }

    /// Where it leads, if it is a symlink.
    ///
    /// # Errors
    /// As `readlink(2)`.
    pub fn link_target(&self) -> Result<OsString, Errno> {
        let target = rustix::fs::readlinkat(&self.fd, "", Vec::new())?;
        Ok(OsString::from_vec(target.into_bytes()))
    }
}

/// A name under which this process finds what a descriptor of its stands for.
#[must_use]
pub fn name_of(fd: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

fn open(at: &OwnedFd, path: &Path, flags: OFlags, more: ResolveFlags) -> Result<OwnedFd, Errno> {
    retried(|| rustix::fs::openat2(at, path, flags, Mode::empty(), BENEATH | more))
}

fn look(directory: &OwnedFd, name: &OsStr) -> Result<Option<Entry>, Errno> {
    match open(directory, Path::new(name), STEP, ResolveFlags::NO_SYMLINKS) {
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
        Ok(fd) => Entry::of(fd).map(Some),
    }
}

/// The kernel answers EAGAIN when it cannot tell because of a rename elsewhere.
fn retried<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) => {}
            answer => return answer,
        }
    }
}

fn from_io(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read, os::unix::fs::symlink};

    use super::*;

    fn tree() -> (tempfile::TempDir, Root) {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("root");
        fs::create_dir_all(path.join("a/b")).unwrap();
        fs::write(path.join("a/b/file"), "inside").unwrap();
        fs::write(temp.path().join("outside"), "outside").unwrap();
        let root = Root::open(&path, Path::new("/workspace")).unwrap();
        (temp, root)
    }

    fn path(root: &Root, path: &str, last: Last) -> Result<String, NotFound> {
        root.find(Path::new(path), last).map(|place| place.path.to_str().unwrap().to_owned())
    }

    #[test]
    fn links_are_followed_inside_and_told_by_the_way_they_lead() {
        let (temp, root) = tree();
        let link = |to: &str, name: &str| symlink(to, temp.path().join("root").join(name)).unwrap();
        link("a/b", "relative");
        link("/workspace/a/b", "absolute");
        link("/workspace", "own-root");
        link("relative/../b/file", "around");
        link("absent/../x", "through-nothing");
        link("new", "dangling");
        for (given, found) in [
            ("", ""),
            (".", ""),
            ("own-root", ""),
            ("a/b/file", "a/b/file"),
            ("relative/file", "a/b/file"),
            ("absolute/file", "a/b/file"),
            ("absolute", "a/b"),
            ("around", "a/b/file"),
            ("dangling", "new"),
            ("absent", "absent"),
        ] {
            assert_eq!(path(&root, given, Last::Follow).as_deref(), Ok(found), "{given}");
        }
        assert_eq!(path(&root, "around", Last::Keep).as_deref(), Ok("around"));
        for (given, errno) in
            [("absent/x", Errno::NOENT), ("through-nothing", Errno::NOENT), ("a/b/file/x", Errno::NOTDIR)]
        {
            assert_eq!(path(&root, given, Last::Follow), Err(NotFound::Refused(errno)), "{given}");
        }
    }

    #[test]
    fn nothing_leads_out() {
        let (temp, root) = tree();
        for (name, to) in [
            ("up", "../outside"),
            ("deep", "a/b/../../../outside"),
            ("host", "/etc/passwd"),
            ("proc", "/proc/self/root/etc/passwd"),
            ("near", "/workspacex/a"),
            ("slash", "/"),
        ] {
            symlink(to, temp.path().join("root").join(name)).unwrap();
            assert_eq!(path(&root, name, Last::Follow), Err(NotFound::LeadsOut), "{name}");
            assert_eq!(path(&root, &format!("{name}/x"), Last::Keep), Err(NotFound::LeadsOut), "{name}");
        }
        for given in ["..", "a/../..", "/etc/passwd"] {
            assert_eq!(path(&root, given, Last::Follow), Err(NotFound::LeadsOut), "{given}");
        }
        // The control: who opens the name gets what lies outside.
        assert_eq!(fs::read_to_string(temp.path().join("root/up")).unwrap(), "outside");
    }

    #[test]
    fn links_that_lead_in_circles_end() {
        let (temp, root) = tree();
        symlink("two", temp.path().join("root/one")).unwrap();
        symlink("one", temp.path().join("root/two")).unwrap();
        assert_eq!(path(&root, "one", Last::Follow), Err(NotFound::Refused(Errno::LOOP)));
    }

    #[test]
    fn what_was_found_is_opened_even_if_its_name_leads_elsewhere_by_then() {
        let (temp, root) = tree();
        let place = root.find(Path::new("a/b/file"), Last::Follow).unwrap();
        let name = temp.path().join("root/a/b/file");
        fs::remove_file(&name).unwrap();
        symlink(temp.path().join("outside"), &name).unwrap();
        assert_eq!(fs::read_to_string(&name).unwrap(), "outside", "the control: the name is fooled");
        let mut text = String::new();
        place.entry.unwrap().open().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "inside");
    }

    #[test]
    fn what_is_special_is_never_opened() {
        let (temp, root) = tree();
        let fifo = temp.path().join("root/fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let found = root.find(Path::new("fifo"), Last::Follow).unwrap().entry.unwrap();
        assert_eq!(found.kind(), FileType::Fifo);
        assert_eq!(found.open().unwrap_err(), Errno::INVAL);
    }

    #[test]
    fn a_file_without_a_name_appears_when_it_is_linked() {
        let (temp, root) = tree();
        let place = root.find(Path::new("a/new"), Last::Follow).unwrap();
        let file = place.unnamed_file().unwrap();
        assert_eq!(fs::read_dir(temp.path().join("root/a")).unwrap().count(), 1);
        let flags = rustix::fs::AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(CWD, name_of(&file), &place.parent, &place.name, flags).unwrap();
        assert!(temp.path().join("root/a/new").exists());
        assert!(place.look().unwrap().is_some());
    }
}
