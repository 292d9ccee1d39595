//! Named sets of hosts, which host lists of policies include as `set:NAME`.

/// The start of an entry that names a set.
pub(crate) const PREFIX: &str = "set:";

/// A named set of hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostSet {
    /// The name, as in `set:NAME`.
    pub name: &'static str,
    /// The use of the hosts, for people.
    pub purpose: &'static str,
    hosts: &'static [&'static str],
    /// Names of other sets whose hosts belong to this one.
    includes: &'static [&'static str],
}

/// All sets. A host is in one of them only; others include that set.
pub const HOST_SETS: &[HostSet] = &[
    HostSet {
        name: "npm",
        purpose: "npm and Yarn packages",
        hosts: &["*.npmjs.org", "*.npmjs.com", "registry.yarnpkg.com"],
        includes: &[],
    },
    HostSet {
        name: "pypi",
        purpose: "Python packages",
        // `*.pypi.org` does not match `pypi.org`, and pip downloads files from pythonhosted.org.
        hosts: &["pypi.org", "*.pypi.org", "pypi.python.org", "files.pythonhosted.org"],
        includes: &[],
    },
    HostSet {
        name: "crates",
        purpose: "Rust crates",
        hosts: &["crates.io", "*.crates.io"],
        includes: &[],
    },
    HostSet {
        name: "rubygems",
        purpose: "Ruby gems",
        hosts: &["rubygems.org", "*.rubygems.org"],
        includes: &[],
    },
    HostSet {
        name: "git",
        purpose: "public Git repositories",
        hosts: &[
            "github.com",
            "*.github.com",
            "gitlab.com",
            "*.gitlab.com",
            "bitbucket.org",
            "*.bitbucket.org",
        ],
        includes: &[],
    },
    HostSet {
        name: "cdn",
        purpose: "public content networks of packages",
        hosts: &["*.cloudflare.com", "*.jsdelivr.net", "unpkg.com", "*.unpkg.com"],
        includes: &[],
    },
    HostSet {
        name: "registries",
        purpose: "all package registries, Git hosts and content networks above",
        hosts: &[],
        includes: &["npm", "pypi", "crates", "rubygems", "git", "cdn"],
    },
    HostSet {
        name: "local",
        purpose: "names of local networks, to block",
        hosts: &["localhost", "*.localhost", "*.local", "*.internal"],
        includes: &[],
    },
];

impl HostSet {
    /// The patterns of the set.
    pub fn hosts(&self) -> impl Iterator<Item = &'static str> {
        let included = self.includes.iter().filter_map(|name| find(name)).flat_map(|set| set.hosts);
        self.hosts.iter().chain(included).copied()
    }
}

/// The set of this name.
pub(crate) fn find(name: &str) -> Option<&'static HostSet> {
    HOST_SETS.iter().find(|set| set.name == name)
}

/// The patterns of the set of this name. Empty if the set is unknown.
pub(crate) fn hosts(name: &str) -> impl Iterator<Item = &'static str> {
    find(name).into_iter().flat_map(HostSet::hosts)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::hosts::is_pattern;

    #[test]
    fn every_host_is_valid_and_in_one_set() {
        let all: Vec<_> = HOST_SETS.iter().flat_map(|set| set.hosts).collect();
        assert!(all.iter().all(|host| is_pattern(host)), "{all:?}");
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        assert!(HOST_SETS.iter().flat_map(|set| set.includes).all(|name| find(name).is_some()));
        assert!(HOST_SETS.iter().all(|set| set.hosts().count() > 0));
    }

    #[test]
    fn registries_include_the_default_list() {
        let hosts: BTreeSet<_> = hosts("registries").collect();
        for host in
            ["*.npmjs.org", "registry.yarnpkg.com", "*.pypi.org", "*.crates.io", "*.github.com"]
        {
            assert!(hosts.contains(host), "{host}");
        }
        assert!(!hosts.contains("*.local"));
        assert_eq!(super::hosts("nothing").count(), 0);
    }
}
