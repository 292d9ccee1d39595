//! One directory of a group, and the files in which the two versions keep the same things.

use std::{
    fs::{self, File},
    os::fd::OwnedFd,
    path::PathBuf,
    time::Duration,
};

use rustix::io::Errno;

use super::Version;
use crate::Error;

/// The kernel takes no CPU quota below this.
const LEAST_QUOTA_MICROS: u64 = 1000;

/// The period of a new group.
const USUAL_PERIOD_MICROS: u64 = 100_000;

/// What a new group weighs among its siblings, in version 1 and 2.
const USUAL_SHARES: u64 = 1024;
const USUAL_WEIGHT: u64 = 100;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leaf {
    pub(super) dir: PathBuf,
    pub(super) version: Version,
}

impl Leaf {
    pub(super) fn limit_memory(&self, bytes: u64) -> Result<(), Error> {
        let (memory, swap, no_swap) = match self.version {
            // Version 1 limits memory and swap together.
            Version::One => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", bytes),
            Version::Two => ("memory.max", "memory.swap.max", 0),
        };
        self.write(memory, bytes)?;
        match self.write(swap, no_swap) {
            // A kernel that does not count swap.
            Err(error) if error.errno == Errno::NOENT && self.version == Version::One => {
                self.write("memory.swappiness", 0)
            }
            Err(error) if error.errno == Errno::NOENT => Ok(()),
            answer => answer,
        }
    }

    pub(super) fn limit_pids(&self, most: u64) -> Result<(), Error> {
        self.write("pids.max", most)
    }

    pub(super) fn limit_cpu(&self, millis: u64) -> Result<(), Error> {
        let (quota, period) = cpu_quota(millis);
        match self.version {
            Version::One => {
                if period != USUAL_PERIOD_MICROS {
                    self.write("cpu.cfs_period_us", period)?;
                }
                self.write("cpu.cfs_quota_us", quota)
            }
            Version::Two => self.write("cpu.max", format!("{quota} {period}")),
        }
    }

    /// An eighth of what a new group weighs.
    pub(super) fn lower_weight(&self) -> Result<(), Error> {
        match self.version {
            Version::One => self.write("cpu.shares", USUAL_SHARES / 8),
            Version::Two => self.write("cpu.weight", USUAL_WEIGHT / 8),
        }
    }

    pub(super) fn lift_cpu(&self) -> Result<(), Error> {
        match self.version {
            Version::One => {
                self.write("cpu.shares", USUAL_SHARES)?;
                self.write("cpu.cfs_quota_us", -1)
            }
            Version::Two => {
                self.write("cpu.weight", USUAL_WEIGHT)?;
                self.write("cpu.max", "max")
            }
        }
    }

    pub(super) fn oom_kills(&self) -> Result<u64, Error> {
        match self.version {
            Version::One => self.read_key("memory.oom_control", "oom_kill"),
            Version::Two => self.read_key("memory.events", "oom_kill"),
        }
    }

    pub(super) fn peak_memory(&self) -> Result<u64, Error> {
        match self.version {
            Version::One => self.read_number("memory.max_usage_in_bytes"),
            Version::Two => self.read_number("memory.peak"),
        }
    }

    pub(super) fn cpu_time(&self) -> Result<Duration, Error> {
        match self.version {
            Version::One => self.read_number("cpuacct.usage").map(Duration::from_nanos),
            Version::Two => self.read_key("cpu.stat", "usage_usec").map(Duration::from_micros),
        }
    }

    pub(super) fn pids_refused(&self) -> Result<u64, Error> {
        self.read_key("pids.events", "max")
    }

    pub(super) fn peak_pids(&self) -> Result<u64, Error> {
        self.read_number("pids.peak")
    }

    /// Read and written, on all devices.
    pub(super) fn io_bytes(&self) -> Result<(u64, u64), Error> {
        let (name, read, written) = match self.version {
            Version::One => ("blkio.throttle.io_service_bytes", "Read ", "Write "),
            Version::Two => ("io.stat", "rbytes=", "wbytes="),
        };
        let text = self.read(name)?;
        // In version 1 the number is the word after its name, in version 2 it is in the word.
        let sum = |key: &str| -> u64 {
            text.lines()
                .filter_map(|line| {
                    line.split_once(key)?.1.split_ascii_whitespace().next()?.parse::<u64>().ok()
                })
                .sum()
        };
        Ok((sum(read), sum(written)))
    }

