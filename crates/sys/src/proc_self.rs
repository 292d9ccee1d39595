//! The environment of this process: namespaces, mounts, host name, ids.

use std::{
    fs::{self, File},
    io::{self, Read, Seek},
    os::unix::{ffi::OsStringExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    process::Pid,
};

use crate::call::from_io;

/// The inode number of a namespace of this process, by its name in `/proc/self/ns`.
///
/// # Errors
/// As `stat(2)`.
pub fn namespace_id(name: &str) -> Result<u64, Errno> {
    namespace_id_of(Path::new("/proc/self"), name)
}

/// The inode number of a namespace of another process, given its directory in `/proc`.
///
/// # Errors
/// As `stat(2)`.
pub fn namespace_id_of(proc_dir: &Path, name: &str) -> Result<u64, Errno> {
    fs::metadata(proc_dir.join("ns").join(name)).map(|file| file.ino()).map_err(from_io)
}

/// An entry of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The mount point.
    pub target: PathBuf,
    /// Whether it is mounted read-write.
    pub writable: bool,
    /// Whether files on it can be executed.
    pub executable: bool,
    /// The type of its file system.
    pub file_system: String,
}

/// The mount table, in mount order: of two mounts at one target the later one is visible.
///
/// # Errors
/// As `open(2)` and `read(2)`.
pub fn mounts() -> Result<Vec<Mount>, Errno> {
    let table = fs::read("/proc/self/mountinfo").map_err(from_io)?;
    Ok(MountLine::parse_all(&table).map(Mount::from).collect())
}

/// The text of the mount table, which is read again only when it has changed.
#[derive(Debug)]
pub struct MountTable {
    file: File,
    text: String,
}

impl MountTable {
    /// Opens and reads the table.
    ///
    /// # Errors
    /// As `open(2)` and `read(2)`.
    pub fn open() -> io::Result<Self> {
        let mut table = Self { file: File::open("/proc/self/mountinfo")?, text: String::new() };
        table.read()?;
        Ok(table)
    }

    /// The table as it is now.
    ///
    /// # Errors
    /// As `poll(2)` and `read(2)`.
    pub fn current(&mut self) -> io::Result<&str> {
        // The kernel reports each change once.
        let mut poll = [PollFd::new(&self.file, PollFlags::PRI)];
        if rustix::event::poll(&mut poll, Some(&Timespec::default()))? > 0 {
            self.file.rewind()?;
            self.read()?;
        }
        Ok(&self.text)
    }

    fn read(&mut self) -> io::Result<()> {
        self.text.clear();
        self.file.read_to_string(&mut self.text).map(drop)
    }
}

/// The fields of a line of `/proc/PID/mountinfo`, with the kernel's escapes.
pub(crate) struct MountLine<'a> {
    pub(crate) device: &'a [u8],
    /// The directory of the file system that is mounted.
    pub(crate) root: &'a [u8],
    pub(crate) target: &'a [u8],
    options: &'a [u8],
    pub(crate) file_system: &'a [u8],
    pub(crate) source: &'a [u8],
    pub(crate) file_system_options: &'a [u8],
}

impl<'a> MountLine<'a> {
    /// Parses a line: id, parent, device, root, target, mount options, tags, `-`, type, source,
    /// options of the file system.
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|&byte| byte == b' ').skip(2);
        let device = fields.next()?;
        let root = fields.next()?;
        let target = fields.next()?;
        let options = fields.next()?;
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        Some(Self {
            device,
            root,
            target,
            options,
            file_system: fields.next()?,
            source: fields.next()?,
            file_system_options: fields.next()?,
        })
    }

    /// Parses a table.
    pub(crate) fn parse_all(table: &'a [u8]) -> impl Iterator<Item = Self> {
        table.split(|&byte| byte == b'\n').filter_map(Self::parse)
    }
}

/// Whether an option is among those of a mount or file system.
pub(crate) fn has_option(options: &[u8], option: &str) -> bool {
    options.split(|&byte| byte == b',').any(|word| word == option.as_bytes())
}

impl From<MountLine<'_>> for Mount {
    fn from(line: MountLine<'_>) -> Self {
        let is_read_only = |options| has_option(options, "ro");
        Self {
            target: unescape(line.target),
            writable: !is_read_only(line.options) && !is_read_only(line.file_system_options),
            executable: !has_option(line.options, "noexec"),
            file_system: String::from_utf8_lossy(line.file_system).into_owned(),
        }
    }
}

