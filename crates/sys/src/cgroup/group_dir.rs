//! One directory of a cgroup and its control files, whose names differ between the two versions.

use std::{
    fs::{self, File},
    os::fd::OwnedFd,
    path::PathBuf,
    time::Duration,
};

use rustix::io::Errno;

use super::controller::Version;
use crate::Error;

/// The smallest CPU quota that the kernel accepts.
const MIN_QUOTA_MICROS: u64 = 1000;

/// The kernel's default quota period.
const DEFAULT_PERIOD_MICROS: u64 = 100_000;

/// The kernel's default CPU weight, in version 1 and 2.
pub(super) const DEFAULT_SHARES: u64 = 1024;
const DEFAULT_WEIGHT: u64 = 100;

/// In version 1, the buffers of sockets get this part of the memory limit, in addition to it.
const SOCKET_SHARE: u64 = 8;

/// Each TCP connection gets a small buffer above that limit. A cgroup whose many connections use
/// this part of the memory limit has exceeded it.
const MAX_SOCKET_SHARE: u64 = 2;

/// Version 1 control files for the buffers of sockets, of TCP and of every other protocol.
const SOCKET_LIMIT: &str = "memory.kmem.tcp.limit_in_bytes";
const SOCKET_USAGE: &str = "memory.kmem.tcp.usage_in_bytes";

/// A cgroup in one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GroupDir {
    pub(super) path: PathBuf,
    pub(super) version: Version,
}

impl GroupDir {
    /// Limits memory, with the buffers of sockets, and forbids swap.
    pub(super) fn limit_memory(&self, bytes: u64) -> Result<(), Error> {
        let (memory, swap, swap_limit) = match self.version {
            // Version 1 limits the sum of memory and swap.
            Version::V1 => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", bytes),
            Version::V2 => ("memory.max", "memory.swap.max", 0),
        };
        self.write(memory, bytes)?;
        self.limit_sockets(bytes)?;
        match self.write(swap, swap_limit) {
            // This kernel does not account swap.
            Err(error) if error.errno == Errno::NOENT && self.version == Version::V1 => {
                self.write("memory.swappiness", 0)
            }
            Err(error) if error.errno == Errno::NOENT => Ok(()),
            result => result,
        }
    }

    /// Limits the buffers of sockets that are opened from now on. Version 2 counts them as memory;
    /// version 1 does not count them without this limit.
    pub(super) fn limit_sockets(&self, memory_bytes: u64) -> Result<(), Error> {
        match self.version {
            Version::V1 => self.write(SOCKET_LIMIT, memory_bytes / SOCKET_SHARE),
            Version::V2 => Ok(()),
        }
    }

    /// Whether the buffers of sockets use too much of this memory limit; `None` where they count as
    /// memory.
    pub(super) fn sockets_exceed(&self, memory_bytes: u64) -> Result<Option<bool>, Error> {
        match self.version {
            Version::V1 => {
                Ok(Some(self.read_number(SOCKET_USAGE)? > memory_bytes / MAX_SOCKET_SHARE))
            }
            Version::V2 => Ok(None),
        }
    }

    /// Counts the buffers of sockets in version 1 without a limit. While one cgroup counts them,
    /// the next ones start faster: the first one changes the kernel's code.
    pub(super) fn count_sockets(&self) -> Result<(), Error> {
        self.write(SOCKET_LIMIT, -1)
    }

    pub(super) fn limit_pids(&self, max: u64) -> Result<(), Error> {
        self.write("pids.max", max)
    }

    pub(super) fn limit_cpu(&self, millis: u64) -> Result<(), Error> {
        let (quota, period) = cpu_quota(millis);
        match self.version {
            Version::V1 => {
                if period != DEFAULT_PERIOD_MICROS {
                    self.write("cpu.cfs_period_us", period)?;
                }
                self.write("cpu.cfs_quota_us", quota)
            }
            Version::V2 => self.write("cpu.max", format!("{quota} {period}")),
        }
    }

    /// Sets the CPU weight to an eighth of the default.
    pub(super) fn lower_cpu_weight(&self) -> Result<(), Error> {
        match self.version {
            Version::V1 => self.write("cpu.shares", DEFAULT_SHARES / 8),
            Version::V2 => self.write("cpu.weight", DEFAULT_WEIGHT / 8),
        }
    }

