//! Network namespaces: creating and entering one, its loopback and local routes, and sockets in it.
//! All of this concerns the calling thread alone.

use std::{
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
};

use nix::{
    libc,
    sched::{CloneFlags, setns},
};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt},
};

use crate::call::{check, from_nix};

/// Connections that wait until they are accepted.
const BACKLOG: i32 = 128;

/// The number of the loopback interface in every namespace.
const LOOPBACK: u32 = 1;
const LOOPBACK_NAME: [u8; 2] = *b"lo";

// Values of the netlink interface.
const RTM_NEWROUTE: u16 = 24;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_CREATE: u16 = 0x400;
const IFF_UP: i16 = 1;
const RT_TABLE_LOCAL: u8 = 255;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;

/// The length of a message's header, and of an attribute's.
const HEADER: usize = 16;
const ATTRIBUTE_HEADER: usize = 4;

/// Moves this thread into a new network namespace, which belongs to its user namespace.
///
/// # Errors
/// As `unshare(2)`.
pub fn unshare() -> Result<(), Errno> {
    nix::sched::unshare(CloneFlags::CLONE_NEWNET).map_err(from_nix)
}

/// Moves this thread into a network namespace.
///
/// # Errors
/// As `setns(2)`.
pub fn enter(namespace: impl AsFd) -> Result<(), Errno> {
    setns(namespace, CloneFlags::CLONE_NEWNET).map_err(from_nix)
}

/// Opens the network namespace of this thread. `proc_dir` is where `/proc` is mounted.
///
/// # Errors
/// As `open(2)`.
pub fn open_own(proc_dir: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(
        proc_dir.join("thread-self/ns/net"),
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// Counts what is left of sockets in the network of this thread: open ones, those that are closing,
/// and fragments that wait. `None` if the kernel does not say. `proc_dir` is where `/proc` is
/// mounted.
#[must_use]
pub fn count_sockets(proc_dir: &Path) -> Option<u64> {
    let read =
        |name: &str| std::fs::read_to_string(proc_dir.join("thread-self/net").join(name)).ok();
    let of_ipv4 = sum_of_sockets(&read("sockstat")?)?;
    // A kernel without IPv6 has no such file.
    Some(of_ipv4 + read("sockstat6").map_or(Some(0), |text| sum_of_sockets(&text))?)
}

/// Sums the fields of each protocol that belong to one network: `orphan`, `alloc` and `mem` are
/// sums of the host.
fn sum_of_sockets(text: &str) -> Option<u64> {
    let mut sum = 0;
    for line in text.lines() {
        let (_, fields) = line.split_once(':')?;
        let mut words = fields.split_ascii_whitespace();
        while let (Some(name), Some(value)) = (words.next(), words.next()) {
            if ["used", "inuse", "tw"].contains(&name) {
                sum += value.parse::<u64>().ok()?;
            }
        }
    }
    Some(sum)
}

/// Starts the loopback interface, with its usual addresses. Needs `CAP_NET_ADMIN`.
///
/// # Errors
/// As `ioctl(SIOCSIFFLAGS)`: `EPERM` without the capability.
pub fn start_loopback() -> Result<(), Errno> {
    // Any socket serves. Unlike others, a Unix socket is gone at once when it is closed.
    let cloexec = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, cloexec, None)?;
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (letter, byte) in request.ifr_name.iter_mut().zip(LOOPBACK_NAME) {
        *letter = libc::c_char::from_ne_bytes([byte]);
    }
    request.ifr_ifru.ifru_flags = IFF_UP;
    // SAFETY: the descriptor is open, and the kernel only reads the request.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) })
}

/// Makes every address of a network one of this host, on loopback: packets to it never leave, and
/// sockets can be bound to it (IPv6: those with `IPV6_FREEBIND`). Needs `CAP_NET_ADMIN`.
///
/// # Errors
/// As the kernel's answer: `EPERM` without the capability.
pub fn add_local_network(network: IpAddr, prefix: u8) -> Result<(), Errno> {
    let (family, address) = match network {
        IpAddr::V4(address) => (AddressFamily::INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AddressFamily::INET6, address.octets().to_vec()),
    };
    let family = u8::try_from(family.as_raw()).map_err(|_| Errno::AFNOSUPPORT)?;
    // rtmsg: family, lengths of destination and source, tos, table, protocol, scope, type, flags.
    let mut body = vec![
        family,
        prefix,
        0,
        0,
        RT_TABLE_LOCAL,
        RTPROT_STATIC,
        RT_SCOPE_HOST,
        RTN_LOCAL,
        0,
        0,
        0,
        0,
    ];
    body.extend(attribute(RTA_DST, &address)?);
    body.extend(attribute(RTA_OIF, &LOOPBACK.to_ne_bytes())?);
    change(RTM_NEWROUTE, NLM_F_CREATE, &body)
}

/// An attribute of a message. The values here need no padding: their lengths are multiples of 4.
fn attribute(kind: u16, value: &[u8]) -> Result<Vec<u8>, Errno> {
    let length = u16::try_from(ATTRIBUTE_HEADER + value.len()).map_err(|_| Errno::MSGSIZE)?;
    Ok([&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat())
}

/// Sends one message to the kernel and waits for its answer.
fn change(kind: u16, flags: u16, body: &[u8]) -> Result<(), Errno> {
    // The default protocol is that of routes and interfaces.
    let cloexec = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, cloexec, None)?;
    let length = u32::try_from(HEADER + body.len()).map_err(|_| Errno::MSGSIZE)?;
    let flags = flags | NLM_F_REQUEST | NLM_F_ACK;
    let length = length.to_ne_bytes();
    let kind = kind.to_ne_bytes();
    let flags = flags.to_ne_bytes();
    // The sequence number and the sender may be zero: there is one message.
    let message = [&length[..], &kind, &flags, &[0; 8], body].concat();
    rustix::net::send(&socket, &message, SendFlags::empty())?;
    let mut answer = [0; 256];
    let (count, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
    read_answer(&answer[..count])
}

/// The error of an answer: after its header, a negative errno or zero.
fn read_answer(answer: &[u8]) -> Result<(), Errno> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let code = answer
        .get(HEADER..HEADER + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(code)) => Err(Errno::from_raw_os_error(code.saturating_neg())),
        _ => Err(Errno::BADMSG),
    }
}

