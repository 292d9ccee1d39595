//! Sending and receiving the messages of [`crate::control`] with their sockets.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    cmsg_space,
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    },
};
use serde::{Serialize, de::DeserializeOwned};

use crate::control::OPEN_SOCKETS;

/// The largest message in bytes. It fits into the default buffer of a socket.
pub const MAX_BYTES: usize = 192 * 1024;

/// A message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed; `EAGAIN` if the socket does not block and is not ready.
    #[error("cannot use the control socket")]
    Socket(#[from] Errno),
    /// The text is not a message.
    #[error("not a valid control message")]
    Text(#[from] serde_json::Error),
    /// The message has more bytes or sockets than allowed.
    #[error("control message is too large (max {MAX_BYTES} bytes and {OPEN_SOCKETS} sockets)")]
    TooLarge,
}

/// Creates a connected pair of control sockets, close-on-exec.
///
/// # Errors
/// As `socketpair(2)`.
pub fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Sends one message with its sockets.
///
/// # Errors
/// The message is too large, or as `sendmsg(2)`.
pub fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Error> {
    let text = serde_json::to_vec(message)?;
    if text.len() > MAX_BYTES || fds.len() > OPEN_SOCKETS {
        return Err(Error::TooLarge);
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(OPEN_SOCKETS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Error::TooLarge);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&text)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one message with its sockets, close-on-exec. `None` at end of file. Sockets are missing
/// if this process has too many open files.
///
/// # Errors
/// The message is too large or not valid, or as `recvmsg(2)`.
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> Result<Option<(T, Vec<OwnedFd>)>, Error> {
    let mut text = vec![0; MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(OPEN_SOCKETS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, flags)?;
    let mut fds = Vec::new();
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(Error::TooLarge);
    }
    if message.bytes == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&text[..message.bytes])?, fds)))
}

#[cfg(test)]
mod tests {
    use codelia_types::RunId;

    use super::*;
    use crate::control::Request;

    #[test]
    fn message_arrives_with_all_its_sockets() {
        let (ours, theirs) = pair().unwrap();
        let request = Request::Close { sandbox: RunId::generate() };
        send(&ours, &request, &vec![ours.as_fd(); OPEN_SOCKETS]).unwrap();
        let (received, fds) = receive::<Request>(&theirs).unwrap().unwrap();
        assert_eq!((received, fds.len()), (request, OPEN_SOCKETS));
        drop((ours, fds));
        assert!(receive::<Request>(&theirs).unwrap().is_none(), "end of file");
    }

    #[test]
    fn oversized_message_is_refused() {
        let (ours, theirs) = pair().unwrap();
        assert!(matches!(send(&ours, &"x".repeat(MAX_BYTES), &[]), Err(Error::TooLarge)));
        send(&ours, &"x".repeat(MAX_BYTES - 2), &[]).unwrap();
        assert_eq!(receive::<String>(&theirs).unwrap().unwrap().0.len(), MAX_BYTES - 2);
    }
}
