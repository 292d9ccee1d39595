//! Merges policies, and the fields that depend on each other.

use codelia_types::NetworkMode;

use super::values::{items, sorted, union};
use crate::{
    FilesystemMode, FilesystemPolicy, NetworkPolicy, Policy, SyscallMode, SyscallPolicy,
    egress::DEFAULT_EGRESS_PORTS, hosts, plan::DEFAULT_VIOLATION_LIMIT,
};

impl Policy {
    /// The policy of an installation whose operator configured none: it opens no host path.
    #[must_use]
    pub fn installation() -> Self {
        Self::default().as_installation()
    }

    /// This policy as that of an installation: host paths and credentials that it does not list are
    /// closed. If it sets mode `proxy`, the same holds for hosts and ports.
    #[must_use]
    pub fn as_installation(mut self) -> Self {
        self.filesystem.read_only_paths.get_or_insert_default();
        self.filesystem.read_write_paths.get_or_insert_default();
        self.filesystem.overlay_paths.get_or_insert_default();
        self.network.credentials.get_or_insert_default();
        if self.network.mode == Some(NetworkMode::Proxy) {
            self.network.allowed_hosts.get_or_insert_default();
            self.network.allowed_ports.get_or_insert_with(|| DEFAULT_EGRESS_PORTS.to_vec());
        }
        self
    }

    /// Merges the policy below into this one. The result allows what both allow; its lists are
    /// sorted.
    #[must_use]
    pub fn merge(&self, lower: &Self) -> Self {
        let mut merged = self.merge_fields(lower);
        merged.filesystem.close_writable_paths();
        merged.layout.directories = self.layout.merge_directories(&lower.layout);
        (merged.network.allowed_hosts, merged.network.ask_hosts) =
            self.network.merge_hosts(&lower.network);
        (merged.syscalls.mode, merged.syscalls.names) = self.syscalls.merge_names(&lower.syscalls);
        merged
    }

    /// This policy with every absent field that a lower policy could loosen set to its default.
    /// After this, a lower policy can only tighten.
    #[must_use]
    pub fn with_defaults(mut self) -> Self {
        self = self.as_installation();
        self.process.debug.get_or_insert(false);
        self.syscalls.violation_limit.get_or_insert(DEFAULT_VIOLATION_LIMIT);
        self
    }
}

impl FilesystemPolicy {
    /// Closes the paths that the mode does not let a command change.
    fn close_writable_paths(&mut self) {
        if self.mode.is_some() {
            self.read_write_paths = Some(Vec::new());
        }
        if self.mode == Some(FilesystemMode::Dynamic) {
            self.overlay_paths = Some(Vec::new());
        }
    }
}

impl NetworkPolicy {
    /// `allowed_hosts` and `ask_hosts` of both policies.
    fn merge_hosts(&self, lower: &Self) -> (Option<Vec<String>>, Option<Vec<String>>) {
        let merged = match (HostLists::from_policy(self), HostLists::from_policy(lower)) {
            (Some(upper), Some(lower)) => Some(upper.merge(&lower)),
            (upper, lower) => upper.or(lower),
        };
        let (allowed, ask) = merged.map(HostLists::into_fields).unzip();
        (allowed, ask.flatten())
    }

    /// Patterns of the hosts that this policy permits, at least after a decision, or `None` if it
    /// leaves them to other policies.
    pub(crate) fn permitted_hosts(&self) -> Option<Vec<String>> {
        HostLists::from_policy(self).map(|lists| lists.permitted)
    }
}

/// The hosts of a policy, by what it permits at least. What it blocks is separate.
#[derive(Debug)]
struct HostLists {
    allowed: Vec<String>,
    /// Hosts that are allowed, and hosts that need a decision.
    permitted: Vec<String>,
}

impl HostLists {
    /// `None` if the policy has neither list. If it has one, the other is empty.
    fn from_policy(policy: &NetworkPolicy) -> Option<Self> {
        policy.allowed_hosts.as_ref().or(policy.ask_hosts.as_ref())?;
        let expand =
            |list: &Option<Vec<String>>| hosts::expand(list.as_deref().unwrap_or_default());
        let allowed = hosts::normalized(expand(&policy.allowed_hosts));
        let permitted = hosts::normalized([allowed.clone(), expand(&policy.ask_hosts)].concat());
        Some(Self { allowed, permitted })
    }

    /// For each host, the lesser permission of both.
    fn merge(&self, lower: &Self) -> Self {
        Self {
            allowed: hosts::intersect(&self.allowed, &lower.allowed),
            permitted: hosts::intersect(&self.permitted, &lower.permitted),
        }
    }

    /// `allowed_hosts` and `ask_hosts`.
    fn into_fields(self) -> (Vec<String>, Option<Vec<String>>) {
        let ask = hosts::not_covered(self.permitted, &self.allowed);
        (self.allowed, (!ask.is_empty()).then_some(ask))
    }
}