    /// What a single-threaded process writes `0` into to move itself here. In version 1 that is
    /// the file for one thread: it spares the lock over all forks of the host.
    pub(super) fn open_entry(&self) -> Result<OwnedFd, Error> {
        let path = self.dir.join(match self.version {
            Version::One => "tasks",
            Version::Two => "cgroup.procs",
        });
        let file = File::options().write(true).open(&path).map_err(Error::io("open", &path))?;
        Ok(file.into())
    }

    pub(super) fn write(&self, name: &str, value: impl ToString) -> Result<(), Error> {
        let path = self.dir.join(name);
        let mut file = File::options().write(true).open(&path).map_err(Error::io("open", &path))?;
        std::io::Write::write_all(&mut file, value.to_string().as_bytes()).map_err(Error::io("write", path))
    }

    pub(super) fn read(&self, name: &str) -> Result<String, Error> {
        let path = self.dir.join(name);
        fs::read_to_string(&path).map_err(Error::io("read", path))
    }

    fn read_number(&self, name: &str) -> Result<u64, Error> {
        self.read(name)?.trim().parse().map_err(|_| self.malformed(name))
    }

    /// Reads a file of lines of `key value`.
    fn read_key(&self, name: &str, key: &str) -> Result<u64, Error> {
        let text = self.read(name)?;
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).ok_or_else(|| self.malformed(name))
    }

    fn malformed(&self, name: &str) -> Error {
        Error::new("understand", self.dir.join(name), Errno::INVAL)
    }
}

/// Quota and period in microseconds; a longer period where the usual one would make the quota
/// smaller than the kernel takes.
fn cpu_quota(millis: u64) -> (u64, u64) {
    if millis * 100 >= LEAST_QUOTA_MICROS {
        (millis * 100, USUAL_PERIOD_MICROS)
    } else {
        (millis * 1000, 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf_with(files: &[(&str, &str)]) -> (tempfile::TempDir, Leaf) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let leaf = Leaf { dir: dir.path().to_owned(), version: Version::Two };
        (dir, leaf)
    }

    #[test]
    fn version_2_limits_are_written_in_its_files() {
        let names = ["memory.max", "memory.swap.max", "cpu.max", "pids.max"];
        let (_dir, leaf) = leaf_with(&names.map(|name| (name, "")));
        leaf.limit_memory(4096).unwrap();
        leaf.limit_cpu(1500).unwrap();
        leaf.limit_pids(7).unwrap();
        assert_eq!(names.map(|name| leaf.read(name).unwrap()), ["4096", "0", "150000 100000", "7"]);
    }

    #[test]
    fn version_2_usage_is_read_from_its_files() {
        let (_dir, leaf) = leaf_with(&[
            ("memory.peak", "8192\n"),
            ("memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 1\n"),
            ("cpu.stat", "usage_usec 1500\nuser_usec 1000\n"),
            ("pids.events", "max 5\n"),
        ]);
        assert_eq!(leaf.peak_memory(), Ok(8192));
        assert_eq!(leaf.oom_kills(), Ok(2));
        assert_eq!(leaf.cpu_time(), Ok(Duration::from_micros(1500)));
        assert_eq!(leaf.pids_refused(), Ok(5));
    }

    #[test]
    fn bytes_of_all_devices_are_added_in_both_versions() {
        let (_dir, mut leaf) = leaf_with(&[
            ("io.stat", "8:0 rbytes=100 wbytes=7 rios=1 wios=1\n254:0 rbytes=1 wbytes=2\n"),
            (
                "blkio.throttle.io_service_bytes",
                "8:0 Read 5\n8:0 Write 6\n8:0 Sync 11\n9:0 Read 1\nTotal 12\n",
            ),
        ]);
        assert_eq!(leaf.io_bytes(), Ok((101, 9)));
        leaf.version = Version::One;
        assert_eq!(leaf.io_bytes(), Ok((6, 6)));
    }

    #[test]
    fn a_failure_names_step_path_and_errno() {
        let (dir, leaf) = leaf_with(&[]);
        let path = dir.path().join("pids.max");
        let error = leaf.limit_pids(1).unwrap_err();
        assert_eq!(error, Error::new("open", path, Errno::NOENT));
    }

    #[test]
    fn a_small_cpu_rate_is_kept_exactly() {
        assert_eq!(cpu_quota(1), (1000, 1_000_000));
        assert_eq!(cpu_quota(10), (1000, 100_000));
        assert_eq!(cpu_quota(2000), (200_000, 100_000));
    }
}
