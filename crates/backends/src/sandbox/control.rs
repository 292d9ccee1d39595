//! The backend's end of the control socket and of the launch socket.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
    time::Duration,
};

use codelia_init::{Decoder, Report, Request, encode};
use codelia_sys::fd;
use serde::Serialize;
use tokio::{io::Interest, net::UnixStream};

use crate::{Error, SandboxRemote};

/// A socket to `codelia-init`. Closing the control socket ends the sandbox.
#[derive(Debug)]
pub(crate) struct Control {
    stream: Arc<UnixStream>,
    decoder: Decoder,
    /// Descriptors that were received and not yet taken, in order.
    descriptors: VecDeque<OwnedFd>,
}

impl Control {
    /// A new socket pair: our end, and the end for `codelia-init`.
    pub(crate) fn pair() -> Result<(Self, OwnedFd), Error> {
        let (local, remote) = fd::socket_pair().map_err(io::Error::from)?;
        Ok((Self::new(local)?, remote))
    }

    /// Wraps a connected socket.
    pub(crate) fn new(socket: OwnedFd) -> Result<Self, Error> {
        let stream = std::os::unix::net::UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        let stream = Arc::new(UnixStream::from_std(stream)?);
        Ok(Self { stream, decoder: Decoder::default(), descriptors: VecDeque::new() })
    }

    /// Sends a request with descriptors. A small request without descriptors is written in one
    /// piece, so concurrent calls do not mix.
    pub(crate) async fn send(
        &self,
        request: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        let frame = encode(request)?;
        let mut sent = self.send_some(&frame, fds).await?;
        while sent < frame.len() {
            sent += self.send_some(&frame[sent..], &[]).await?;
        }
        Ok(())
    }

    async fn send_some(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let send = || fd::send(&self.stream, bytes, fds).map_err(io::Error::from);
        self.stream.async_io(Interest::WRITABLE, send).await
    }

    /// Waits for the next report. `None` is the end of the socket. Cancel-safe.
    pub(crate) async fn receive(&mut self) -> Result<Option<Report>, Error> {
        loop {
            if let Some(report) = self.decoder.next_message()? {
                return Ok(Some(report));
            }
            let mut bytes = [0; 1024];
            let mut descriptors = Vec::new();
            let count = match self.read(&mut bytes, &mut descriptors).await {
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
                result => result?,
            };
            self.descriptors.extend(descriptors);
            if count == 0 {
                return Ok(None);
            }
            self.decoder.push(&bytes[..count]);
        }
    }

    /// Waits for this report, which comes next unless a step failed.
    pub(crate) async fn expect_report(&mut self, expected: Report) -> Result<(), Error> {
        match self.receive().await? {
            Some(report) if report == expected => Ok(()),
            Some(Report::Failed(failure)) => Err(Error::InitFailed(failure)),
            Some(_) => Err(Error::UnexpectedMessage),
            None => Err(Error::InitExited),
        }
    }

    async fn read(&self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
        let receive = || fd::receive(&self.stream, bytes, descriptors).map_err(io::Error::from);
        self.stream.async_io(Interest::READABLE, receive).await
    }

    /// Sends requests from any thread, until this value is dropped.
    pub(crate) fn remote(&self) -> Remote {
        Remote(Arc::downgrade(&self.stream))
    }

    /// Duplicates the socket's descriptor, to check whether the other end was closed.
    pub(crate) fn try_clone_fd(&self) -> Result<OwnedFd, Error> {
        Ok(self.stream.as_fd().try_clone_to_owned()?)
    }

    /// Whether the other end is open. A socket that cannot be checked counts as closed.
    pub(crate) fn is_open(&self) -> bool {
        fd::is_peer_closed(&self.stream).is_ok_and(|closed| !closed)
    }

    /// Shuts down writing and returns the socket, to check whether the other end was closed.
    pub(crate) fn shut_down(&self) -> Result<OwnedFd, Error> {
        fd::shutdown_write(&self.stream).map_err(io::Error::from)?;
        self.try_clone_fd()
    }

    /// Takes the next descriptor that arrived with a report.
    pub(crate) fn take_descriptor(&mut self) -> Result<OwnedFd, Error> {
        self.descriptors.pop_front().ok_or(Error::UnexpectedMessage)
    }

    /// Takes all descriptors that arrived and were not taken.
    pub(crate) fn take_descriptors(self) -> Vec<OwnedFd> {
        self.descriptors.into()
    }
}

/// Sends small requests to `codelia-init` without the async runtime. Does not keep the socket open:
/// its end must reach init.
#[derive(Debug)]
pub(crate) struct Remote(Weak<UnixStream>);

impl Remote {
    fn send(&self, request: &Request) {
        let Some(stream) = self.0.upgrade() else { return };
        let sent = encode(request).map_err(Error::from).and_then(|frame| {
            // Not blocking. A small frame is sent as a whole or not at all.
            fd::send(&stream, &frame, &[]).map_err(|errno| io::Error::from(errno).into())
        });
        if let Err(error) = sent {
            // Init has exited, or does not read: its last deadline holds.
            tracing::debug!(%error, "request not sent to codelia-init");
        }
    }
}

impl SandboxRemote for Remote {
    fn keep_alive(&self, time: Duration) {
        self.send(&Request::KeepAlive(time));
    }

    fn kill(&self) {
        self.send(&Request::Kill);
    }
}
