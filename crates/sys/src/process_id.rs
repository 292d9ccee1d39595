//! Process identity that survives PID reuse. Cgroups, containers and directories carry the identity
//! of the process that created them, so that a later process can remove those of a dead one.

use std::{fmt, fs, str::FromStr, sync::LazyLock};

use rustix::{io::Errno, process::Pid};

use crate::Error;

/// A process, by pid and start time. Formats as `{pid}-{start_ticks}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessId {
    pid: u32,
    /// The start time in clock ticks since boot.
    start_ticks: u64,
}

static CURRENT: LazyLock<Option<ProcessId>> =
    LazyLock::new(|| ProcessId::from_pid(rustix::process::getpid()));

impl ProcessId {
    /// The identity of this process.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn current() -> Result<Self, Error> {
        CURRENT
            .ok_or_else(|| Error::new("read the start time from", "/proc/self/stat", Errno::PROTO))
    }

    /// The identity of the process that has this pid now; `None` if there is none.
    #[must_use]
    pub fn from_pid(pid: Pid) -> Option<Self> {
        let pid = pid.as_raw_nonzero().get().unsigned_abs();
        Some(Self { pid, start_ticks: start_ticks(pid)? })
    }

    /// Whether the process still exists.
    #[must_use]
    pub fn is_alive(self) -> bool {
        start_ticks(self.pid) == Some(self.start_ticks)
    }

    /// Whether the process started before the other one.
    #[must_use]
    pub fn started_before(self, other: Self) -> bool {
        self.start_ticks < other.start_ticks
    }

    /// Parses the identity at the beginning of a name, `{pid}-{start_ticks}-…`.
    #[must_use]
    pub fn from_name_prefix(name: &str) -> Option<Self> {
        let mut words = name.splitn(3, '-');
        let id =
            Self { pid: words.next()?.parse().ok()?, start_ticks: words.next()?.parse().ok()? };
        words.next().map(|_| id)
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.pid, self.start_ticks)
    }
}

impl FromStr for ProcessId {
    type Err = Errno;

    fn from_str(text: &str) -> Result<Self, Errno> {
        Self::from_name_prefix(&format!("{text}-")).ok_or(Errno::INVAL)
    }
}

/// The start time of a process; `None` if it does not exist. It is field 22 of `stat`, counted from
/// behind the name in parentheses, which may contain any character.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, behind_name) = stat.rsplit_once(") ")?;
    behind_name.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_includes_the_start_time() {
        let own = ProcessId::current().unwrap();
        assert!(own.is_alive());
        assert_eq!(own.to_string().parse(), Ok(own));
        assert_eq!(ProcessId::from_name_prefix(&format!("{own}-a-b")), Some(own));
        assert!(!ProcessId { start_ticks: own.start_ticks + 1, ..own }.is_alive());
        for name in ["", "1", "1-2", "x-1-y"] {
            assert_eq!(ProcessId::from_name_prefix(name), None, "{name}");
        }
    }
}
