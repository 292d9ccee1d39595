//! The worker's side of a proxy, and the sockets of its sandboxes.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, UdpSocket},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use codelia_egress::{
    Config,
    control::{Assigned, Connection, Decision, Open, Report, Request, TARGET_SOCKETS, Totals},
    packet,
};
use codelia_policy::{EgressLimits, EgressRules};
use codelia_types::RunId;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::{sync::mpsc, time::timeout};

/// For an event that must come.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// A proxy in this process.
pub(crate) struct Rig {
    control: Arc<OwnedFd>,
    reports: mpsc::UnboundedReceiver<Report>,
    pub(crate) seen: Vec<Report>,
}

impl Rig {
    pub(crate) fn start(config: impl Into<Config>) -> Self {
        let config = config.into();
        let (ours, theirs) = packet::pair().unwrap();
        #[allow(clippy::disallowed_methods)]
        tokio::spawn(async move { codelia_egress::serve(theirs, config).await.unwrap() });
        Self::new(ours)
    }

    /// Speaks with a proxy over this socket.
    pub(crate) fn new(control: OwnedFd) -> Self {
        let control = Arc::new(control);
        let (sender, reports) = mpsc::unbounded_channel();
        let receiver = control.clone();
        std::thread::spawn(move || {
            while let Ok(Some((report, _))) = packet::receive::<Report>(&*receiver) {
                if sender.send(report).is_err() {
                    return;
                }
            }
        });
        Self { control, reports, seen: Vec::new() }
    }

    pub(crate) fn send(&self, request: &Request, fds: &[OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        packet::send(&*self.control, request, &fds).unwrap();
    }

    /// Opens a new sandbox.
    pub(crate) fn open(&self, rules: EgressRules) -> Sandbox {
        let sandbox = Sandbox::new();
        self.reopen(&sandbox, rules, Vec::new());
        sandbox
    }

    /// Opens a sandbox that another proxy served.
    pub(crate) fn reopen(&self, sandbox: &Sandbox, rules: EgressRules, assigned: Vec<Assigned>) {
        let open = Open { sandbox: sandbox.id, tenant: "team".to_owned(), rules, assigned };
        self.send(&Request::Open(Box::new(open)), &sandbox.sockets);
    }

    /// Opens a new sandbox on a kernel without IPv6.
    pub(crate) fn open_without_ipv6(&self, rules: EgressRules) -> Sandbox {
        let mut sandbox = Sandbox::new();
        sandbox.sockets.truncate(3);
        sandbox.sockets.extend((0..TARGET_SOCKETS).map(|_| stream_socket(AddressFamily::INET)));
        self.reopen(&sandbox, rules, Vec::new());
        sandbox
    }

    /// Opens a new sandbox of a tenant.
    pub(crate) fn open_of(&self, tenant: &str, rules: EgressRules) -> Sandbox {
        let sandbox = Sandbox::new();
        let open =
            Open { sandbox: sandbox.id, tenant: tenant.to_owned(), rules, assigned: Vec::new() };
        self.send(&Request::Open(Box::new(open)), &sandbox.sockets);
        sandbox
    }

    pub(crate) fn update(&self, sandbox: &Sandbox, rules: EgressRules) {
        self.send(&Request::Update { sandbox: sandbox.id, rules: Box::new(rules) }, &[]);
    }

    pub(crate) fn decide(&self, sandbox: &Sandbox, host: &str, port: u16, decision: Decision) {
        let host = host.to_owned();
        self.send(&Request::Decide { sandbox: sandbox.id, host, port, decision }, &[]);
    }

    /// The next report that this function accepts. Others are kept in `seen`.
    pub(crate) async fn wait<T>(&mut self, mut accept: impl FnMut(&Report) -> Option<T>) -> T {
        let next = async {
            loop {
                let report = self.reports.recv().await.expect("the proxy ended");
                let accepted = accept(&report);
                self.seen.push(report);
                if let Some(accepted) = accepted {
                    return accepted;
                }
            }
        };
        match timeout(DEADLINE, next).await {
            Ok(accepted) => accepted,
            Err(_) => panic!("no such report; seen: {:#?}", self.seen),
        }
    }

    /// The record of the next connection that was refused with this code.
    pub(crate) async fn refusal(&mut self, code: &str) -> Connection {
        self.wait(|report| match report {
            Report::Connection(record) if record.refused.as_deref() == Some(code) => {
                Some(record.clone())
            }
            _ => None,
        })
        .await
    }

    /// The record of the next connection that was allowed.
    pub(crate) async fn allowed(&mut self) -> Connection {
        self.wait(|report| match report {
            Report::Connection(record) if record.refused.is_none() => Some(record.clone()),
            _ => None,
        })
        .await
    }

    pub(crate) async fn close(&mut self, sandbox: &Sandbox) -> Totals {
        self.send(&Request::Close { sandbox: sandbox.id }, &[]);
        let id = sandbox.id;
        self.wait(|report| match report {
            Report::Closed { sandbox, totals } if *sandbox == id => Some(*totals),
            _ => None,
        })
        .await
    }

    /// The names that sockets of a sandbox stand for, as reported so far.
    pub(crate) fn assigned(&self) -> Vec<Assigned> {
        let assigned = |report: &Report| match report {
            Report::Assigned { assigned, .. } => Some(assigned.clone()),
            _ => None,
        };
        self.seen.iter().filter_map(assigned).collect()
    }
}

impl Drop for Rig {
    /// The thread that receives has a copy of the socket.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&*self.control, rustix::net::Shutdown::Both);
    }
}

