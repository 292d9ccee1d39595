//! The control socket, which is standard input.

use std::{
    collections::VecDeque,
    io::Stdin,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use codelia_init::{Decoder, Failure, Report, Request, Step, encode};
use codelia_sys::{Errno, fd};

/// Both directions of the control socket.
#[derive(Debug)]
pub(crate) struct Control {
    socket: Stdin,
    decoder: Decoder,
    /// Descriptors that arrived, for the requests that carry them, in order.
    descriptors: VecDeque<OwnedFd>,
}

impl Default for Control {
    fn default() -> Self {
        Self { socket: std::io::stdin(), decoder: Decoder::default(), descriptors: VecDeque::new() }
    }
}

impl Control {
    /// Says something. A backend that does not listen any more is no failure: the socket's end is
    /// seen when it is read.
    pub(crate) fn send(&self, report: &Report) -> Result<(), Failure> {
        let frame = encode(report).map_err(|_| Failure::new(Step::Understand, Errno::MSGSIZE))?;
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            match fd::send(&self.socket, rest, &[]) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(errno) => return Err(Failure::new(Step::Understand, errno)),
            }
        }
        Ok(())
    }

    /// Waits for the next request; `None` is the end of the socket.
    pub(crate) fn receive(&mut self) -> Result<Option<Request>, Failure> {
        loop {
            if let Some(request) = self.next()? {
                return Ok(Some(request));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// A request that has arrived as a whole already.
    pub(crate) fn next(&mut self) -> Result<Option<Request>, Failure> {
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

    /// The descriptors of the request that was received last.
    pub(crate) fn take_descriptors(&mut self, count: usize) -> Result<Vec<OwnedFd>, Failure> {
        if self.descriptors.len() < count {
            return Err(Failure::new(Step::Understand, Errno::BADF));
        }
        Ok(self.descriptors.drain(..count).collect())
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
