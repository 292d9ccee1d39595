//! Validation of the network part of a policy.

use std::{ops::RangeInclusive, time::Duration};

use super::{
    error::{PolicyError, check_range, fail, fail_at},
    field::check_path,
};
use crate::{HOST_SETS, NetworkPolicy, host_sets, hosts};

/// Connections that the egress proxy can hold for one sandbox.
const CONNECTIONS: RangeInclusive<u64> = 1..=4096;
const CONNECTIONS_PER_SECOND: RangeInclusive<u64> = 1..=1000;
/// The API cannot express more.
const BYTES: RangeInclusive<u64> = 1..=i64::MAX.unsigned_abs();
const IDLE_TIMEOUTS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
const MAX_CREDENTIAL_NAME: usize = 63;

impl NetworkPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        self.validate_hosts()?;
        self.validate_limits()?;
        self.validate_names()
    }

    fn validate_hosts(&self) -> Result<(), PolicyError> {
        for (field, list) in self.host_lists() {
            for (at, entry) in list.iter().enumerate() {
                let field = || format!("{field}[{at}]");
                match entry.strip_prefix(host_sets::PREFIX) {
                    Some(name) if host_sets::find(name).is_none() => {
                        let names: Vec<_> = HOST_SETS.iter().map(|set| set.name).collect();
                        return fail(
                            field(),
                            format!("unknown set {name:?} (known: {})", names.join(", ")),
                        );
                    }
                    None if !hosts::is_pattern(entry) => return fail(field(), hosts::EXPECTED),
                    _ => {}
                }
            }
        }
        let ports = self.allowed_ports.as_deref().unwrap_or_default();
        let zero = ports.iter().position(|port| *port == 0);
        fail_at("network.allowed_ports", zero, "must be more than zero")
    }

    fn validate_limits(&self) -> Result<(), PolicyError> {
        for (field, value, range) in [
            ("network.max_connections", self.max_connections.map(u64::from), CONNECTIONS),
            (
                "network.max_connections_per_second",
                self.max_connections_per_second.map(u64::from),
                CONNECTIONS_PER_SECOND,
            ),
            ("network.max_sent_bytes", self.max_sent_bytes, BYTES),
            ("network.max_received_bytes", self.max_received_bytes, BYTES),
        ] {
            check_range(field, value, &range)?;
        }
        match self.idle_timeout {
            Some(timeout) if !IDLE_TIMEOUTS.contains(&timeout) => {
                fail("network.idle_timeout", "must be from 1s to 1h")
            }
            _ => Ok(()),
        }
    }

    fn validate_names(&self) -> Result<(), PolicyError> {
        let is_name = |name: &String| {
            (1..=MAX_CREDENTIAL_NAME).contains(&name.len())
                && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
        };
        let names = self.credentials.as_deref().unwrap_or_default();
        let invalid = names.iter().position(|name| !is_name(name));
        fail_at("network.credentials", invalid, "must match [a-z0-9_-]{1,63}")?;
        for (at, program) in self.executables.iter().flatten().enumerate() {
            check_path(&format!("network.executables[{at}]"), program)?;
        }
        Ok(())
    }
}