/// A TCP socket that listens at an address. Not blocking, close-on-exec.
///
/// # Errors
/// As `socket(2)`, `bind(2)` and `listen(2)`.
pub fn listen(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = socket(family_of(address), SocketType::STREAM)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A UDP socket at an address. Not blocking, close-on-exec.
///
/// # Errors
/// As `socket(2)` and `bind(2)`.
pub fn bind_udp(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = socket(family_of(address), SocketType::DGRAM)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

/// Whether the kernel has IPv6: it can be left out, or off since the start of the host.
#[must_use]
pub fn has_ipv6() -> bool {
    !matches!(socket(AddressFamily::INET6, SocketType::STREAM), Err(Errno::AFNOSUPPORT))
}

/// A TCP socket for IPv6 and mapped IPv4 addresses that is not bound; on a kernel without IPv6, for
/// IPv4. Not blocking, close-on-exec.
///
/// # Errors
/// As `socket(2)`.
pub fn unbound_stream() -> Result<OwnedFd, Errno> {
    let socket = match socket(AddressFamily::INET6, SocketType::STREAM) {
        Err(Errno::AFNOSUPPORT) => {
            return reusable(socket(AddressFamily::INET, SocketType::STREAM)?);
        }
        socket => reusable(socket?)?,
    };
    sockopt::set_ipv6_v6only(&socket, false)?;
    // A route makes an IPv6 address local, but only this lets a socket be bound to it.
    sockopt::set_ipv6_freebind(&socket, true)?;
    Ok(socket)
}

fn reusable(socket: OwnedFd) -> Result<OwnedFd, Errno> {
    sockopt::set_socket_reuseaddr(&socket, true)?;
    Ok(socket)
}

fn family_of(address: SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn socket(family: AddressFamily, kind: SocketType) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};

    use super::*;
    use crate::require::available;

    /// Runs in a thread of its own, because the namespace changes.
    fn in_own_namespace(test: impl FnOnce() + Send + 'static) {
        let reason =
            (crate::process::own_uid() != 0).then_some("only root makes network namespaces");
        if available("root", reason) {
            std::thread::spawn(|| {
                unshare().unwrap();
                test();
            })
            .join()
            .unwrap();
        }
    }

    #[test]
    fn every_address_of_a_local_network_is_own() {
        in_own_namespace(|| {
            start_loopback().unwrap();
            let connect =
                |address: &str| TcpStream::connect((address, 443)).map_err(|error| error.kind());
            assert!(
                connect("198.18.0.5")
                    .is_err_and(|kind| kind == std::io::ErrorKind::NetworkUnreachable)
            );
            add_local_network(Ipv4Addr::new(198, 18, 0, 0).into(), 15).unwrap();
            add_local_network(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0).into(), 64).unwrap();
            for address in ["::ffff:198.18.0.5", "::ffff:198.19.255.255", "2001:2::5"] {
                let socket = unbound_stream().unwrap();
                rustix::net::bind(&socket, &SocketAddr::new(address.parse().unwrap(), 443))
                    .unwrap();
                rustix::net::listen(&socket, 1).unwrap();
                connect(address.trim_start_matches("::ffff:")).unwrap();
            }
            assert!(
                connect("198.20.0.1")
                    .is_err_and(|kind| kind == std::io::ErrorKind::NetworkUnreachable)
            );
        });
    }

    #[test]
    fn unbound_stream_takes_both_families() {
        in_own_namespace(|| {
            start_loopback().unwrap();
            let listen = |address: Ipv6Addr| {
                let socket = unbound_stream().unwrap();
                rustix::net::bind(&socket, &SocketAddr::new(address.into(), 443)).unwrap();
                rustix::net::listen(&socket, 1).unwrap();
                socket
            };
            let _sockets = [Ipv6Addr::LOCALHOST, Ipv4Addr::LOCALHOST.to_ipv6_mapped()].map(listen);
            TcpStream::connect("127.0.0.1:443").unwrap();
            TcpStream::connect("[::1]:443").unwrap();
        });
    }

    #[test]
    fn sockets_of_a_network_are_counted() {
        in_own_namespace(|| {
            let count = || count_sockets(Path::new("/proc")).unwrap();
            start_loopback().unwrap();
            assert_eq!(count(), 0);
            let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            assert!(count() > 0, "an open socket is seen");
            let client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
            let (accepted, _) = server.accept().unwrap();
            // This side closes first, and waits.
            drop(accepted);
            drop((client, server));
            assert!(count() > 0, "a closing connection is seen");
        });
    }

    #[test]
    fn answer_of_the_kernel_is_read() {
        let answer = |kind: u16, code: i32| {
            let mut bytes = [0; HEADER];
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            [&bytes[..], &code.to_ne_bytes()].concat()
        };
        assert_eq!(read_answer(&answer(NLMSG_ERROR, 0)), Ok(()));
        assert_eq!(read_answer(&answer(NLMSG_ERROR, -1)), Err(Errno::PERM));
        assert_eq!(read_answer(&answer(3, 0)), Err(Errno::BADMSG));
        assert_eq!(read_answer(&[0; 7]), Err(Errno::BADMSG));
    }
}
