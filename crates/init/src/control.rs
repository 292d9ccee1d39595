//! Message sockets: the control socket, which is stdin, and the launch socket.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use codelia_init::{Decoder, Failure, Step, encode};
use codelia_sys::{Errno, fd};
use serde::{Serialize, de::DeserializeOwned};

/// Most messages fit. Each page of it costs a fault in every sandbox.
const BUFFER_BYTES: usize = 4 * 1024;

/// The peer did not send what comes next in the protocol.
pub(crate) const UNEXPECTED: Failure = Failure::new(Step::Protocol, Errno::PROTO);

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
        let mut rest = frame.as_slice();
        let mut fds = fds;
        while !rest.is_empty() {
            match fd::send(&self.socket, rest, fds) {
                Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(errno) => return Err(Failure::new(Step::Protocol, errno)),
            }
        }
        Ok(())
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

    /// Waits for a message that must come.
    pub(crate) fn expect_message<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        self.receive_message()?.ok_or(UNEXPECTED)
    }

    /// Returns a message that has arrived completely, without reading the socket.
    pub(crate) fn next_buffered<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        self.decoder.next_message().map_err(|_| Failure::new(Step::Protocol, Errno::BADMSG))
    }

    /// Reads once from the socket. Returns false at end of file.
    pub(crate) fn fill(&mut self) -> Result<bool, Failure> {
        let mut bytes = [0; BUFFER_BYTES];
        let mut descriptors = Vec::new();
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
