//! The sockets of a sandbox in network mode `proxy`: what `codelia-init` is asked for, and what it
//! sends back.

use std::os::fd::OwnedFd;

use codelia_init::Egress;
use codelia_policy::{EGRESS_NETWORKS, EGRESS_PROXY, EGRESS_RESOLVER, EGRESS_TARGETS};

use crate::{EgressSockets, Error, sandbox::control::Control};

/// Sockets next to the targets.
const SERVERS: usize = 3;

/// The request for the network that `codelia-init` makes.
pub(crate) fn request() -> Egress {
    Egress {
        proxy: EGRESS_PROXY,
        resolver: EGRESS_RESOLVER,
        networks: EGRESS_NETWORKS.to_vec(),
        targets: EGRESS_TARGETS,
    }
}

/// Takes the sockets that came with a report.
pub(crate) fn take(control: &mut Control) -> Result<EgressSockets, Error> {
    let sockets = (0..SERVERS + EGRESS_TARGETS).map(|_| control.take_descriptor());
    sockets.collect::<Result<Vec<_>, _>>().and_then(sort)
}

/// Sorts the sockets by their order.
pub(crate) fn sort(sockets: Vec<OwnedFd>) -> Result<EgressSockets, Error> {
    let mut sockets = sockets.into_iter();
    match (sockets.next(), sockets.next(), sockets.next(), sockets.len()) {
        (Some(proxy), Some(resolver_udp), Some(resolver_tcp), EGRESS_TARGETS) => {
            Ok(EgressSockets { proxy, resolver_udp, resolver_tcp, targets: sockets.collect() })
        }
        _ => Err(Error::UnexpectedMessage),
    }
}
