//! Validation of the network part of a policy, and host patterns.

use codelia_types::NetworkMode;

use super::{
    PolicyError, fail,
    field::{MAX_ENTRIES, check_entries},
};
use crate::NetworkPolicy;

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
        check_entries("network.allowed_hosts", hosts.len(), MAX_ENTRIES)?;
        if let Some(at) = hosts.iter().position(|host| !is_host(host)) {
            return fail(
                format!("network.allowed_hosts[{at}]"),
                "must be a lower-case host name, or `*.` and one",
            );
        }
        let ports = self.allowed_ports.as_deref().unwrap_or_default();
        check_entries("network.allowed_ports", ports.len(), MAX_ENTRIES)?;
        match ports.iter().position(|port| *port == 0) {
            Some(at) => fail(format!("network.allowed_ports[{at}]"), "must be more than zero"),
            None if self.max_connections == Some(0) => {
                fail("network.max_connections", "must be more than zero")
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

/// Whether the pattern `upper` matches every host that `lower` matches.
pub(crate) fn host_covers(upper: &str, lower: &str) -> bool {
    match upper.strip_prefix('*') {
        // `*.example.com` covers `a.example.com` and `*.a.example.com`, not `example.com`.
        Some(suffix) => {
            upper == lower
                || lower.strip_prefix('*').unwrap_or(lower).len() > suffix.len() && lower.ends_with(suffix)
        }
        None => upper == lower,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_covers_names_below_it_only() {
        assert!(host_covers("*.example.com", "a.b.example.com"));
        assert!(host_covers("*.example.com", "*.a.example.com"));
        assert!(host_covers("*.example.com", "*.example.com"));
        assert!(!host_covers("*.example.com", "example.com"));
        assert!(!host_covers("*.a.example.com", "*.example.com"));
        assert!(!host_covers("example.com", "a.example.com"));
    }
}
