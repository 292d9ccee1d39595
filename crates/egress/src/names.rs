//! The names that a sandbox's target sockets stand for. Each name has an address of its own inside
//! the sandbox, and a socket for each allowed port.
//!
//! A socket stays with its name: a listening socket cannot be bound again. When none is left,
//! further names are refused; programs reach them through the proxy's own listener.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6, TcpListener},
    os::fd::OwnedFd,
};

use rustix::{
    io::Errno,
    net::{Shutdown, sockopt::socket_acceptconn},
};

use crate::{control::Assigned, refusal::Reason, target::Target};

/// The first address; 198.18.0.0/15 is local in the sandbox.
const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
const BACKLOG: i32 = 128;

/// A socket that listens for connections to a target.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: TcpListener,
    pub(crate) target: Target,
}

/// The target sockets and names of one sandbox.
#[derive(Debug)]
pub(crate) struct Names {
    /// Sockets that are not bound, with their index.
    free: Vec<(usize, OwnedFd)>,
    names: HashMap<String, (Ipv4Addr, HashSet<u16>)>,
    next: Ipv4Addr,
}

/// The answer to a query.
#[derive(Debug)]
pub(crate) struct Assignment {
    pub(crate) address: Ipv4Addr,
    /// Sockets that were bound now.
    pub(crate) listeners: Vec<Listener>,
    pub(crate) assigned: Vec<Assigned>,
    /// Why a socket could not be bound. Programs do not get the address then.
    pub(crate) failed: Option<Reason>,
}

impl Names {
    /// Takes the sockets of a sandbox over. Those that stand for a name already listen again.
    pub(crate) fn new(sockets: Vec<OwnedFd>, assigned: &[Assigned]) -> (Self, Vec<Listener>) {
        let mut names = Self { free: Vec::new(), names: HashMap::new(), next: FIRST };
        let mut listeners = Vec::new();
        let by_index: HashMap<_, _> = assigned.iter().map(|assigned| (assigned.socket, assigned)).collect();
        for (index, socket) in sockets.into_iter().enumerate() {
            match by_index.get(&index) {
                Some(assigned) => listeners.extend(names.take_over(socket, assigned)),
                None if bound_address(&socket).is_none() => names.free.push((index, socket)),
                None => names.discard(socket),
            }
        }
        // Sockets are taken from the end.
        names.free.reverse();
        (names, listeners)
    }

    /// The proxy before may have ended between its report and `bind` or `listen`.
    fn take_over(&mut self, socket: OwnedFd, assigned: &Assigned) -> Option<Listener> {
        let IpAddr::V4(address) = assigned.address else { return None };
        let target = Target::from_host(&assigned.host, assigned.port).ok()?;
        self.skip(address);
        let listens = socket_acceptconn(&socket).unwrap_or(false);
        if !listens && let Err(errno) = listen(&socket, address, assigned.port) {
            tracing::warn!(host = assigned.host, port = assigned.port, %errno, "cannot take a socket over");
            return None;
        }
        let (_, ports) = self.names.entry(target.host.clone()).or_insert((address, HashSet::new()));
        ports.insert(assigned.port);
        Some(Listener { socket: socket.into(), target })
    }

    /// Nobody knows the name of a socket that was bound without a report. Connections to it are
    /// refused from now on.
    fn discard(&mut self, socket: OwnedFd) {
        if let Some(address) = bound_address(&socket) {
            self.skip(address);
        }
        // It fails for a socket that does not listen, which refuses connections anyway.
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
    }

    /// Makes sure that an address is not given to another name.
    fn skip(&mut self, address: Ipv4Addr) {
        self.next = self.next.max(after(address));
    }

    /// The address of a name, which gets a socket for each of these ports.
    pub(crate) fn assign(&mut self, name: &str, ports: &[u16]) -> Result<Assignment, Reason> {
        let (address, bound) = match self.names.get(name) {
            Some((address, bound)) => (*address, bound.clone()),
            None => (self.next, HashSet::new()),
        };
        let missing: BTreeSet<u16> = ports.iter().copied().filter(|port| !bound.contains(port)).collect();
        if missing.len() > self.free.len() {
            return Err(Reason::TooManyNames);
        }
        let mut assignment =
            Assignment { address, listeners: Vec::new(), assigned: Vec::new(), failed: None };
        for port in missing {
            if let Err(reason) = self.assign_port(name, port, &mut assignment) {
                assignment.failed = Some(reason);
            }
        }
        Ok(assignment)
    }

    fn assign_port(&mut self, name: &str, port: u16, assignment: &mut Assignment) -> Result<(), Reason> {
        let Some((index, socket)) = self.free.pop() else { return Err(Reason::TooManyNames) };
        let address = assignment.address;
        if let Err(errno) = listen(&socket, address, port) {
            // A socket that could not even be bound can serve another name.
            if bound_address(&socket).is_none() {
                self.free.push((index, socket));
            }
            tracing::debug!(name, port, %errno, "cannot listen for a name");
            return Err(if errno == Errno::ADDRINUSE { Reason::AddressInUse } else { Reason::Capacity });
        }
        self.skip(address);
        self.names.entry(name.to_owned()).or_insert((address, HashSet::new())).1.insert(port);
        let target = Target { host: name.to_owned(), address: None, port };
        assignment.listeners.push(Listener { socket: socket.into(), target });
        let assigned = Assigned { socket: index, host: name.to_owned(), address: IpAddr::V4(address), port };
        assignment.assigned.push(assigned);
        Ok(())
    }
}

fn after(address: Ipv4Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits().saturating_add(1))
}

/// The sockets are of IPv6 and take connections of IPv4 with mapped addresses.
fn listen(socket: &OwnedFd, address: Ipv4Addr, port: u16) -> Result<(), Errno> {
    match rustix::net::bind(socket, &SocketAddrV6::new(address.to_ipv6_mapped(), port, 0, 0)) {
        // It is bound already.
        Err(Errno::INVAL) if bound_address(socket) == Some(address) => {}
        result => result?,
    }
    rustix::net::listen(socket, BACKLOG)
}

/// The IPv4 address that a socket is bound to, if it is bound.
fn bound_address(socket: &OwnedFd) -> Option<Ipv4Addr> {
    match SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()? {
        SocketAddr::V6(address) if address.port() != 0 => address.ip().to_ipv4_mapped(),
        _ => None,
    }
}
