//! Checks that the processes of a sandbox stay where its init was at the first look: in its
//! namespaces and control groups. Nothing in a sandbox can leave them, so this finds what the other
//! defences missed, and what somebody did from outside.

use std::sync::{Arc, OnceLock};

use codelia_sys::{
    Pid,
    process::{self, Place, TreeRoot},
    process_id::ProcessId,
};

use crate::Error;

/// Processes that are looked at.
const MAX_PROCESSES: usize = 1000;

/// Looks at the processes of one sandbox, from any thread. Reads a few files for each process.
#[derive(Debug, Clone)]
pub struct IsolationCheck {
    root: TreeRoot,
    /// Init, since the first look. `None` if it cannot be looked at.
    init: Arc<OnceLock<Option<Init>>>,
}

/// The init of a sandbox, and where it was at the first look.
#[derive(Debug)]
struct Init {
    pid: Pid,
    /// The identity behind the pid, which may be that of another process by now.
    id: ProcessId,
    place: Place,
}

/// A process that is not where it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drift {
    /// The id of the process on the host.
    pub host_pid: i32,
    /// The name of its program. The process can write anything here.
    pub program: String,
    /// The namespaces and groups that are not those of the sandbox.
    pub left: String,
}

impl IsolationCheck {
    /// The check of a sandbox, by the tree of its processes.
    pub(super) fn new(root: TreeRoot) -> Self {
        Self { root, init: Arc::default() }
    }

    /// The processes that are elsewhere. The first call only keeps where init is.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub fn run(&self) -> Result<Vec<Drift>, Error> {
        let Some(init) = self.init.get_or_init(|| Init::find(self.root)) else {
            return Ok(Vec::new());
        };
        let mut drifted = Vec::new();
        for pid in init.processes()? {
            // One that ended meanwhile is nowhere.
            let Ok(place) = Place::read(pid) else { continue };
            if let Some(left) = place.difference(&init.place) {
                drifted.push((pid, left));
            }
        }
        if drifted.is_empty() {
            return Ok(Vec::new());
        }
        // An id may belong to a process of somebody else by now: one that is still below init does
        // not.
        let still = init.processes()?;
        drifted.retain(|(pid, _)| still.contains(pid));
        let describe = |(pid, left): (Pid, String)| Drift {
            host_pid: pid.as_raw_nonzero().get(),
            program: process::program_name(pid),
            left,
        };
        Ok(drifted.into_iter().map(describe).collect())
    }
}

impl Init {
    fn find(root: TreeRoot) -> Option<Self> {
        let pid = match root {
            TreeRoot::Parent(tool) => {
                process::first_of_namespace(&process::descendants(tool).ok()?)?
            }
            TreeRoot::First(init) => init,
        };
        Some(Self { pid, id: ProcessId::from_pid(pid)?, place: Place::read(pid).ok()? })
    }

    /// Init and the processes below it; none if it has ended.
    fn processes(&self) -> Result<Vec<Pid>, Error> {
        let mut below = process::descendants(self.pid)?;
        if !self.id.is_alive() {
            return Ok(Vec::new());
        }
        below.truncate(MAX_PROCESSES);
        below.push(self.pid);
        Ok(below)
    }
}
