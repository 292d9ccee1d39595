//! The CPUs that a cgroup may use. Its processes can choose among them, but not leave them.

use std::collections::BTreeSet;

use rustix::io::Errno;

use super::{
    controller::{Controller, Version},
    group::Group,
    group_dir::GroupDir,
    hierarchy::Hierarchy,
};
use crate::Error;

impl Group {
    /// Limits the cgroup to these CPUs.
    ///
    /// # Errors
    /// One of them is not available here.
    pub fn limit_cpus(&mut self, hierarchy: &Hierarchy, cpus: &[u32]) -> Result<(), Error> {
        let group = self.add_controller(hierarchy, Controller::Cpuset)?;
        let list: Vec<_> = cpus.iter().map(u32::to_string).collect();
        let effective = match group.version {
            Version::V1 => {
                // A new version 1 cgroup has no memory nodes, and no process can enter it then.
                let parent = GroupDir {
                    path: group.path.parent().unwrap_or(&group.path).to_owned(),
                    version: Version::V1,
                };
                group.write("cpuset.mems", parent.read("cpuset.mems")?.trim())?;
                group.write("cpuset.cpus", list.join(","))?;
                group.read("cpuset.cpus")?
            }
            Version::V2 => {
                group.write("cpuset.cpus", list.join(","))?;
                group.read("cpuset.cpus.effective")?
            }
        };
        // Version 2 accepts CPUs that the parent lacks, and then uses others.
        if parse_cpu_list(&effective) != Some(cpus.iter().copied().collect()) {
            return Err(Error::new("set the CPUs of cgroup", &group.path, Errno::NODEV));
        }
        Ok(())
    }
}

/// Parses the kernel's list format, such as `0-2,5`.
fn parse_cpu_list(list: &str) -> Option<BTreeSet<u32>> {
    let mut cpus = BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_list_is_parsed() {
        assert_eq!(parse_cpu_list("0-2,5\n"), Some([0, 1, 2, 5].into()));
        assert_eq!(parse_cpu_list("3"), Some([3].into()));
        assert_eq!(parse_cpu_list(""), None);
    }
}