    /// Restores the default CPU weight and removes the quota.
    pub(super) fn lift_cpu_limit(&self) -> Result<(), Error> {
        match self.version {
            Version::V1 => {
                self.write("cpu.shares", DEFAULT_SHARES)?;
                self.write("cpu.cfs_quota_us", -1)
            }
            Version::V2 => {
                self.write("cpu.weight", DEFAULT_WEIGHT)?;
                self.write("cpu.max", "max")
            }
        }
    }

    pub(super) fn oom_kills(&self) -> Result<u64, Error> {
        self.read_key(self.by_version("memory.oom_control", "memory.events"), "oom_kill")
    }

    /// The largest memory so far; `None` in version 2 of kernels before 5.19.
    pub(super) fn peak_memory(&self) -> Result<Option<u64>, Error> {
        match self.read_number(self.by_version("memory.max_usage_in_bytes", "memory.peak")) {
            Err(error) if error.errno == Errno::NOENT => Ok(None),
            result => result.map(Some),
        }
    }

    /// Memory that counts towards the limit, with cached files.
    pub(super) fn current_memory(&self) -> Result<u64, Error> {
        self.read_number(self.by_version("memory.usage_in_bytes", "memory.current"))
    }

    /// Memory of cached files, without those in a tmpfs.
    pub(super) fn page_cache(&self) -> Result<u64, Error> {
        let keys = self.by_version(
            ["total_inactive_file", "total_active_file"],
            ["inactive_file", "active_file"],
        );
        let text = self.read("memory.stat")?;
        let [inactive, active] = keys.map(|key| self.key("memory.stat", &text, key));
        Ok(inactive?.saturating_add(active?))
    }

    pub(super) fn current_pids(&self) -> Result<u64, Error> {
        self.read_number("pids.current")
    }

    pub(super) fn cpu_time(&self) -> Result<Duration, Error> {
        match self.version {
            Version::V1 => self.read_number("cpuacct.usage").map(Duration::from_nanos),
            Version::V2 => self.read_key("cpu.stat", "usage_usec").map(Duration::from_micros),
        }
    }

    pub(super) fn pids_refused(&self) -> Result<u64, Error> {
        self.read_key("pids.events", "max")
    }

    pub(super) fn peak_pids(&self) -> Result<u64, Error> {
        self.read_number("pids.peak")
    }

    /// Bytes read and written, summed over all devices.
    pub(super) fn io_bytes(&self) -> Result<(u64, u64), Error> {
        let (name, read, written) = match self.version {
            Version::V1 => ("blkio.throttle.io_service_bytes", "Read ", "Write "),
            Version::V2 => ("io.stat", "rbytes=", "wbytes="),
        };
        let text = self.read(name)?;
        let sum = |key: &str| -> u64 {
            text.lines()
                .filter_map(|line| {
                    line.split_once(key)?.1.split_ascii_whitespace().next()?.parse::<u64>().ok()
                })
                .sum()
        };
        Ok((sum(read), sum(written)))
    }

    /// Opens the file into which a single-threaded process writes `0` to enter. In version 1 that
    /// is `tasks`, which moves one thread and avoids the host-wide lock over forks.
    pub(super) fn open_for_joining(&self) -> Result<OwnedFd, Error> {
        let path = self.path.join(self.by_version("tasks", "cgroup.procs"));
        let file = File::options().write(true).open(&path).map_err(Error::io("open", &path))?;
        Ok(file.into())
    }

    pub(super) fn open(&self) -> Result<OwnedFd, Error> {
        Ok(File::open(&self.path).map_err(Error::io("open", &self.path))?.into())
    }

    pub(super) fn write(&self, name: &str, value: impl ToString) -> Result<(), Error> {
        let path = self.path.join(name);
        let mut file = File::options().write(true).open(&path).map_err(Error::io("open", &path))?;
        std::io::Write::write_all(&mut file, value.to_string().as_bytes())
            .map_err(Error::io("write", path))
    }

    pub(super) fn read(&self, name: &str) -> Result<String, Error> {
        let path = self.path.join(name);
        fs::read_to_string(&path).map_err(Error::io("read", path))
    }

    /// Chooses by the version of the hierarchy.
    fn by_version<T>(&self, v1: T, v2: T) -> T {
        match self.version {
            Version::V1 => v1,
            Version::V2 => v2,
        }
    }

    fn read_number(&self, name: &str) -> Result<u64, Error> {
        self.read(name)?.trim().parse().map_err(|_| self.malformed(name))
    }

    /// Reads the value of a key from a file with lines of `key value`.
    fn read_key(&self, name: &str, key: &str) -> Result<u64, Error> {
        self.key(name, &self.read(name)?, key)
    }

