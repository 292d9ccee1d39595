//! Counts open connections, in total and by source, and refuses those above the caps.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use codelia_telemetry::metrics;

use crate::{Limits, Source};

/// The open connections of one listener.
#[derive(Debug)]
pub(crate) struct Admission {
    max: usize,
    max_per_address: usize,
    by_source: Mutex<HashMap<Source, usize>>,
}

/// One open connection, until this is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    admission: Arc<Admission>,
    source: Source,
}

/// The cap that a connection would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cap {
    Total,
    PerAddress,
}

impl Cap {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Total => "max_connections",
            Self::PerAddress => "max_connections_per_address",
        }
    }
}

impl Admission {
    pub(crate) fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self {
            max: limits.max_connections,
            max_per_address: limits.max_connections_per_address,
            by_source: Mutex::default(),
        })
    }

    pub(crate) fn admit(self: &Arc<Self>, source: Source) -> Result<Permit, Cap> {
        let mut by_source = self.lock();
        if by_source.values().sum::<usize>() >= self.max {
            return Err(Cap::Total);
        }
        let open = by_source.get(&source).copied().unwrap_or(0);
        if source.0.is_some() && open >= self.max_per_address {
            return Err(Cap::PerAddress);
        }
        by_source.insert(source, open + 1);
        metrics().connections_changed(1);
        Ok(Permit { admission: self.clone(), source })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Source, usize>> {
        self.by_source.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        metrics().connections_changed(-1);
        let mut by_source = self.admission.lock();
        match by_source.get_mut(&self.source) {
            Some(open) if *open > 1 => *open -= 1,
            _ => drop(by_source.remove(&self.source)),
        }
    }
}

impl Source {
    /// The source of a connection from this address.
    pub(crate) fn from_address(address: Option<IpAddr>) -> Self {
        Self(address.map(|address| match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                IpAddr::V6(Ipv6Addr::from(network))
            }
            v4 @ IpAddr::V4(_) => v4,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(max: usize, max_per_address: usize) -> Arc<Admission> {
        Arc::new(Admission { max, max_per_address, by_source: Mutex::default() })
    }

    fn source(address: &str) -> Source {
        Source::from_address(Some(address.parse().unwrap()))
    }

    #[test]
    fn connections_are_capped_in_total_and_per_address() {
        let admission = admission(3, 2);
        let first = admission.admit(source("10.0.0.1")).unwrap();
        let _second = admission.admit(source("::ffff:10.0.0.1")).unwrap();
        assert_eq!(admission.admit(source("10.0.0.1")).unwrap_err(), Cap::PerAddress);
        let other = admission.admit(source("10.0.0.2")).unwrap();
        assert_eq!(admission.admit(source("10.0.0.3")).unwrap_err(), Cap::Total);
        drop((first, other));
        assert!(admission.admit(source("10.0.0.1")).is_ok());
        assert_eq!(admission.lock().len(), 1, "closed connections leave nothing");
    }

    #[test]
    fn ipv6_addresses_of_one_network_are_one_source() {
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:2"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
    }

    #[test]
    fn unix_sockets_have_no_cap_per_address() {
        let admission = admission(3, 1);
        let held: Vec<_> = (0..3).map_while(|_| admission.admit(Source(None)).ok()).collect();
        assert_eq!(held.len(), 3);
    }
}
