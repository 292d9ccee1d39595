//! Files without a name that processes still have open or mapped. Their blocks are in use until the
//! last of them is closed.

use std::{fs, io::Read, os::fd::OwnedFd, time::Instant};

use codelia_sys::Pid;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, StatxFlags, makedev, openat, statx};

/// How much of the list of a process's mappings is read.
const MAX_MAPS_BYTES: u64 = 1 << 20;
/// Processes that are looked at.
const MAX_PROCESSES: usize = 1000;

/// A file without a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unlinked {
    pub(super) inode: u64,
    pub(super) blocks: u64,
}

/// Looks at the open files of processes, one process after another.
#[derive(Debug)]
pub(super) struct OpenFiles {
    processes: Vec<Pid>,
    device: u64,
}

impl OpenFiles {
    pub(super) fn new(mut processes: Vec<Pid>, device: u64) -> Self {
        processes.truncate(MAX_PROCESSES);
        Self { processes, device }
    }

    /// The files of the next processes, of one at least; `None` after the last.
    pub(super) fn next_slice(&mut self, until: Instant) -> Option<Vec<Unlinked>> {
        let mut found = Vec::new();
        let mut pid = self.processes.pop()?;
        loop {
            // A process that has ended has no files. An id that is another process's by now shows
            // files on this device without a name at most: those of another session, for one
            // measurement.
            self.look_at(pid, &mut found);
            if Instant::now() >= until {
                return Some(found);
            }
            match self.processes.pop() {
                Some(next) => pid = next,
                None => return Some(found),
            }
        }
    }

    fn look_at(&self, pid: Pid, found: &mut Vec<Unlinked>) {
        let pid = pid.as_raw_nonzero();
        if let Some(directory) = open(&format!("/proc/{pid}/fd")) {
            let names = Dir::read_from(&directory).into_iter().flatten().flatten();
            found.extend(names.filter_map(|entry| self.unlinked(&directory, entry.file_name())));
        }
        let mapped = deleted_mappings(&format!("/proc/{pid}/maps"));
        if !mapped.is_empty()
            && let Some(directory) = open(&format!("/proc/{pid}/map_files"))
        {
            found.extend(
                mapped.iter().filter_map(|range| self.unlinked(&directory, range.as_str())),
            );
        }
    }

    /// The file behind a link of `/proc`, if it is on this device and has no name.
    fn unlinked(&self, directory: &OwnedFd, name: impl rustix::path::Arg) -> Option<Unlinked> {
        // Asks no file server: the file may be anywhere.
        let mask = StatxFlags::NLINK | StatxFlags::INO | StatxFlags::BLOCKS;
        let stat = statx(directory, name, AtFlags::STATX_DONT_SYNC, mask).ok()?;
        let is_here = makedev(stat.stx_dev_major, stat.stx_dev_minor) == self.device;
        let unlinked = Unlinked { inode: stat.stx_ino, blocks: stat.stx_blocks };
        (is_here && stat.stx_nlink == 0).then_some(unlinked)
    }
}

fn open(path: &str) -> Option<OwnedFd> {
    openat(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// The address ranges where files without a name are mapped, as in `map_files`.
fn deleted_mappings(maps: &str) -> Vec<String> {
    let mut text = Vec::new();
    let Ok(file) = fs::File::open(maps) else { return Vec::new() };
    if file.take(MAX_MAPS_BYTES).read_to_end(&mut text).is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&text);
    let deleted = text.lines().filter(|line| line.ends_with(" (deleted)"));
    deleted.filter_map(|line| line.split(' ').next()).map(without_zeros).collect()
}

/// `maps` pads addresses with zeros, `map_files` does not.
fn without_zeros(range: &str) -> String {
    let short = |address: &str| match address.trim_start_matches('0') {
        "" => "0".to_owned(),
        digits => digits.to_owned(),
    };
    range.split('-').map(short).collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_named_as_in_map_files() {
        assert_eq!(without_zeros("00400000-0040b000"), "400000-40b000");
        assert_eq!(without_zeros("7ffc0000-7ffd0000"), "7ffc0000-7ffd0000");
    }
}
