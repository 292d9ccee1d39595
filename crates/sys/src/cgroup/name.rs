//! Names of cgroups. A name contains the identity of the process that created the cgroup, so that a
//! later process can remove the cgroups of a dead one.

use crate::{Error, process_id::ProcessId};

const PREFIX: &str = "codelia-";

/// The name of a cgroup that this process creates.
pub(super) fn owned_name(name: &str) -> Result<String, Error> {
    Ok(format!("{PREFIX}{}-{name}", ProcessId::current()?))
}

/// The process that created the cgroup of this name; `None` if it is not a process of ours.
pub(super) fn owner(name: &str) -> Option<ProcessId> {
    ProcessId::from_name_prefix(name.strip_prefix(PREFIX)?)
}
