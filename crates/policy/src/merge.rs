//! Merging of policies: the result allows what both allow.
//!
//! Merging only tightens and is associative. An absent field has no effect.

use std::{collections::BTreeSet, path::PathBuf};

use crate::{
    CommandPolicy, ContainerPolicy, EnvironmentPolicy, FilesystemMode, FilesystemPolicy, LimitsRequest,
    LoggingPolicy, NetworkPolicy, PathTrie, Policy, ProcessPolicy, ResourcePolicy, SyscallMode,
    SyscallPolicy, egress::DEFAULT_EGRESS_PORTS, hosts, plan::DEFAULT_VIOLATION_LIMIT,
};
use codelia_types::NetworkMode;

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

    /// Merges the policy below into this one. The result allows what both allow; its lists are sorted.
    #[must_use]
    pub fn merge(&self, lower: &Self) -> Self {
        Self {
            isolation_level: self.isolation_level.max(lower.isolation_level),
            filesystem: self.filesystem.merge(&lower.filesystem),
            layout: self.layout.merge(&lower.layout),
            container: self.container.merge(&lower.container),
            process: self.process.merge(&lower.process),
            network: self.network.merge(&lower.network),
            resources: self.resources.merge(&lower.resources),
            syscalls: self.syscalls.merge(&lower.syscalls),
            environment: self.environment.merge(&lower.environment),
            command: self.command.merge(&lower.command),
            logging: self.logging.merge(&lower.logging),
            // Only scopes delegate: see `Scopes`.
            delegate: Vec::new(),
        }
    }

    /// This policy with every absent field that a lower policy could loosen set to its default. After
    /// this, a lower policy can only tighten.
    #[must_use]
    pub fn with_defaults(mut self) -> Self {
        self = self.as_installation();
        self.process.debug.get_or_insert(false);
        self.syscalls.violation_limit.get_or_insert(DEFAULT_VIOLATION_LIMIT);
        self
    }

    /// The resource maximums of this policy, as limits.
    #[must_use]
    pub fn caps(&self) -> LimitsRequest {
        let resources = &self.resources;
        LimitsRequest {
            timeout: resources.max_wall_time,
            memory_bytes: resources.max_memory_bytes,
            cpu_millicores: resources.max_cpu_millicores,
            // The kernel counts processes and threads together.
            pids: min(self.process.max_processes, resources.max_threads),
            open_files: resources.max_open_files,
            output_bytes: resources.max_output_bytes,
            cpu_time: resources.max_cpu_time,
            file_bytes: self.filesystem.max_file_bytes,
            tmp_bytes: resources.max_tmp_bytes,
            disk_bytes: self.filesystem.max_total_bytes,
            inodes: self.filesystem.max_inodes,
        }
    }
}

impl FilesystemPolicy {
    fn merge(&self, lower: &Self) -> Self {
        // No mode is less strict than any.
        let mode = self.mode.max(lower.mode);
        // Only equal paths: the command could have replaced a path below a writable one with a symlink.
        let read_write = intersect(&self.read_write_paths, &lower.read_write_paths, equal);
        // Only equal paths: a session's changes belong to one path, not to paths above or below it.
        let overlay = intersect(&self.overlay_paths, &lower.overlay_paths, equal);
        Self {
            mode,
            root_path: self.root_path.clone().or_else(|| lower.root_path.clone()),
            read_only_paths: intersect(&self.read_only_paths, &lower.read_only_paths, below),
            read_write_paths: if mode.is_some() { Some(Vec::new()) } else { read_write },
            overlay_paths: if mode == Some(FilesystemMode::Dynamic) { Some(Vec::new()) } else { overlay },
            denied_paths: union(&self.denied_paths, &lower.denied_paths),
            max_file_bytes: min(self.max_file_bytes, lower.max_file_bytes),
            max_total_bytes: min(self.max_total_bytes, lower.max_total_bytes),
            max_inodes: min(self.max_inodes, lower.max_inodes),
            volumes: intersect(&self.volumes, &lower.volumes, equal),
        }
    }
}

impl ContainerPolicy {
    fn merge(&self, lower: &Self) -> Self {
        Self { profile: self.profile.clone().or_else(|| lower.profile.clone()) }
    }
}

impl ProcessPolicy {
    fn merge(&self, lower: &Self) -> Self {
        Self {
            max_processes: min(self.max_processes, lower.max_processes),
            // `false` is less than `true`.
            allow_fork: min(self.allow_fork, lower.allow_fork),
            allow_exec: min(self.allow_exec, lower.allow_exec),
            allowed_executables: intersect(&self.allowed_executables, &lower.allowed_executables, equal),
            debug: min(self.debug, lower.debug),
        }
    }
}

