//! Checks that the processes of a sandbox stay where its init was at the first look: in its
//! namespaces and control groups. Nothing in a sandbox can leave them, so this finds what the other
//! defences missed, and what somebody did from outside.

use std::sync::{Arc, OnceLock};

use codelia_sys::{
    Pid,
    process::{self, Place},
};

use crate::Error;

/// Processes that are looked at.
const MAX_PROCESSES: usize = 1000;

/// Looks at the processes of one sandbox, from any thread. Reads a few files for each process.
#[derive(Debug, Clone)]
pub struct IsolationCheck {
    tool: Pid,
    /// Init and where it was, since the first look. `None` if it cannot be looked at.
    init: Arc<OnceLock<Option<(Pid, Place)>>>,
}

/// A process that is not where it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drift {
    /// Its id on the host.
    pub host_pid: i32,
    /// The name of its program. The process can write anything here.
    pub program: String,
    /// What is not that of the sandbox.
    pub left: String,
}

impl IsolationCheck {
    /// The check of the sandbox below a tool.
    pub(super) fn of(tool: Pid) -> Self {
        Self { tool, init: Arc::default() }
    }

    /// The processes that are elsewhere. The first call only keeps where init is.
    ///
    /// # Errors
    /// The sandbox is gone.
    pub fn run(&self) -> Result<Vec<Drift>, Error> {
        let Some((init, expected)) = self.init.get_or_init(|| find_init(self.tool)) else {
            return Ok(Vec::new());
        };
        let mut drifted = Vec::new();
        for pid in self.processes(*init)? {
            // One that ended meanwhile is nowhere.
            let Ok(place) = Place::of(pid) else { continue };
            if let Some(left) = place.difference(expected) {
                drifted.push((pid, left));
            }
        }
        if drifted.is_empty() {
            return Ok(Vec::new());
        }
        // An id may belong to a process of somebody else by now: one that is still below init does not.
        let still = self.processes(*init)?;
        drifted.retain(|(pid, _)| still.contains(pid));
        let describe = |(pid, left): (Pid, String)| Drift {
            host_pid: pid.as_raw_nonzero().get(),
            program: process::program_name(pid),
            left,
        };
        Ok(drifted.into_iter().map(describe).collect())
    }

    /// Init and the processes below it. As long as the tool lives, the id of init is not that of another.
    fn processes(&self, init: Pid) -> Result<Vec<Pid>, Error> {
        if !process::descendants(self.tool)?.contains(&init) {
            return Ok(Vec::new());
        }
        let mut below = process::descendants(init)?;
        below.truncate(MAX_PROCESSES);
        below.push(init);
        Ok(below)
    }
}

fn find_init(tool: Pid) -> Option<(Pid, Place)> {
    let init = process::first_of_namespace(&process::descendants(tool).ok()?)?;
    Some((init, Place::of(init).ok()?))
}
