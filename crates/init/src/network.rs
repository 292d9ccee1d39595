//! The network of a sandbox whose only way out is a proxy outside. Nothing in it serves: its
//! sockets go to the backend, and no copy stays.
//!
//! `codelia-init --egress` does the same for a container, from outside and as root.

use std::{
    fs,
    io::{self, Stdin},
    os::fd::{AsFd, OwnedFd},
};

use codelia_init::{Egress, ExpectedEnvironment, ExpectedNamespace, Failure, Report, Step};
use codelia_sys::{Errno, network, proc_self};

use crate::{
    control::Control,
    failure::{at, at_io},
};

/// A command may use every port of a network that is its own.
const FIRST_FREE_PORT: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
/// A host may disable IPv6 for all new namespaces.
const DISABLE_IPV6: &str = "/proc/sys/net/ipv6/conf/lo/disable_ipv6";

/// Moves init into a new network and sends its sockets to the backend.
pub(crate) fn create(
    egress: &Egress,
    expected: &ExpectedEnvironment,
    control: &Control<Stdin>,
) -> Result<(), Failure> {
    network::unshare().map_err(at(Step::EnterNetwork))?;
    check(expected).map_err(at(Step::EnterNetwork))?;
    send_sockets(egress, control, &Report::Egress)
}

/// The settings below must never be the host's.
fn check(expected: &ExpectedEnvironment) -> Result<(), Errno> {
    match expected.namespaces.get("net") {
        Some(ExpectedNamespace::Not(host)) if proc_self::namespace_id("net")? != *host => Ok(()),
        _ => Err(Errno::XDEV),
    }
}

/// Serves one request.
pub(crate) fn serve(control: &mut Control<Stdin>) -> Result<(), Failure> {
    let egress: Egress = control.expect_message()?;
    // Without a namespace this would be the network of the host.
    let namespace = control.take_descriptor()?;
    let own = proc_self::namespace_id("net").map_err(at(Step::EnterNetwork))?;
    network::enter(&namespace).map_err(at(Step::EnterNetwork))?;
    if proc_self::namespace_id("net").map_err(at(Step::EnterNetwork))? == own {
        return Err(Failure::new(Step::EnterNetwork, Errno::XDEV));
    }
    send_sockets(&egress, control, &Report::Ready)
}

/// Sets the network up and sends its sockets. No copy stays.
fn send_sockets(egress: &Egress, control: &Control<Stdin>, report: &Report) -> Result<(), Failure> {
    configure(egress).map_err(at_io(Step::ConfigureNetwork))?;
    let sockets = open(egress).map_err(at(Step::OpenEgressSockets))?;
    control.send(report, &sockets.iter().map(AsFd::as_fd).collect::<Vec<_>>())
}

fn configure(egress: &Egress) -> io::Result<()> {
    let has_ipv6 = network::has_ipv6();
    fs::write(FIRST_FREE_PORT, "0")?;
    if has_ipv6 {
        fs::write(DISABLE_IPV6, "0")?;
    }
    network::start_loopback()?;
    for &(address, prefix) in &egress.networks {
        if has_ipv6 || address.is_ipv4() {
            network::add_local_network(address, prefix)?;
        }
    }
    Ok(())
}

/// Opens the sockets in the order in which they are sent.
fn open(egress: &Egress) -> Result<Vec<OwnedFd>, Errno> {
    let mut sockets = vec![
        network::listen(egress.proxy)?,
        network::bind_udp(egress.resolver)?,
        network::listen(egress.resolver)?,
    ];
    for _ in 0..egress.targets {
        sockets.push(network::unbound_stream()?);
    }
    Ok(sockets)
}