impl NetworkPolicy {
    fn merge(&self, lower: &Self) -> Self {
        let hosts = match (HostLists::of(self), HostLists::of(lower)) {
            (Some(upper), Some(lower)) => Some(upper.merge(&lower)),
            (upper, lower) => upper.or(lower),
        };
        let (allowed_hosts, ask_hosts) = hosts.map(HostLists::into_fields).unzip();
        let blocked = |policy: &Self| hosts::expand(&policy.blocked_hosts);
        Self {
            mode: min(self.mode, lower.mode),
            allowed_hosts,
            ask_hosts: ask_hosts.flatten(),
            blocked_hosts: hosts::normalized([blocked(self), blocked(lower)].concat()),
            allowed_ports: intersect(&self.allowed_ports, &lower.allowed_ports, equal),
            max_connections: min(self.max_connections, lower.max_connections),
            max_connections_per_second: min(
                self.max_connections_per_second,
                lower.max_connections_per_second,
            ),
            max_sent_bytes: min(self.max_sent_bytes, lower.max_sent_bytes),
            max_received_bytes: min(self.max_received_bytes, lower.max_received_bytes),
            idle_timeout: min(self.idle_timeout, lower.idle_timeout),
            credentials: intersect(&self.credentials, &lower.credentials, equal),
            executables: intersect(&self.executables, &lower.executables, equal),
        }
    }

    /// Patterns of the hosts that this policy permits, at least after a decision, or `None` if it
    /// leaves them to other policies.
    pub(crate) fn permitted_hosts(&self) -> Option<Vec<String>> {
        HostLists::of(self).map(|lists| lists.permitted)
    }
}

/// The hosts of a policy, by what it permits at least. What it blocks is separate.
#[derive(Debug)]
struct HostLists {
    allowed: Vec<String>,
    /// Those that are allowed, and those that need a decision.
    permitted: Vec<String>,
}

impl HostLists {
    /// `None` if the policy has neither list. If it has one, the other is empty.
    fn of(policy: &NetworkPolicy) -> Option<Self> {
        policy.allowed_hosts.as_ref().or(policy.ask_hosts.as_ref())?;
        let expand = |list: &Option<Vec<String>>| hosts::expand(list.as_deref().unwrap_or_default());
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

impl ResourcePolicy {
    fn merge(&self, lower: &Self) -> Self {
        Self {
            max_cpu_time: min(self.max_cpu_time, lower.max_cpu_time),
            max_cpu_millicores: min(self.max_cpu_millicores, lower.max_cpu_millicores),
            max_wall_time: min(self.max_wall_time, lower.max_wall_time),
            max_memory_bytes: min(self.max_memory_bytes, lower.max_memory_bytes),
            max_open_files: min(self.max_open_files, lower.max_open_files),
            max_threads: min(self.max_threads, lower.max_threads),
            max_output_bytes: min(self.max_output_bytes, lower.max_output_bytes),
            max_tmp_bytes: min(self.max_tmp_bytes, lower.max_tmp_bytes),
            max_read_bytes_per_second: min(self.max_read_bytes_per_second, lower.max_read_bytes_per_second),
            max_write_bytes_per_second: min(
                self.max_write_bytes_per_second,
                lower.max_write_bytes_per_second,
            ),
            max_reads_per_second: min(self.max_reads_per_second, lower.max_reads_per_second),
            max_writes_per_second: min(self.max_writes_per_second, lower.max_writes_per_second),
            cpus: intersect(&self.cpus, &lower.cpus, equal),
            // The longer interval reveals less.
            release_interval: self.release_interval.max(lower.release_interval),
        }
    }
}

impl SyscallPolicy {
    fn merge(&self, lower: &Self) -> Self {
        use SyscallMode::{Allow, Deny};
        let without = |names: &[String], denied: &[String]| {
            let is_denied = equal(denied);
            names.iter().filter(|name| !is_denied(name)).cloned().collect::<Vec<_>>()
        };
        let (mode, names) = match (self.mode, lower.mode) {
            (mode, None) => (mode, self.names.clone()),
            (None, mode) => (mode, lower.names.clone()),
            (Some(Deny), Some(Deny)) => (Some(Deny), union(&self.names, &lower.names)),
            (Some(Allow), Some(Deny)) => (Some(Allow), without(&self.names, &lower.names)),
            (Some(Deny), Some(Allow)) => (Some(Allow), without(&lower.names, &self.names)),
            (Some(Allow), Some(Allow)) => {
                let is_allowed = equal(&lower.names);
                (Some(Allow), self.names.iter().filter(|name| is_allowed(name)).cloned().collect())
            }
        };
        let violation_limit = min(self.violation_limit, lower.violation_limit);
        Self { mode, names: sorted(names), violation_limit }
    }
}

impl EnvironmentPolicy {
    fn merge(&self, lower: &Self) -> Self {
        Self { mode: self.mode.max(lower.mode), names: intersect(&self.names, &lower.names, equal) }
    }
}

impl CommandPolicy {
    fn merge(&self, lower: &Self) -> Self {
        Self {
            allowed_patterns: intersect(&self.allowed_patterns, &lower.allowed_patterns, equal),
            blocked_patterns: union(&self.blocked_patterns, &lower.blocked_patterns),
            max_length: min(self.max_length, lower.max_length),
        }
    }
}

impl LoggingPolicy {
    fn merge(&self, lower: &Self) -> Self {
        // What one policy wants to be logged is logged.
        Self {
            signals: self.signals.max(lower.signals),
            file_operations: self.file_operations.max(lower.file_operations),
        }
    }
}

/// The smaller of the values that are present.
fn min<T: Ord + Copy>(a: Option<T>, b: Option<T>) -> Option<T> {
    a.into_iter().chain(b).min()
}

/// Whether a list covers an item. Built once for each list, so that the list is not searched for each
/// item.
type Covers<'a, T> = Box<dyn Fn(&T) -> bool + 'a>;

/// Covers equal items.
fn equal<T: Ord>(list: &[T]) -> Covers<'_, T> {
    let items: BTreeSet<_> = list.iter().collect();
    Box::new(move |item| items.contains(item))
}

/// Covers the paths of the list and those below them.
fn below(list: &[PathBuf]) -> Covers<'_, PathBuf> {
    let paths: PathTrie<_> = list.iter().collect();
    Box::new(move |path| paths.covers(path))
}

