//! The names that a sandbox's target sockets stand for. Each name has an address of its own of each
//! family inside the sandbox, and a socket for each address that was asked for and allowed port.
//!
//! A socket stays with its name: a listening socket cannot be bound again. When none is left,
//! further names are refused; programs reach them through the proxy's own listener.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
};

use codelia_policy::EGRESS_NETWORKS;
use rustix::{
    io::Errno,
    net::{
        AddressFamily, Shutdown,
        sockopt::{socket_acceptconn, socket_domain},
    },
};

use crate::{control::Assigned, refusal::Reason, target::Target};

/// The first address; 198.18.0.0/15 is local in the sandbox.
const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
const BACKLOG: i32 = 128;
/// Sockets that may be bound to addresses of IPv6. Most programs ask for both families and connect
/// over IPv4, so most sockets are kept for that.
const MAX_IPV6: usize = codelia_policy::EGRESS_TARGETS / 3;

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
    names: HashMap<String, Name>,
    next: Ipv4Addr,
    /// Sockets that were bound to addresses of IPv6.
    ipv6_count: usize,
}

/// The addresses of a name: the one of IPv4 decides the other.
#[derive(Debug)]
struct Name {
    address: Ipv4Addr,
    bound: HashSet<SocketAddr>,
}

/// The family of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

/// The answer to a query.
#[derive(Debug)]
pub(crate) struct Assignment {
    pub(crate) address: IpAddr,
    /// Sockets that were bound now.
    pub(crate) listeners: Vec<Listener>,
    pub(crate) assigned: Vec<Assigned>,
    /// Why a socket could not be bound. Programs do not get the address then.
    pub(crate) failed: Option<Reason>,
}

impl Names {
    /// Takes the sockets of a sandbox over. Those that stand for a name already listen again.
    pub(crate) fn new(sockets: Vec<OwnedFd>, assigned: &[Assigned]) -> (Self, Vec<Listener>) {
        let mut names =
            Self { free: Vec::new(), names: HashMap::new(), next: FIRST, ipv6_count: 0 };
        let mut listeners = Vec::new();
        let by_index: HashMap<_, _> =
            assigned.iter().map(|assigned| (assigned.socket, assigned)).collect();
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
        let address = SocketAddr::new(assigned.address, assigned.port);
        let target = Target::from_host(&assigned.host, assigned.port).ok()?;
        self.skip(address.ip());
        let listens = socket_acceptconn(&socket).unwrap_or(false);
        if !listens && let Err(errno) = listen(&socket, address) {
            tracing::warn!(host = assigned.host, port = assigned.port, %errno, "cannot take a socket over");
            return None;
        }
        self.insert(&target.host, address);
        Some(Listener { socket: socket.into(), target })
    }

    /// Nobody knows the name of a socket that was bound without a report. Connections to it are
    /// refused from now on.
    fn discard(&mut self, socket: OwnedFd) {
        if let Some(address) = bound_address(&socket) {
            self.skip(address.ip());
        }
        // This fails for a socket that does not listen, which refuses connections anyway.
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
    }

    /// Makes sure that an address is not given to another name.
    fn skip(&mut self, address: IpAddr) {
        self.next = self.next.max(after(as_ipv4(address)));
    }

    fn insert(&mut self, name: &str, address: SocketAddr) {
        self.ipv6_count += usize::from(address.is_ipv6());
        let new = || Name { address: as_ipv4(address.ip()), bound: HashSet::new() };
        self.names.entry(name.to_owned()).or_insert_with(new).bound.insert(address);
    }

    /// The address of a name in a family. The name gets a socket there for each of these ports.
    pub(crate) fn assign(
        &mut self,
        name: &str,
        family: Family,
        ports: &[u16],
    ) -> Result<Assignment, Reason> {
        let known = self.names.get(name);
        let address = known.map_or(self.next, |known| known.address);
        let address = match family {
            Family::V4 => IpAddr::V4(address),
            Family::V6 => IpAddr::V6(as_ipv6(address)),
        };
        let is_bound = |address| known.is_some_and(|known| known.bound.contains(&address));
        let all = ports.iter().map(|&port| SocketAddr::new(address, port));
        let missing: BTreeSet<_> = all.filter(|&address| !is_bound(address)).collect();
        let limit = match family {
            Family::V4 => self.free.len(),
            Family::V6 => self.free.len().min(MAX_IPV6.saturating_sub(self.ipv6_count)),
        };
        if missing.len() > limit {
            return Err(Reason::TooManyNames);
        }
        let mut assignment =
            Assignment { address, listeners: Vec::new(), assigned: Vec::new(), failed: None };
        for address in missing {
            if let Err(reason) = self.assign_port(name, address, &mut assignment) {
                assignment.failed = Some(reason);
            }
        }
        Ok(assignment)
    }

    fn assign_port(
        &mut self,
        name: &str,
        address: SocketAddr,
        assignment: &mut Assignment,
    ) -> Result<(), Reason> {
        let Some((index, socket)) = self.free.pop() else { return Err(Reason::TooManyNames) };
        if let Err(errno) = listen(&socket, address) {
            // A socket that could not even be bound can serve another name.
            if bound_address(&socket).is_none() {
                self.free.push((index, socket));
            }
            tracing::debug!(name, %address, %errno, "cannot listen for a name");
            return Err(if errno == Errno::ADDRINUSE {
                Reason::AddressInUse
            } else {
                Reason::Capacity
            });
        }
        self.skip(address.ip());
        self.insert(name, address);
        let host = name.to_owned();
        let port = address.port();
        assignment.assigned.push(Assigned {
            socket: index,
            host: host.clone(),
            address: address.ip(),
            port,
        });
        let target = Target { host, address: None, port };
        assignment.listeners.push(Listener { socket: socket.into(), target });
        Ok(())
    }
}

fn after(address: Ipv4Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits().saturating_add(1))
}

/// The address of IPv6 that stands for the same name: the other one is at its end.
fn as_ipv6(address: Ipv4Addr) -> Ipv6Addr {
    let network = EGRESS_NETWORKS.iter().find_map(|(network, _)| match network {
        IpAddr::V6(network) => Some(network.to_bits()),
        IpAddr::V4(_) => None,
    });
    Ipv6Addr::from_bits(network.unwrap_or_default() | u128::from(address.to_bits()))
}

/// The reverse of [`as_ipv6`].
fn as_ipv4(address: IpAddr) -> Ipv4Addr {
    match address {
        IpAddr::V4(address) => address,
        IpAddr::V6(address) => {
            let [.., a, b, c, d] = address.octets();
            Ipv4Addr::new(a, b, c, d)
        }
    }
}

/// The sockets are of IPv6 and take connections of IPv4 with mapped addresses. Where the kernel has
/// no IPv6 they are of IPv4.
fn listen(socket: &OwnedFd, address: SocketAddr) -> Result<(), Errno> {
    let is_ipv6 = socket_domain(socket)? == AddressFamily::INET6;
    let bound = match address.ip() {
        IpAddr::V4(ip) if is_ipv6 => SocketAddr::new(ip.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) if !is_ipv6 => return Err(Errno::AFNOSUPPORT),
        _ => address,
    };
    match rustix::net::bind(socket, &bound) {
        // The socket is bound already.
        Err(Errno::INVAL) if bound_address(socket) == Some(address) => {}
        result => result?,
    }
    rustix::net::listen(socket, BACKLOG)
}

/// The address that a socket is bound to, if it is bound.
fn bound_address(socket: &OwnedFd) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()?;
    (address.port() != 0).then(|| SocketAddr::new(address.ip().to_canonical(), address.port()))
}
