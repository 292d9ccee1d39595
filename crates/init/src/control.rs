//! Sockets to a backend: the control socket, which is standard input, and the launch socket.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use codelia_init::{Decoder, Failure, Report, Request, Step, encode};
use codelia_sys::{Errno, fd};
use serde::{Serialize, de::DeserializeOwned};

/// Both directions of a socket.
#[derive(Debug)]
pub(crate) struct Control<S> {
    socket: S,
    decoder: Decoder,
    /// Descriptors that arrived, for the messages that carry them, in order.
    descriptors: VecDeque<OwnedFd>,
}

impl<S: AsFd> Control<S> {
    pub(crate) fn new(socket: S) -> Self {
        Self { socket, decoder: Decoder::default(), descriptors: VecDeque::new() }
    }

    /// Says something. A backend that does not listen any more is no failure: the socket's end is
    /// seen when it is read.
    pub(crate) fn send(&self, report: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        let frame = encode(report).map_err(|_| Failure::new(Step::Understand, Errno::MSGSIZE))?;
        let (mut rest, mut fds) = (frame.as_slice(), fds);
        while !rest.is_empty() {
            match fd::send(&self.socket, rest, fds) {
                Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(errno) => return Err(Failure::new(Step::Understand, errno)),
            }
        }
        Ok(())
    }

    /// Waits for the next request; `None` is the end of the socket.
    pub(crate) fn receive(&mut self) -> Result<Option<Request>, Failure> {
        self.receive_message()
    }

    /// Waits for what the command's process says, from its other side.
    pub(crate) fn receive_report(&mut self) -> Result<Option<Report>, Failure> {
        self.receive_message()
    }

    /// Waits for any other message.
    pub(crate) fn receive_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        loop {
            if let Some(message) = self.next()? {
                return Ok(Some(message));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// A message that has arrived as a whole already.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        self.decoder.next_message().map_err(|_| Failure::new(Step::Understand, Errno::BADMSG))
    }

    /// Reads once; false at the end of the socket.
    pub(crate) fn fill(&mut self) -> Result<bool, Failure> {
        let (mut bytes, mut descriptors) = ([0; 16 * 1024], Vec::new());
        let count = match fd::receive(&self.socket, &mut bytes, &mut descriptors) {
            Ok(count) => count,
            Err(Errno::CONNRESET) => 0,
            Err(errno) => return Err(Failure::new(Step::Understand, errno)),
        };
        self.decoder.push(&bytes[..count]);
        self.descriptors.extend(descriptors);
        Ok(count > 0)
    }

    /// All descriptors that came.
    pub(crate) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors).into()
    }

    /// The next descriptor that came with a message.
    pub(crate) fn take_descriptor(&mut self) -> Result<OwnedFd, Failure> {
        self.descriptors.pop_front().ok_or(Failure::new(Step::Understand, Errno::BADF))
    }
}

impl<S: AsFd> AsFd for Control<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