/// Decodes the kernel's escapes: a backslash and three octal digits for blanks and backslashes.
pub(crate) fn unescape(text: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| byte == b'\\').and_then(octal);
        path.push(code.unwrap_or(byte));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    PathBuf::from(std::ffi::OsString::from_vec(path))
}

fn octal(digits: &[u8]) -> Option<u8> {
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()
}

/// The host name.
///
/// # Errors
/// As `open(2)` and `read(2)`.
pub fn hostname() -> Result<String, Errno> {
    let text = fs::read_to_string("/proc/sys/kernel/hostname").map_err(from_io)?;
    Ok(text.trim_end_matches('\n').to_owned())
}

/// Rights that a process has and may gain, as `/proc/PID/status` reports them. `None` for a field
/// that the kernel does not report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Privileges {
    /// The capability sets, in the order of [`CAPABILITY_SETS`].
    pub capabilities: [Option<u64>; 5],
    /// Whether `no_new_privs` is set.
    pub no_new_privs: Option<bool>,
    /// The seccomp mode: 2 with a filter.
    pub seccomp: Option<u32>,
}

/// The fields of the capability sets: inheritable, permitted, effective, bounding, ambient.
pub const CAPABILITY_SETS: [&str; 5] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];

/// The privileges of a process.
///
/// # Errors
/// As `open(2)` and `read(2)`.
pub fn privileges_of(pid: Pid) -> Result<Privileges, Errno> {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    Ok(parse_privileges(&fs::read_to_string(path).map_err(from_io)?))
}

fn parse_privileges(status: &str) -> Privileges {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim)
    };
    let number = |name: &str| field(name).and_then(|text| text.parse::<u32>().ok());
    Privileges {
        capabilities: CAPABILITY_SETS.map(|name| u64::from_str_radix(field(name)?, 16).ok()),
        no_new_privs: number("NoNewPrivs").map(|set| set == 1),
        seccomp: number("Seccomp"),
    }
}

/// The user and group of this process; `None` if real and effective ids differ.
#[must_use]
pub fn ids() -> Option<(u32, u32)> {
    let uid = rustix::process::getuid();
    let gid = rustix::process::getgid();
    let same = uid == rustix::process::geteuid() && gid == rustix::process::getegid();
    same.then(|| (uid.as_raw(), gid.as_raw()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn read_only_options_make_a_mount_unwritable() {
        let writable =
            |line: &str| MountLine::parse(line.as_bytes()).map(Mount::from).unwrap().writable;
        assert!(writable(
            "36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw,errors=continue"
        ));
        assert!(!writable("36 35 98:0 / /mnt ro,noatime master:1 - ext3 /dev/root rw"));
        assert!(!writable("36 35 98:0 / /mnt rw,noatime - ext3 /dev/root ro"));
    }

    #[test]
    fn privileges_are_parsed() {
        let status = "Name:\tx\nCapInh:\t0\nCapPrm:\t1\nCapEff:\t00000000000000ff\nCapBnd:\t0\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        let privileges = parse_privileges(status);
        assert_eq!(privileges.capabilities, [Some(0), Some(1), Some(255), Some(0), None]);
        assert_eq!((privileges.no_new_privs, privileges.seccomp), (Some(true), Some(2)));
    }

    #[test]
    fn mount_targets_are_unescaped() {
        let mount = MountLine::parse(br"36 35 98:0 / /a\040b\134c rw - tmpfs tmpfs rw")
            .map(Mount::from)
            .unwrap();
        assert_eq!(mount.target, PathBuf::from(r"/a b\c"));
        assert_eq!(mount.file_system, "tmpfs");
    }

    #[test]
    fn own_mounts_namespaces_and_hostname_are_read() {
        assert!(mounts().unwrap().iter().any(|mount| mount.target == Path::new("/proc")));
        assert_ne!(namespace_id("pid").unwrap(), namespace_id("mnt").unwrap());
        assert_eq!(namespace_id("none").unwrap_err(), Errno::NOENT);
        assert!(!hostname().unwrap().is_empty());
    }
}