impl SyscallPolicy {
    /// `mode` and `names` of both policies.
    fn merge_names(&self, lower: &Self) -> (Option<SyscallMode>, Vec<String>) {
        use SyscallMode::{Allow, Deny};
        let without = |names: &[String], denied: &[String]| {
            let is_denied = items(denied);
            names.iter().filter(|name| !is_denied(name)).cloned().collect::<Vec<_>>()
        };
        let (mode, names) = match (self.mode, lower.mode) {
            (mode, None) => (mode, self.names.clone()),
            (None, mode) => (mode, lower.names.clone()),
            (Some(Deny), Some(Deny)) => (Some(Deny), union(&self.names, &lower.names)),
            (Some(Allow), Some(Deny)) => (Some(Allow), without(&self.names, &lower.names)),
            (Some(Deny), Some(Allow)) => (Some(Allow), without(&lower.names, &self.names)),
            (Some(Allow), Some(Allow)) => {
                let is_allowed = items(&lower.names);
                (Some(Allow), self.names.iter().filter(|name| is_allowed(name)).cloned().collect())
            }
        };
        (mode, sorted(names))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn path_survives_if_both_cover_it() {
        let list = |paths: &[&str]| Some(paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        let of = |paths| {
            let mut policy = Policy::default();
            policy.filesystem.read_only_paths = list(paths);
            policy
        };
        let merged = of(&["/opt", "/srv/a"]).merge(&of(&["/opt/tools", "/srv", "/home"]));
        assert_eq!(merged.filesystem.read_only_paths, list(&["/opt/tools", "/srv/a"]));
    }

    #[test]
    fn absent_field_is_decided_by_other() {
        let mut strict = Policy::default();
        strict.process.allow_fork = Some(false);
        assert_eq!(Policy::default().merge(&strict), strict);
        assert_eq!(strict.merge(&Policy::default()), strict);
    }

    #[test]
    fn static_mode_removes_writable_paths() {
        let (mut writable, mut fixed) = (Policy::default(), Policy::default());
        writable.filesystem.read_write_paths = Some(vec!["/srv".into()]);
        fixed.filesystem.mode = Some(FilesystemMode::Static);
        for merged in [writable.merge(&fixed), fixed.merge(&writable)] {
            assert_eq!(merged.filesystem.mode, Some(FilesystemMode::Static));
            assert_eq!(merged.filesystem.read_write_paths, Some(Vec::new()));
        }
    }

    #[test]
    fn dynamic_mode_wins_and_removes_overlays() {
        let (mut overlaid, mut asking) = (Policy::default(), Policy::default());
        overlaid.filesystem.mode = Some(FilesystemMode::Static);
        overlaid.filesystem.overlay_paths = Some(vec!["/srv".into()]);
        asking.filesystem.mode = Some(FilesystemMode::Dynamic);
        for merged in [overlaid.merge(&asking), asking.merge(&overlaid)] {
            assert_eq!(merged.filesystem.mode, Some(FilesystemMode::Dynamic));
            assert_eq!(merged.filesystem.overlay_paths, Some(Vec::new()));
        }
    }

    fn network(yaml: &str) -> Policy {
        Policy::parse(&format!("network: {yaml}"), crate::Format::Yaml).unwrap()
    }

    #[test]
    fn host_moves_from_allowed_to_ask_only() {
        let upper = network("{allowed_hosts: [a.x, b.x, 'set:crates'], ask_hosts: ['*.y']}");
        let lower = network("{allowed_hosts: [a.x, a.y], ask_hosts: [b.x, c.z, 'crates.io']}");
        let expected = network("{allowed_hosts: [a.x], ask_hosts: [a.y, b.x, crates.io]}");
        assert_eq!(upper.merge(&lower), expected);
        assert_eq!(lower.merge(&upper), expected);
        let blocked = expected.merge(&network("{blocked_hosts: ['set:local', a.x]}"));
        assert_eq!(blocked.network.allowed_hosts, expected.network.allowed_hosts);
        assert_eq!(
            blocked.network.blocked_hosts,
            ["*.internal", "*.local", "*.localhost", "a.x", "localhost"]
        );
    }

    #[test]
    fn list_without_the_other_is_complete() {
        let upper = network("{allowed_hosts: [a.x, b.x]}");
        assert_eq!(
            upper.merge(&network("{ask_hosts: [b.x]}")),
            network("{allowed_hosts: [], ask_hosts: [b.x]}")
        );
        assert_eq!(
            network("{ask_hosts: ['*']}").merge(&upper),
            network("{allowed_hosts: [], ask_hosts: [a.x, b.x]}")
        );
    }

    #[test]
    fn mode_proxy_closes_hosts_that_it_does_not_list() {
        let merged = |upper: &str, lower: &str| {
            network(upper).as_installation().merge(&network(lower)).network
        };
        let closed = merged(
            "{mode: proxy}",
            "{allowed_hosts: [a.x], allowed_ports: [22, 443], credentials: [c]}",
        );
        assert_eq!(closed.allowed_hosts, Some(Vec::new()));
        assert_eq!(closed.allowed_ports, Some(vec![443]));
        assert_eq!(closed.credentials, Some(Vec::new()));
        let open = merged("{}", "{mode: proxy, allowed_hosts: [a.x], credentials: [c]}");
        assert_eq!(open.allowed_hosts, Some(vec!["a.x".to_owned()]));
        assert_eq!(open.credentials, Some(Vec::new()), "only the installation grants credentials");
    }

    #[test]
    fn run_cannot_loosen_session_defaults() {
        let mut wide = Policy::default();
        wide.process.debug = Some(true);
        wide.syscalls.violation_limit = Some(1000);
        wide.filesystem.read_only_paths = Some(vec!["/opt".into()]);
        let merged = Policy::default().with_defaults().merge(&wide);
        assert_eq!(merged, Policy::default().with_defaults());
    }
}