    fn key(&self, name: &str, text: &str, key: &str) -> Result<u64, Error> {
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        value.and_then(|value| value.parse().ok()).ok_or_else(|| self.malformed(name))
    }

    fn malformed(&self, name: &str) -> Error {
        Error::new("parse", self.path.join(name), Errno::INVAL)
    }
}

/// Whether a CPU rate needs another quota period than the default one.
pub(super) fn has_own_period(millis: u64) -> bool {
    cpu_quota(millis).1 != DEFAULT_PERIOD_MICROS
}

/// Quota and period in microseconds. Uses a longer period where the default one would make the
/// quota too small for the kernel.
fn cpu_quota(millis: u64) -> (u64, u64) {
    if millis * 100 >= MIN_QUOTA_MICROS {
        (millis * 100, DEFAULT_PERIOD_MICROS)
    } else {
        (millis * 1000, 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group_with(files: &[(&str, &str)]) -> (tempfile::TempDir, GroupDir) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let group = GroupDir { path: dir.path().to_owned(), version: Version::V2 };
        (dir, group)
    }

    #[test]
    fn v2_limits_are_written() {
        let names = ["memory.max", "memory.swap.max", "cpu.max", "pids.max"];
        let (_dir, group) = group_with(&names.map(|name| (name, "")));
        group.limit_memory(4096).unwrap();
        group.limit_cpu(1500).unwrap();
        group.limit_pids(7).unwrap();
        assert_eq!(
            names.map(|name| group.read(name).unwrap()),
            ["4096", "0", "150000 100000", "7"]
        );
    }

    #[test]
    fn v1_limits_socket_buffers_separately() {
        let names = ["memory.limit_in_bytes", SOCKET_LIMIT, "memory.memsw.limit_in_bytes"];
        let (_dir, mut group) = group_with(&names.map(|name| (name, "")));
        group.version = Version::V1;
        group.limit_memory(4096).unwrap();
        assert_eq!(names.map(|name| group.read(name).unwrap()), ["4096", "512", "4096"]);
    }

    #[test]
    fn v2_usage_is_read() {
        let (_dir, group) = group_with(&[
            ("memory.peak", "8192\n"),
            ("memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 1\n"),
            ("cpu.stat", "usage_usec 1500\nuser_usec 1000\n"),
            ("pids.events", "max 5\n"),
        ]);
        assert_eq!(group.peak_memory(), Ok(Some(8192)));
        assert_eq!(group.oom_kills(), Ok(2));
        assert_eq!(group.cpu_time(), Ok(Duration::from_micros(1500)));
        assert_eq!(group.pids_refused(), Ok(5));
    }

    #[test]
    fn current_usage_is_read_in_both_versions() {
        let (_dir, mut group) = group_with(&[
            ("memory.current", "9000\n"),
            ("memory.usage_in_bytes", "7000\n"),
            (
                "memory.stat",
                "anon 5\ninactive_file 100\nactive_file 20\ntotal_inactive_file 3\ntotal_active_file 4\n",
            ),
            ("pids.current", "6\n"),
        ]);
        assert_eq!((group.current_memory(), group.page_cache()), (Ok(9000), Ok(120)));
        group.version = Version::V1;
        assert_eq!((group.current_memory(), group.page_cache()), (Ok(7000), Ok(7)));
        assert_eq!(group.current_pids(), Ok(6));
    }

    #[test]
    fn io_bytes_are_summed_over_devices() {
        let (_dir, mut group) = group_with(&[
            ("io.stat", "8:0 rbytes=100 wbytes=7 rios=1 wios=1\n254:0 rbytes=1 wbytes=2\n"),
            (
                "blkio.throttle.io_service_bytes",
                "8:0 Read 5\n8:0 Write 6\n8:0 Sync 11\n9:0 Read 1\nTotal 12\n",
            ),
        ]);
        assert_eq!(group.io_bytes(), Ok((101, 9)));
        group.version = Version::V1;
        assert_eq!(group.io_bytes(), Ok((6, 6)));
    }

    #[test]
    fn error_has_step_path_and_errno() {
        let (dir, group) = group_with(&[]);
        let path = dir.path().join("pids.max");
        let error = group.limit_pids(1).unwrap_err();
        assert_eq!(error, Error::new("open", path, Errno::NOENT));
    }

    #[test]
    fn small_cpu_rate_is_exact() {
        assert_eq!(cpu_quota(1), (1000, 1_000_000));
        assert_eq!(cpu_quota(10), (1000, 100_000));
        assert_eq!(cpu_quota(2000), (200_000, 100_000));
    }
}
