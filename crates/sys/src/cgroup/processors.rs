//! Which processors a group may use. Its processes may choose among them and cannot choose others.

use std::collections::BTreeSet;

use rustix::io::Errno;

use super::{Controller, Group, Hierarchy, Version};
use crate::Error;

impl Group {
    /// Holds it to these processors.
    ///
    /// # Errors
    /// One of them cannot be had here.
    pub fn limit_cpus(&mut self, hierarchy: &Hierarchy, processors: &[u32]) -> Result<(), Error> {
        let leaf = self.add_later(hierarchy, Controller::Cpuset)?;
        let list: Vec<_> = processors.iter().map(u32::to_string).collect();
        let held = match leaf.version {
            Version::One => {
                // A group of version 1 has no memory either until it is told.
                let above = super::leaf::Leaf {
                    dir: leaf.dir.parent().unwrap_or(&leaf.dir).to_owned(),
                    version: Version::One,
                };
                leaf.write("cpuset.mems", above.read("cpuset.mems")?.trim())?;
                leaf.write("cpuset.cpus", list.join(","))?;
                leaf.read("cpuset.cpus")?
            }
            Version::Two => {
                leaf.write("cpuset.cpus", list.join(","))?;
                leaf.read("cpuset.cpus.effective")?
            }
        };
        // In version 2 the kernel takes what it cannot give, and gives something else.
        if numbers(&held) != Some(processors.iter().copied().collect()) {
            return Err(Error::new("have the processors in", &leaf.dir, Errno::NODEV));
        }
        Ok(())
    }
}

/// A list of the kernel's, such as `0-2,5`.
fn numbers(list: &str) -> Option<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        found.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_the_kernels_is_understood() {
        assert_eq!(numbers("0-2,5\n"), Some([0, 1, 2, 5].into()));
        assert_eq!(numbers("3"), Some([3].into()));
        assert_eq!(numbers(""), None);
    }
}
