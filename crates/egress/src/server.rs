//! The control loop: receives the worker's requests and sends it the reports.

use std::{
    collections::HashMap,
    net::{TcpListener as StdListener, UdpSocket as StdUdpSocket},
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use codelia_telemetry::task;
use codelia_types::RunId;
use rustix::{io::Errno, net::SocketType};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::{TcpListener, UdpSocket},
    time::sleep,
};

use crate::{
    accept,
    control::{OPEN_SOCKETS, Open, Report, Request},
    dns,
    names::Names,
    packet,
    proxy::Proxy,
    sandbox::Sandbox,
};

/// How often the number of open connections is looked at.
const OPEN_INTERVAL: Duration = Duration::from_secs(1);

/// The worker's side cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A message cannot be received or sent.
    #[error(transparent)]
    Packet(#[from] packet::Error),
    /// The control socket cannot be used.
    #[error("cannot use the control socket")]
    Socket(#[from] std::io::Error),
    /// Settings came a second time.
    #[error("the worker sent its settings twice")]
    SecondConfigure,
}

/// Serves until the worker closes the control socket. Ends all sandboxes then.
pub(crate) async fn serve(control: OwnedFd, proxy: Arc<Proxy>) -> Result<(), ServeError> {
    rustix::io::ioctl_fionbio(&control, true).map_err(std::io::Error::from)?;
    let control = async_fd(control)?;
    let mut sandboxes = Sandboxes { proxy: proxy.clone(), open: HashMap::new() };
    let result = tokio::select! {
        result = receive_all(&control, &mut sandboxes) => result,
        result = send_all(&control, &proxy) => result,
        () = report_open(&proxy) => Ok(()),
    };
    for (_, sandbox) in sandboxes.open.drain() {
        sandbox.closed.cancel();
    }
    result
}

/// The deprecation is about types whose descriptor may change; an `OwnedFd` keeps its own.
#[allow(deprecated)]
fn async_fd(control: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(control, Interest::READABLE | Interest::WRITABLE)
}

async fn receive_all(
    control: &AsyncFd<OwnedFd>,
    sandboxes: &mut Sandboxes,
) -> Result<(), ServeError> {
    while let Some((request, sockets)) = receive(control).await? {
        sandboxes.apply(request, sockets)?;
    }
    Ok(())
}

async fn receive(
    control: &AsyncFd<OwnedFd>,
) -> Result<Option<(Request, Vec<OwnedFd>)>, ServeError> {
    loop {
        let mut ready = control.readable().await?;
        match packet::receive(control.get_ref()) {
            Err(packet::Error::Socket(Errno::AGAIN)) => ready.clear_ready(),
            // The worker has ended.
            Err(packet::Error::Socket(Errno::CONNRESET)) => return Ok(None),
            result => return Ok(result?),
        }
    }
}

async fn send_all(control: &AsyncFd<OwnedFd>, proxy: &Proxy) -> Result<(), ServeError> {
    loop {
        let report = proxy.reports.next().await;
        loop {
            let mut ready = control.writable().await?;
            match packet::send(control.get_ref(), &report, &[]) {
                Ok(()) => break,
                Err(packet::Error::Socket(Errno::AGAIN)) => ready.clear_ready(),
                Err(packet::Error::Socket(Errno::PIPE | Errno::CONNRESET)) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Reports how many connections are open, as long as the proxy serves.
async fn report_open(proxy: &Proxy) {
    let mut reported = 0;
    loop {
        sleep(OPEN_INTERVAL).await;
        let open = proxy.capacity.used();
        if open != reported {
            reported = open;
            proxy.reports.set_open(open);
        }
    }
}

/// The sandboxes that are served.
struct Sandboxes {
    proxy: Arc<Proxy>,
    open: HashMap<RunId, Arc<Sandbox>>,
}

impl Sandboxes {
    fn apply(&mut self, request: Request, sockets: Vec<OwnedFd>) -> Result<(), ServeError> {
        match request {
            Request::Configure(_) => return Err(ServeError::SecondConfigure),
            Request::Open(open) => self.open(*open, sockets),
            Request::Update { sandbox, rules } => match self.open.get(&sandbox) {
                Some(sandbox) => sandbox.update(*rules),
                None => unknown(sandbox, "update"),
            },
            Request::Decide { sandbox, host, port, decision } => match self.open.get(&sandbox) {
                Some(sandbox) => sandbox.decide(&host, port, decision),
                None => unknown(sandbox, "decide"),
            },
            Request::Close { sandbox } => self.close(sandbox),
        }
        Ok(())
    }

    fn open(&mut self, open: Open, sockets: Vec<OwnedFd>) {
        let id = open.sandbox;
        if self.open.contains_key(&id) {
            return tracing::error!(sandbox = %id, "the sandbox is open already");
        }
        match self.start(open, sockets) {
            Ok(sandbox) => drop(self.open.insert(id, sandbox)),
            Err(error) => tracing::error!(sandbox = %id, %error, "cannot serve a sandbox"),
        }
    }

    fn start(&self, open: Open, sockets: Vec<OwnedFd>) -> std::io::Result<Arc<Sandbox>> {
        if sockets.len() != OPEN_SOCKETS {
            return Err(std::io::Error::other(format!(
                "{} sockets instead of {OPEN_SOCKETS}",
                sockets.len()
            )));
        }
        let mut sockets = sockets.into_iter();
        let proxy = listener(sockets.next())?;
        let udp = datagram(sockets.next())?;
        let tcp = listener(sockets.next())?;
        let targets: Vec<_> = sockets.collect();
        for socket in &targets {
            check_type(socket, SocketType::STREAM)?;
        }
        let (names, listeners) = Names::new(targets, &open.assigned);
        let sandbox = Arc::new(Sandbox::new(
            open.sandbox,
            open.tenant,
            open.rules,
            names,
            self.proxy.clone(),
        ));
        accept::spawn_proxy(&sandbox, proxy);
        accept::spawn_targets(&sandbox, listeners);
        dns::spawn(&sandbox, udp, tcp);
        Ok(sandbox)
    }

    /// Ends the sandbox's tasks in the background, since one may be at work.
    fn close(&mut self, id: RunId) {
        let Some(sandbox) = self.open.remove(&id) else {
            // The worker waits for the answer.
            self.proxy.reports.send(Report::Closed { sandbox: id, totals: Default::default() });
            return;
        };
        sandbox.closed.cancel();
        sandbox.tasks.close();
        task::background("close", async move {
            sandbox.tasks.wait().await;
            sandbox.proxy.reports.send(Report::Closed { sandbox: id, totals: sandbox.totals() });
        });
    }
}

fn unknown(sandbox: RunId, request: &str) {
    // The request may have crossed the end of the sandbox.
    tracing::debug!(%sandbox, request, "no such sandbox");
}

fn listener(socket: Option<OwnedFd>) -> std::io::Result<TcpListener> {
    let socket = StdListener::from(checked(socket, SocketType::STREAM)?);
    TcpListener::from_std(socket)
}

fn datagram(socket: Option<OwnedFd>) -> std::io::Result<UdpSocket> {
    let socket = StdUdpSocket::from(checked(socket, SocketType::DGRAM)?);
    UdpSocket::from_std(socket)
}

fn checked(socket: Option<OwnedFd>, kind: SocketType) -> std::io::Result<OwnedFd> {
    let socket = socket.ok_or_else(|| std::io::Error::other("a socket is missing"))?;
    check_type(&socket, kind)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

fn check_type(socket: &OwnedFd, kind: SocketType) -> std::io::Result<()> {
    match rustix::net::sockopt::socket_type(socket)? {
        found if found == kind => Ok(()),
        _ => Err(std::io::Error::other("a socket has the wrong type")),
    }
}
