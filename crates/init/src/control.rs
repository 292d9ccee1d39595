//! Message sockets: the control socket, which is stdin, and the launch socket.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use codelia_init::{Decoder, Failure, Report, Request, Step, encode};
use codelia_sys::{Errno, fd};
use serde::{Serialize, de::DeserializeOwned};

/// Most messages fit. Each page of it costs a fault in every sandbox.
const BUFFER_BYTES: usize = 4 * 1024;

/// A socket that carries messages and descriptors in both directions.
#[derive(Debug)]
pub(crate) struct Control<S> {
    socket: S,
    decoder: Decoder,
    /// Received descriptors, in order. Messages that carry some take them from here.
    descriptors: VecDeque<OwnedFd>,
}

impl<S: AsFd> Control<S> {
    pub(crate) fn new(socket: S) -> Self {
        Self { socket, decoder: Decoder::default(), descriptors: VecDeque::new() }
    }

    /// Sends a message. A closed peer is not an error: the next receive sees end of file.
    pub(crate) fn send(
        &self,
        message: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Failure> {
        let frame = encode(message).map_err(|_| Failure::new(Step::Protocol, Errno::MSGSIZE))?;
        let (mut rest, mut fds) = (frame.as_slice(), fds);
        while !rest.is_empty() {
            match fd::send(&self.socket, rest, fds) {
                Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(errno) => return Err(Failure::new(Step::Protocol, errno)),
            }
        }
        Ok(())
    }

    /// Waits for the next request; `None` at end of file.
    pub(crate) fn receive_request(&mut self) -> Result<Option<Request>, Failure> {
        self.receive_message()
    }

    /// Waits for the next report of the command's process; `None` at end of file.
    pub(crate) fn receive_report(&mut self) -> Result<Option<Report>, Failure> {
        self.receive_message()
    }

    /// Waits for the next message; `None` at end of file.
    pub(crate) fn receive_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        loop {
            if let Some(message) = self.next_buffered()? {
                return Ok(Some(message));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Returns a message that has arrived completely, without reading the socket.
    pub(crate) fn next_buffered<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        self.decoder.next_message().map_err(|_| Failure::new(Step::Protocol, Errno::BADMSG))
    }

    /// Reads once from the socket. Returns false at end of file.
    pub(crate) fn fill(&mut self) -> Result<bool, Failure> {
        let (mut bytes, mut descriptors) = ([0; BUFFER_BYTES], Vec::new());
        let count = match fd::receive(&self.socket, &mut bytes, &mut descriptors) {
            Ok(count) => count,
            Err(Errno::CONNRESET) => 0,
            Err(errno) => return Err(Failure::new(Step::Protocol, errno)),
        };
        self.decoder.push(&bytes[..count]);
        self.descriptors.extend(descriptors);
        Ok(count > 0)
    }

    /// Takes all received descriptors.
    pub(crate) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors).into()
    }

    /// Takes this many received descriptors.
    pub(crate) fn take_first_descriptors(&mut self, count: usize) -> Result<Vec<OwnedFd>, Failure> {
        (0..count).map(|_| self.take_descriptor()).collect()
    }

    /// Takes the next received descriptor.
    pub(crate) fn take_descriptor(&mut self) -> Result<OwnedFd, Failure> {
        self.descriptors.pop_front().ok_or(Failure::new(Step::Protocol, Errno::BADF))
    }
}

impl<S: AsFd> AsFd for Control<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
