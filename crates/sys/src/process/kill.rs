//! Finding, signaling and killing processes.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    path::Path,
};

use nix::libc;
use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, Signal},
};

use super::own::own_pid;
use crate::{
    Error,
    call::{check, from_io},
};

/// Kills a process. Succeeds if it does not exist.
///
/// # Errors
/// As `kill(2)`.
pub fn kill(pid: Pid) -> Result<(), Errno> {
    ignore_missing(rustix::process::kill_process(pid, Signal::KILL))
}

/// A pidfd: refers to one process, even after its pid is reused.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl From<OwnedFd> for PidFd {
    /// Wraps a descriptor that is a pidfd.
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for PidFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl PidFd {
    /// Opens the process that has this pid now.
    ///
    /// # Errors
    /// As `pidfd_open(2)`.
    pub fn open(pid: Pid) -> Result<Self, Errno> {
        rustix::process::pidfd_open(pid, PidfdFlags::empty()).map(Self)
    }

    /// The pid that the process has in the PID namespace of this one; `None` if it has ended.
    ///
    /// # Errors
    /// As `open(2)` and `read(2)`.
    pub fn pid(&self) -> Result<Option<Pid>, Errno> {
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let text = fs::read_to_string(path).map_err(from_io)?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pid:")).ok_or(Errno::BADF)?;
        // A process that has ended has -1, one of another namespace 0.
        Ok(line.trim().parse().ok().filter(|pid| *pid > 0).and_then(Pid::from_raw))
    }

    /// Kills the process. Succeeds if it has ended.
    ///
    /// # Errors
    /// As `pidfd_send_signal(2)`.
    pub fn kill(&self) -> Result<(), Errno> {
        ignore_missing(rustix::process::pidfd_send_signal(&self.0, Signal::KILL))
    }
}

/// Kills every other process of the PID namespace. This process must be PID 1 of it. Succeeds if
/// there is no other process.
///
/// # Errors
/// `EINVAL` if this is not PID 1, else as `kill(2)`.
pub fn kill_all_others() -> Result<(), Errno> {
    // Outside a PID namespace of the sandbox this would kill every process of the host.
    if own_pid() != Pid::INIT {
        return Err(Errno::INVAL);
    }
    // SAFETY: takes no pointers.
    ignore_missing(check(unsafe { libc::kill(-1, libc::SIGKILL) }))
}

/// Sends a signal to a process group. Succeeds if the group has no processes.
///
/// # Errors
/// `EINVAL` for an invalid signal, else as `kill(2)`.
pub fn signal_process_group(group: Pid, signal: i32) -> Result<(), Errno> {
    // SAFETY: takes no pointers. A `Pid` is positive, so its negative addresses this group alone.
    ignore_missing(check(unsafe { libc::kill(-group.as_raw_nonzero().get(), signal) }))
}

fn ignore_missing(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::SRCH) => Ok(()),
        result => result,
    }
}

/// All living descendants of a process, parents first.
///
/// # Errors
/// The kernel does not list children (it needs `CONFIG_PROC_CHILDREN`).
pub fn descendants(pid: Pid) -> Result<Vec<Pid>, Error> {
    let mut found = children(pid)?;
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        match children(parent) {
            Ok(more) => found.extend(more),
            // The process ended meanwhile and its children have another parent.
            Err(error) if matches!(error.errno, Errno::NOENT | Errno::SRCH) => {}
            Err(error) => return Err(error),
        }
        next += 1;
    }
    Ok(found)
}

pub(super) fn children(pid: Pid) -> Result<Vec<Pid>, Error> {
    let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
    let mut found = Vec::new();
    for task in fs::read_dir(&tasks).map_err(Error::io("list threads in", &tasks))? {
        let path = task.map_err(Error::io("list threads in", &tasks))?.path().join("children");
        let text = fs::read_to_string(&path).map_err(Error::io("list children in", &path))?;
        found.extend(parse_pids(&text));
    }
    Ok(found)
}

/// Parses pids separated by white space.
pub(crate) fn parse_pids(text: &str) -> impl Iterator<Item = Pid> {
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok().and_then(Pid::from_raw))
}

/// Whether a process exists and has not ended.
#[must_use]
pub fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    // The state follows the name in parentheses, which may contain any character.
    stat.is_ok_and(|text| {
        !text.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X']))
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn descendants_are_found_at_any_depth() {
        let script = "sh -c 'sleep 1000 & echo $!; wait' & wait";
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(
            &mut std::io::BufReader::new(shell.stdout.as_mut().unwrap()),
            &mut line,
        )
        .unwrap();
        let sleeper = parse_pids(&line).next().unwrap();
        let top = Pid::from_child(&shell);

        let found = descendants(top).unwrap();
        assert!(found.contains(&sleeper), "{found:?}");
        assert!(is_alive(sleeper));

        for pid in found.into_iter().chain([top]) {
            kill(pid).unwrap();
        }
        shell.wait().unwrap();
        assert!(!is_alive(top));
    }
}