/// The sockets of a sandbox.
pub(crate) struct Sandbox {
    pub(crate) id: RunId,
    pub(crate) proxy: SocketAddr,
    pub(crate) resolver: SocketAddr,
    sockets: Vec<OwnedFd>,
}

impl Sandbox {
    fn new() -> Self {
        let proxy = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let resolver_tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let resolver = resolver_tcp.local_addr().unwrap();
        let resolver_udp = UdpSocket::bind(resolver).unwrap();
        let address = proxy.local_addr().unwrap();
        let mut sockets: Vec<OwnedFd> =
            vec![proxy.into(), resolver_udp.into(), resolver_tcp.into()];
        sockets.extend((0..TARGET_SOCKETS).map(|_| dual_stream_socket()));
        Self { id: RunId::generate(), proxy: address, resolver, sockets }
    }

    /// Drops the worker's copies of the sockets.
    pub(crate) fn drop_sockets(&mut self) {
        self.sockets.clear();
    }

    /// Binds a target socket as a proxy would that ended before it could report.
    pub(crate) fn bind_target(&self, index: usize, address: Ipv6Addr, port: u16) {
        let address = SocketAddrV6::new(address, port, 0, 0);
        rustix::net::bind(&self.sockets[3 + index], &address).unwrap();
        rustix::net::listen(&self.sockets[3 + index], 1).unwrap();
    }
}

/// A socket as the sandbox's side makes them.
fn dual_stream_socket() -> OwnedFd {
    let socket = stream_socket(AddressFamily::INET6);
    rustix::net::sockopt::set_ipv6_v6only(&socket, false).unwrap();
    socket
}

fn stream_socket(family: AddressFamily) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None).unwrap()
}

/// Rules that allow these hosts on the ports of HTTP.
pub(crate) fn rules(allowed: &[&str]) -> EgressRules {
    EgressRules {
        allowed_hosts: allowed.iter().map(|&host| host.to_owned()).collect(),
        ask_hosts: Vec::new(),
        blocked_hosts: Vec::new(),
        allowed_ports: vec![80, 443],
        credentials: Vec::new(),
        limits: EgressLimits {
            connections_per_second: 10_000,
            queries_per_second: 10_000,
            ..Default::default()
        },
    }
}
