//! Validation of the network part of a policy, and host patterns.

use std::collections::HashSet;

use codelia_types::NetworkMode;

use super::{PolicyError, fail};
use crate::NetworkPolicy;

/// The largest number of connections that the API can express.
const MAX_CONNECTIONS: u32 = i32::MAX.unsigned_abs();

impl NetworkPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        if self.mode != Some(NetworkMode::Proxy) {
            let set = [
                ("network.allowed_hosts", self.allowed_hosts.is_some()),
                ("network.allowed_ports", self.allowed_ports.is_some()),
                ("network.max_connections", self.max_connections.is_some()),
            ];
            if let Some((field, _)) = set.into_iter().find(|(_, set)| *set) {
                return fail(field, "needs network.mode: proxy");
            }
        }
        self.validate_lists()
    }

    fn validate_lists(&self) -> Result<(), PolicyError> {
        let hosts = self.allowed_hosts.as_deref().unwrap_or_default();
        if let Some(at) = hosts.iter().position(|host| !is_host(host)) {
            return fail(
                format!("network.allowed_hosts[{at}]"),
                "must be a lower-case host name, or `*.` and one",
            );
        }
        let ports = self.allowed_ports.as_deref().unwrap_or_default();
        match ports.iter().position(|port| *port == 0) {
            Some(at) => fail(format!("network.allowed_ports[{at}]"), "must be more than zero"),
            None if self.max_connections.is_some_and(|max| max == 0 || max > MAX_CONNECTIONS) => {
                fail("network.max_connections", format!("must be from 1 to {MAX_CONNECTIONS}"))
            }
            None => Ok(()),
        }
    }
}

/// Whether the text is a lower-case host name, or `*.` and one for all names below it.
fn is_host(text: &str) -> bool {
    let name = text.strip_prefix("*.").unwrap_or(text);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// Host patterns, to find out whether one of them matches everything that another pattern matches.
pub(crate) struct HostPatterns<'a> {
    exact: HashSet<&'a str>,
    /// The patterns that start with `*.`, without the star.
    suffixes: HashSet<&'a str>,
}

impl<'a> HostPatterns<'a> {
    pub(crate) fn new(patterns: &'a [String]) -> Self {
        let suffixes = patterns.iter().filter_map(|pattern| pattern.strip_prefix('*'));
        Self { exact: patterns.iter().map(String::as_str).collect(), suffixes: suffixes.collect() }
    }

    /// Whether one pattern matches every host that `lower` matches: `*.example.com` covers
    /// `a.example.com` and `*.a.example.com`, not `example.com`.
    pub(crate) fn cover(&self, lower: &str) -> bool {
        let name = lower.strip_prefix('*').unwrap_or(lower);
        let mut suffixes = name.match_indices('.').filter(|(at, _)| *at > 0).map(|(at, _)| &name[at..]);
        self.exact.contains(lower) || suffixes.any(|suffix| self.suffixes.contains(suffix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_covers_names_below_it_only() {
        let covers = |upper: &str, lower| HostPatterns::new(&[upper.to_owned()]).cover(lower);
        assert!(covers("*.example.com", "a.b.example.com"));
        assert!(covers("*.example.com", "*.a.example.com"));
        assert!(covers("*.example.com", "*.example.com"));
        assert!(!covers("*.example.com", "example.com"));
        assert!(!covers("*.example.com", "aexample.com"));
        assert!(!covers("*.a.example.com", "*.example.com"));
        assert!(!covers("example.com", "a.example.com"));
    }
}