/// The paths that both lists cover: theirs, and those below.
pub(crate) fn intersect_below(a: &Option<Vec<PathBuf>>, b: &Option<Vec<PathBuf>>) -> Option<Vec<PathBuf>> {
    intersect(a, b, below)
}

/// The items that both lists cover. An absent list covers everything.
fn intersect<T: Ord + Clone>(
    a: &Option<Vec<T>>,
    b: &Option<Vec<T>>,
    covers: impl for<'a> Fn(&'a [T]) -> Covers<'a, T>,
) -> Option<Vec<T>> {
    let (Some(a), Some(b)) = (a, b) else {
        return a.as_ref().or(b.as_ref()).map(|list| sorted(list.clone()));
    };
    let (in_a, in_b) = (covers(a), covers(b));
    let both = a.iter().chain(b).filter(|item| in_a(item) && in_b(item));
    Some(sorted(both.cloned().collect()))
}

/// The items of both lists.
fn union<T: Ord + Clone>(a: &[T], b: &[T]) -> Vec<T> {
    sorted(a.iter().chain(b).cloned().collect())
}

fn sorted<T: Ord>(mut list: Vec<T>) -> Vec<T> {
    list.sort();
    list.dedup();
    list
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

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

    proptest! {
        #[test]
        fn intersection_equals_pairwise_comparison(
            a in lists(&["/a", "/a/b", "/a/b/c", "/a-b", "/ab", "/b"]),
            b in lists(&["/a", "/a/b", "/a-b/c", "/ab", "/b"]),
        ) {
            let paths = |list: &[String]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
            let (a, b) = (paths(&a), paths(&b));
            let is_below = |path: &PathBuf, upper: &PathBuf| path.starts_with(upper);
            let expected = pairwise(&a, &b, is_below);
            prop_assert_eq!(intersect(&Some(a), &Some(b), below), Some(expected));
        }
    }

    fn lists(items: &'static [&'static str]) -> impl Strategy<Value = Vec<String>> {
        vec(select(items).prop_map(str::to_owned), 0..5)
    }

    fn pairwise<T: Ord + Clone>(a: &[T], b: &[T], is_covered: impl Fn(&T, &T) -> bool) -> Vec<T> {
        let covered = |list: &[T], item: &T| list.iter().any(|upper| is_covered(item, upper));
        sorted(a.iter().chain(b).filter(|item| covered(a, item) && covered(b, item)).cloned().collect())
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
        let merged =
            |upper: &str, lower: &str| network(upper).as_installation().merge(&network(lower)).network;
        let closed =
            merged("{mode: proxy}", "{allowed_hosts: [a.x], allowed_ports: [22, 443], credentials: [c]}");
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
