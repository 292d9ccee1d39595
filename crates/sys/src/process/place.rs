//! Where a process is: its namespaces and control groups, as the kernel names them.

use std::{fs, io, path::PathBuf};

use rustix::process::Pid;

/// The kinds of namespaces, by their names in `/proc/PID/ns`.
pub const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];
/// The kernel's flag of a process that exits.
const PF_EXITING: u32 = 0x4;
/// Bytes of the name of a program.
const MAX_NAME: usize = 64;

/// The namespaces and control groups of a process at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    namespaces: [PathBuf; NAMESPACES.len()],
    /// One line for each hierarchy.
    groups: String,
}

impl Place {
    /// Reads where a process is.
    ///
    /// # Errors
    /// The process has ended or is about to, or may not be looked at.
    pub fn read(pid: Pid) -> io::Result<Self> {
        let mut namespaces = NAMESPACES.map(|_| PathBuf::new());
        for (link, kind) in namespaces.iter_mut().zip(NAMESPACES) {
            *link = fs::read_link(format!("/proc/{pid}/ns/{kind}"))?;
        }
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        // Last: the kernel moves a process that exits to the root groups, after it has set the
        // flag.
        if is_exiting(pid)? {
            Err(io::ErrorKind::NotFound.into())
        } else {
            Ok(Self { namespaces, groups })
        }
    }

    /// The parts of this place that are not the same as in `expected`; `None` if all are.
    #[must_use]
    pub fn difference(&self, expected: &Self) -> Option<String> {
        let pairs = self.namespaces.iter().zip(&expected.namespaces).zip(NAMESPACES);
        let namespaces = pairs.filter(|((own, expected), _)| own != expected);
        let namespaces = namespaces.map(|(_, kind)| format!("{kind} namespace"));
        let groups = (self.groups != expected.groups).then(|| "control group".to_owned());
        let all: Vec<_> = namespaces.chain(groups).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

/// Whether a process exits, or waits to be reaped.
fn is_exiting(pid: Pid) -> io::Result<bool> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Behind the name in parentheses, which may contain any character: the state, and sixth from
    // there the flags.
    let flags = stat
        .rsplit_once(") ")
        .and_then(|(_, fields)| fields.split(' ').nth(6)?.parse::<u32>().ok());
    Ok(flags.ok_or(io::ErrorKind::InvalidData)? & PF_EXITING != 0)
}

/// The first process of a PID namespace among these: the one that has id 1 there.
#[must_use]
pub fn first_of_namespace(pids: &[Pid]) -> Option<Pid> {
    let is_first = |pid: &&Pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        let mut ids = ids.split_ascii_whitespace();
        ids.next().is_some() && ids.last() == Some("1")
    };
    pids.iter().find(is_first).copied()
}

/// The name of the program of a process. The process can write anything here.
#[must_use]
pub fn program_name(pid: Pid) -> String {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = String::from_utf8_lossy(&name[..name.len().min(MAX_NAME)]).into_owned();
    name.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Child, Command, Stdio},
    };

    use super::*;

    fn start(command: &mut Command) -> Child {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
        child
    }

    #[test]
    fn process_that_has_ended_is_nowhere() {
        let mut child = start(Command::new("sh").args(["-c", "echo; read x; exit 0"]));
        let pid = Pid::from_child(&child);
        assert!(Place::read(pid).is_ok());
        drop(child.stdin.take());
        // Waits without reaping it.
        let options =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(pid), options).unwrap();
        assert!(is_exiting(pid).unwrap() && Place::read(pid).is_err());
        child.wait().unwrap();
    }

    #[test]
    fn other_namespaces_are_named() {
        let own = Place::read(rustix::process::getpid()).unwrap();
        let mut same = start(Command::new("sh").args(["-c", "echo; read line"]));
        let script = ["--user", "--map-root-user", "--uts", "sh", "-c", "echo; read line"];
        let mut other = start(Command::new("unshare").args(script));
        let place = |child: &Child| Place::read(Pid::from_child(child)).unwrap();
        assert_eq!(place(&same).difference(&own), None);
        assert_eq!(
            place(&other).difference(&own).as_deref(),
            Some("user namespace, uts namespace")
        );
        assert_eq!(program_name(Pid::from_child(&same)), "sh");
        assert_eq!(first_of_namespace(&[Pid::from_child(&same)]), None);
        for child in [&mut same, &mut other] {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert!(Place::read(Pid::from_child(&same)).is_err(), "it has ended");
    }
}
