//! The worker's end of the control socket. Never blocks.
//!
//! Reports are not trusted: the proxy reads what programs in sandboxes send.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use codelia_backends::EgressSockets;
use codelia_egress::{control::Report, packet};
use codelia_sys::Errno;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde::Serialize;
use tokio::io::unix::AsyncFd;

/// The worker's end of the control socket.
#[derive(Debug)]
pub(super) struct Control {
    socket: AsyncFd<OwnedFd>,
}

impl Control {
    /// The deprecation of `AsyncFd::new` is about types whose descriptor may change.
    #[allow(deprecated)]
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        fcntl_setfl(&socket, fcntl_getfl(&socket)? | OFlags::NONBLOCK)?;
        Ok(Self { socket: AsyncFd::new(socket)? })
    }

    /// Sends a message with its sockets, when there is room for it.
    pub(super) async fn send(
        &self,
        message: &impl Serialize,
        sockets: Option<&EgressSockets>,
    ) -> Result<(), packet::Error> {
        let fds = sockets.map(descriptors).unwrap_or_default();
        loop {
            let mut ready = self.socket.writable().await.map_err(errno)?;
            match packet::send(self.socket.get_ref(), message, &fds) {
                Err(packet::Error::Socket(Errno::AGAIN)) => ready.clear_ready(),
                Err(packet::Error::Socket(Errno::INTR)) => {}
                result => return result,
            }
        }
    }

    /// Receives a report; `None` when the proxy has closed its end. Cancel-safe.
    pub(super) async fn receive(&self) -> Result<Option<Report>, packet::Error> {
        loop {
            let mut ready = self.socket.readable().await.map_err(errno)?;
            match packet::receive::<Report>(self.socket.get_ref()) {
                Err(packet::Error::Socket(Errno::AGAIN)) => ready.clear_ready(),
                Err(packet::Error::Socket(Errno::INTR)) => {}
                Err(packet::Error::Socket(Errno::CONNRESET)) => return Ok(None),
                // A proxy has no descriptors to send.
                result => return Ok(result?.map(|(report, _descriptors)| report)),
            }
        }
    }
}

/// In the order that `open` promises.
fn descriptors(sockets: &EgressSockets) -> Vec<BorrowedFd<'_>> {
    let EgressSockets { proxy, resolver_udp, resolver_tcp, targets } = sockets;
    [proxy, resolver_udp, resolver_tcp].into_iter().chain(targets).map(AsFd::as_fd).collect()
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
