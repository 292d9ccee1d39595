//! Whose something is: what carries its maker's mark can be told, once the maker is gone, from what is
//! in use, and be removed by whoever comes next.

use std::{fmt, fs, str::FromStr, sync::LazyLock};

use rustix::io::Errno;

use crate::Error;

/// A process for ever: its id may be used again, but not with the same start. It reads `{pid}-{started}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessId {
    pid: u32,
    /// In clock ticks since boot.
    started: u64,
}

static THIS_PROCESS: LazyLock<Option<ProcessId>> = LazyLock::new(|| {
    let pid = std::process::id();
    Some(ProcessId { pid, started: start_of(pid)? })
});

impl ProcessId {
    /// The process that asks.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn current() -> Result<Self, Error> {
        THIS_PROCESS.ok_or_else(|| Error::new("read the start of", "/proc/self/stat", Errno::PROTO))
    }

    /// Whether it is still there.
    #[must_use]
    pub fn is_alive(self) -> bool {
        start_of(self.pid) == Some(self.started)
    }

    /// Reads the mark at the beginning of a name, `{pid}-{started}-…`.
    #[must_use]
    pub fn from_name_prefix(name: &str) -> Option<Self> {
        let mut words = name.splitn(3, '-');
        let owner = Self { pid: words.next()?.parse().ok()?, started: words.next()?.parse().ok()? };
        words.next().map(|_| owner)
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.pid, self.started)
    }
}

impl FromStr for ProcessId {
    type Err = Errno;

    fn from_str(text: &str) -> Result<Self, Errno> {
        Self::from_name_prefix(&format!("{text}-")).ok_or(Errno::INVAL)
    }
}

/// When a process started, if it is there: the 22nd field of its `stat`, counted behind the name,
/// which may hold anything.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, behind_name) = stat.rsplit_once(") ")?;
    behind_name.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_lives_under_its_own_mark_alone() {
        let own = ProcessId::current().unwrap();
        assert!(own.is_alive());
        assert_eq!(own.to_string().parse(), Ok(own));
        assert_eq!(ProcessId::from_name_prefix(&format!("{own}-a-b")), Some(own));
        assert!(!ProcessId { started: own.started + 1, ..own }.is_alive());
        for name in ["", "1", "1-2", "x-1-y"] {
            assert_eq!(ProcessId::from_name_prefix(name), None, "{name}");
        }
    }
}
