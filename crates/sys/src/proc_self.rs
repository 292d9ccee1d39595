//! What is around this process: namespaces, mounts, host name, ids.

use std::{
    fs, io,
    os::unix::{ffi::OsStringExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use rustix::io::Errno;

/// The number of the namespace that this process is in, by its name in `/proc/self/ns`.
///
/// # Errors
/// As `stat(2)`.
pub fn namespace_id(name: &str) -> Result<u64, Errno> {
    namespace_id_of(Path::new("/proc/self"), name)
}

/// The number of a namespace of the process that this directory of `/proc` is.
///
/// # Errors
/// As `stat(2)`.
pub fn namespace_id_of(process: &Path, name: &str) -> Result<u64, Errno> {
    fs::metadata(process.join("ns").join(name)).map(|file| file.ino()).map_err(|error| errno(&error))
}

/// Something mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where.
    pub target: PathBuf,
    /// Whether it can be written to.
    pub writable: bool,
}

/// All that is mounted, in the order it was: of two at one place the later one is seen.
///
/// # Errors
/// As `open(2)` and `read(2)`.
pub fn mounts() -> Result<Vec<Mount>, Errno> {
    let table = fs::read("/proc/self/mountinfo").map_err(|error| errno(&error))?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse_mount).collect())
}

/// A line: id, parent, device, root, target, options, tags, `-`, type, source, options of the whole.
fn parse_mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let target = unescape(fields.nth(4)?);
    let options = fields.next()?;
    let whole = fields.skip_while(|field| *field != b"-").nth(3)?;
    let read_only = |options: &[u8]| options.split(|&byte| byte == b',').any(|word| word == b"ro");
    Some(Mount { target, writable: !read_only(options) && !read_only(whole) })
}

/// Blanks and backslashes are written as a backslash and three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    let (mut path, mut rest) = (Vec::with_capacity(text.len()), text);
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
    let text = fs::read_to_string("/proc/sys/kernel/hostname").map_err(|error| errno(&error))?;
    Ok(text.trim_end_matches('\n').to_owned())
}

/// Real user and group of this process, if the effective ones are the same.
#[must_use]
pub fn ids() -> Option<(u32, u32)> {
    let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
    let same = uid == rustix::process::geteuid() && gid == rustix::process::getegid();
    same.then(|| (uid.as_raw(), gid.as_raw()))
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::ILSEQ)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_mount_is_read_only_if_it_or_its_file_system_is() {
        let writable = |line: &str| parse_mount(line.as_bytes()).unwrap().writable;
        assert!(writable("36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw,errors=continue"));
        assert!(!writable("36 35 98:0 / /mnt ro,noatime master:1 - ext3 /dev/root rw"));
        assert!(!writable("36 35 98:0 / /mnt rw,noatime - ext3 /dev/root ro"));
    }

    #[test]
    fn targets_are_unescaped() {
        let mount = parse_mount(br"36 35 98:0 / /a\040b\134c rw - tmpfs tmpfs rw").unwrap();
        assert_eq!(mount.target, PathBuf::from(r"/a b\c"));
    }

    #[test]
    fn this_process_has_surroundings() {
        assert!(mounts().unwrap().iter().any(|mount| mount.target == Path::new("/proc")));
        assert_ne!(namespace_id("pid").unwrap(), namespace_id("mnt").unwrap());
        assert_eq!(namespace_id("none").unwrap_err(), Errno::NOENT);
        assert!(!hostname().unwrap().is_empty());
    }
}
