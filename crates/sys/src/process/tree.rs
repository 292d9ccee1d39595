//! Usage of all processes below another one, read from `/proc`.

use std::{fs, time::Duration};

use rustix::{io::Errno, process::Pid};

use super::kill::children;
use crate::Error;

const KIB: u64 = 1024;
/// Memory of a process in `status`, without mapped files.
pub(super) const MEMORY: [&str; 3] = ["RssAnon:", "RssShmem:", "VmSwap:"];

/// The unit of CPU time in `/proc` (`USER_HZ`), the same on all architectures that we support.
const TICKS_PER_SECOND: u64 = 100;

/// Where a tree of processes begins.
#[derive(Debug, Clone, Copy)]
pub enum TreeRoot {
    /// With the children of this process, which does not count itself.
    Parent(Pid),
    /// With this process.
    First(Pid),
}

/// The processes of a tree at one moment. Processes that start or end meanwhile may be missing.
#[derive(Debug, Default)]
pub struct Tree {
    /// Number of processes and threads.
    pub tasks: u64,
    /// User and system time, with that of children that were waited for.
    pub cpu_time: Duration,
    /// Memory of all processes, without mapped files. Pages that processes share count for each.
    pub memory_bytes: u64,
    processes: Vec<Pid>,
    /// The memory of each process that was read.
    memory: Vec<(Pid, u64)>,
}

impl Tree {
    /// Reads a tree. Stops as soon as it has more than `max_tasks` tasks.
    ///
    /// # Errors
    /// The kernel does not list children (it needs `CONFIG_PROC_CHILDREN`), or the process has
    /// ended.
    pub fn read(root: TreeRoot, max_tasks: u64) -> Result<Self, Error> {
        let processes = match root {
            TreeRoot::Parent(pid) => children(pid)?,
            TreeRoot::First(pid) => vec![pid],
        };
        let mut tree = Self { processes, ..Self::default() };
        let mut next = 0;
        // A parent is read before its children, so that none of their CPU time counts twice.
        while let Some(&pid) = tree.processes.get(next) {
            tree.add(pid);
            if tree.tasks > max_tasks {
                break;
            }
            match children(pid) {
                Ok(more) => tree.processes.extend(more),
                // The process ended meanwhile and its children have another parent.
                Err(error) if matches!(error.errno, Errno::NOENT | Errno::SRCH) => {}
                Err(error) => return Err(error),
            }
            next += 1;
        }
        Ok(tree)
    }

    fn add(&mut self, pid: Pid) {
        let read =
            |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let status = read("status");
        self.tasks += field(&status, "Threads:");
        let bytes = kibibytes(&status, MEMORY);
        self.memory_bytes += bytes;
        self.memory.push((pid, bytes));
        self.cpu_time += cpu_time(&read("stat"), 4);
    }

    /// Memory of all processes, with shared pages divided among those that share them. Slower.
    #[must_use]
    pub fn proportional_memory_bytes(&self) -> u64 {
        let memory = |(pid, bytes): &(Pid, u64)| match fs::read_to_string(format!(
            "/proc/{pid}/smaps_rollup"
        )) {
            Ok(text) => kibibytes(&text, ["Pss_Anon:", "Pss_Shmem:", "SwapPss:"]),
            Err(error)
                if matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::SRCH)) =>
            {
                0
            }
            Err(_) => *bytes,
        };
        self.memory.iter().map(memory).sum()
    }
}

/// The sum of fields that are in KiB, in bytes.
pub(super) fn kibibytes(text: &str, names: [&str; 3]) -> u64 {
    names.iter().map(|name| field(text, name)).sum::<u64>() * KIB
}

/// A number behind its name at the beginning of a line; 0 if there is none.
pub(super) fn field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.split_ascii_whitespace().next()?.parse().ok()).unwrap_or_default()
}

/// The sum of fields of `stat` from 14 on: the process's own times are the first two, then come
/// those of children that were waited for. Counted from behind the name in parentheses, which may
/// contain any character.
pub(super) fn cpu_time(stat: &str, fields: usize) -> Duration {
    let Some((_, behind_name)) = stat.rsplit_once(") ") else { return Duration::ZERO };
    let ticks: u64 = behind_name
        .split(' ')
        .skip(11)
        .take(fields)
        .filter_map(|text| text.parse::<u64>().ok())
        .sum();
    Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Child, Command, Stdio},
    };

    use super::*;
    use crate::process;

    const MIB: u64 = 1024 * 1024;

    /// A shell with a script that has printed a line. Dropping it kills it with its descendants.
    struct Shell(Child);

    impl Shell {
        fn start(script: &str) -> Self {
            let mut shell = Command::new("sh");
            let shell =
                shell.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
            let mut shell = shell.unwrap();
            BufReader::new(shell.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
            Self(shell)
        }

        fn tree(&self, max_tasks: u64) -> Tree {
            Tree::read(TreeRoot::Parent(Pid::from_child(&self.0)), max_tasks).unwrap()
        }
    }

    impl Drop for Shell {
        fn drop(&mut self) {
            let below = process::descendants(Pid::from_child(&self.0)).unwrap_or_default();
            below.into_iter().for_each(|pid| process::kill(pid).unwrap());
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    fn tree_sums_memory_tasks_and_time() {
        let script = r#"perl -e '$| = 1; pipe(R, W);
            for (1..2) { if (!fork) { $x = "x" x (20 << 20); 1 while (times)[0] < 0.1; syswrite(W, "x"); sleep 1000 } }
            sysread(R, $x, 1) for (1..2); print "ready\n"; sleep 1000' & wait"#;
        let shell = Shell::start(script);
        let tree = shell.tree(100);
        assert!((40 * MIB..120 * MIB).contains(&tree.memory_bytes), "{tree:?}");
        assert!(tree.cpu_time >= Duration::from_millis(180), "{tree:?}");
        assert_eq!(tree.tasks, 3, "{tree:?}");
    }

    #[test]
    fn shared_pages_count_once_proportionally() {
        let script = r#"perl -e '$| = 1; $x = "x" x (20 << 20); pipe(R, W);
            for (1..4) { if (!fork) { close W; sysread(R, $y, 1); exit } } print "ready\n"; sleep 1000' & wait"#;
        let shell = Shell::start(script);
        let tree = shell.tree(100);
        assert!(tree.memory_bytes >= 100 * MIB, "{tree:?}");
        let proportional = tree.proportional_memory_bytes();
        assert!((20 * MIB..60 * MIB).contains(&proportional), "{proportional}");
    }

    #[test]
    fn large_tree_is_read_only_in_part() {
        let shell = Shell::start("for i in 1 2 3 4 5 6; do sleep 1000 & done; echo ready; wait");
        assert_eq!(shell.tree(2).tasks, 3);
    }
}
