//! Lists processes of a sandbox as `ps` would show them inside.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::Read,
    time::Duration,
};

use rustix::process::Pid;

use super::tree::{MEMORY, cpu_time, field, kibibytes};

/// Bytes of a command line that are read.
const MAX_COMMAND: u64 = 4096;

/// A process, with ids of the innermost PID namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedProcess {
    /// The id of the process on the host.
    pub host_pid: Pid,
    /// The id of the process in the sandbox.
    pub pid: u64,
    /// The id of its parent; 0 if that is not listed.
    pub parent_pid: u64,
    /// The letter of its state, as in `ps`.
    pub state: char,
    /// User and system time, without that of children.
    pub cpu_time: Duration,
    /// Memory without mapped files.
    pub memory_bytes: u64,
    /// Number of threads.
    pub threads: u64,
    /// The name of the process, which can write anything here.
    pub name: String,
    /// The start of the command line, with spaces between the words. The process can write anything
    /// here.
    pub command: String,
}

/// Describes processes, by id, without the first one: the process whose parent is none of them.
/// Processes that have ended are left out.
#[must_use]
pub fn list(pids: &[Pid]) -> Vec<ListedProcess> {
    let read: HashMap<u64, (u64, ListedProcess)> =
        pids.iter().filter_map(|&pid| Some((host_id(pid), describe(pid)?))).collect();
    let is_listed = |id: &u64| read.contains_key(id);
    let inside =
        |id: &u64| read.get(id).filter(|(parent, _)| is_listed(parent)).map(|(_, found)| found.pid);
    let mut listed: Vec<_> = read
        .values()
        .filter(|(parent, _)| is_listed(parent))
        .map(|(parent, found)| ListedProcess {
            parent_pid: inside(parent).unwrap_or_default(),
            ..found.clone()
        })
        .collect();
    listed.sort_by_key(|process| process.pid);
    listed
}

fn host_id(pid: Pid) -> u64 {
    u64::from(pid.as_raw_nonzero().get().unsigned_abs())
}

/// A process and the id of its parent on the host; `None` if it has ended.
fn describe(pid: Pid) -> Option<(u64, ListedProcess)> {
    let path = |file: &str| format!("/proc/{pid}/{file}");
    let status = String::from_utf8_lossy(&fs::read(path("status")).ok()?).into_owned();
    let stat = String::from_utf8_lossy(&fs::read(path("stat")).ok()?).into_owned();
    let value = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
    };
    let mut command = Vec::new();
    File::open(path("cmdline")).ok()?.take(MAX_COMMAND).read_to_end(&mut command).ok()?;
    let command = String::from_utf8_lossy(&command).replace('\0', " ").trim().to_owned();
    let process = ListedProcess {
        host_pid: pid,
        // One id for each namespace, the innermost last.
        pid: value("NSpid:").split_ascii_whitespace().last()?.parse().ok()?,
        parent_pid: 0,
        state: value("State:").chars().next()?,
        cpu_time: cpu_time(&stat, 2),
        memory_bytes: kibibytes(&status, MEMORY),
        threads: field(&status, "Threads:"),
        name: value("Name:").to_owned(),
        command,
    };
    Some((field(&status, "PPid:"), process))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
    };

    use super::*;
    use crate::process::{descendants, kill};

    #[test]
    fn processes_are_listed_without_the_first() {
        let script = "sleep 1000 & exec -a 'two  words' sleep 1001 & echo ready; wait";
        let mut shell =
            Command::new("bash").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        BufReader::new(shell.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
        let root = Pid::from_child(&shell);
        let below = descendants(root).unwrap();
        let pids: Vec<_> = below.iter().copied().chain([root]).collect();
        // A child may not have executed its program yet; while it does, it has no command line.
        let has_executed = |process: &ListedProcess| {
            !process.command.is_empty() && !process.command.starts_with("bash")
        };
        let listed = loop {
            let listed = list(&pids);
            if listed.iter().all(has_executed) {
                break listed;
            }
        };
        let mut commands: Vec<_> = listed.iter().map(|process| process.command.as_str()).collect();
        commands.sort_unstable();
        assert_eq!(commands, ["sleep 1000", "two  words 1001"]);
        assert!(
            listed.iter().all(|process| process.parent_pid == 0 && process.threads == 1),
            "{listed:?}"
        );
        assert_eq!(list(&below), [], "without their parent both are the first");
        below.into_iter().for_each(|pid| kill(pid).unwrap());
        shell.wait().unwrap();
        assert_eq!(list(&pids), [], "all have ended");
    }
}
