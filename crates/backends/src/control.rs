//! The backend's end of the control socket.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use codelia_init::{Decoder, Report, Request, encode};
use codelia_sys::fd;
use tokio::{io::Interest, net::UnixStream};

use crate::Error;

/// Both directions of the control socket. Its end is the end of the sandbox.
#[derive(Debug)]
pub(crate) struct Control {
    stream: UnixStream,
    decoder: Decoder,
}

impl Control {
    /// A new socket and its other end, for `codelia-init`.
    pub(crate) fn pair() -> Result<(Self, OwnedFd), Error> {
        let (here, there) = fd::socket_pair().map_err(io::Error::from)?;
        let stream = std::os::unix::net::UnixStream::from(here);
        stream.set_nonblocking(true)?;
        Ok((Self { stream: UnixStream::from_std(stream)?, decoder: Decoder::default() }, there))
    }

    /// Says something, with descriptors. A small request without any goes in one piece, so that
    /// several may be said at once.
    pub(crate) async fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
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

    /// Waits for the next report; `None` is the end of the socket. Cancel-safe.
    pub(crate) async fn receive(&mut self) -> Result<Option<Report>, Error> {
        loop {
            if let Some(report) = self.decoder.next_message()? {
                return Ok(Some(report));
            }
            let mut bytes = [0; 1024];
            let count = match self.read(&mut bytes).await {
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
                answer => answer?,
            };
            if count == 0 {
                return Ok(None);
            }
            self.decoder.push(&bytes[..count]);
        }
    }

    async fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.async_io(Interest::READABLE, || self.stream.try_read(bytes)).await
    }
}
