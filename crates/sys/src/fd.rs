//! Descriptors: passing them over Unix sockets, keeping them from a command.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use nix::libc;
use rustix::{
    cmsg_space,
    event::{PollFd, PollFlags, Timespec},
    fs::{CWD, MemfdFlags, Mode, OFlags, SeekFrom},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    },
    pipe::PipeFlags,
};

/// The most descriptors one message carries.
pub const MAX_FDS_PER_MESSAGE: usize = 8;

/// A connected pair of stream sockets, closed on exec.
///
/// # Errors
/// As `socketpair(2)`.
pub fn socket_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// A file in memory with this content, to be read from its start, closed on exec.
///
/// # Errors
/// As `memfd_create(2)`, `write(2)` and `lseek(2)`.
pub fn memfd(name: &str, content: &[u8]) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
    let mut rest = content;
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    rustix::fs::seek(&file, SeekFrom::Start(0))?;
    Ok(file)
}

/// Where nothing comes from and everything is lost, closed on exec.
///
/// # Errors
/// As `open(2)`.
pub fn dev_null() -> Result<OwnedFd, Errno> {
    rustix::fs::openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// A pipe, read end first, closed on exec.
///
/// # Errors
/// As `pipe2(2)`.
pub fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
}

/// Sends bytes, with descriptors attached to the first of them. Answers how many bytes were taken;
/// the descriptors went with them.
///
/// # Errors
/// As `sendmsg(2)`; `EINVAL` for more than [`MAX_FDS_PER_MESSAGE`] descriptors.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS_PER_MESSAGE))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)
}

/// Tells the other side of a socket that nothing more comes. A side that is closed already needs no telling.
///
/// # Errors
/// As `shutdown(2)`.
pub fn shutdown_write(socket: impl AsFd) -> Result<(), Errno> {
    match rustix::net::shutdown(socket, rustix::net::Shutdown::Write) {
        Err(Errno::NOTCONN) => Ok(()),
        answer => answer,
    }
}

/// Receives bytes and appends the descriptors that came with them to `fds`, closed on exec.
/// Zero bytes are the other side's end.
///
/// # Errors
/// As `recvmsg(2)`.
pub fn receive(socket: impl AsFd, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS_PER_MESSAGE))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    Ok(message.bytes)
}

/// Makes the three streams of this process those given.
///
/// # Errors
/// As `dup2(2)`.
pub fn replace_streams(stdin: impl AsFd, stdout: impl AsFd, stderr: impl AsFd) -> Result<(), Errno> {
    rustix::stdio::dup2_stdin(stdin)?;
    rustix::stdio::dup2_stdout(stdout)?;
    rustix::stdio::dup2_stderr(stderr)
}

/// Makes standard input this one.
///
/// # Errors
/// As `dup2(2)`.
pub fn replace_input(stdin: impl AsFd) -> Result<(), Errno> {
    rustix::stdio::dup2_stdin(stdin)
}

/// Points standard output and standard error to `/dev/null`.
///
/// # Errors
/// As `open(2)` and `dup2(2)`.
pub fn silence_output() -> Result<(), Errno> {
    let null = dev_null()?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)
}

/// Makes standard input what standard output is.
///
/// # Errors
/// As `dup2(2)`.
pub fn input_like_output() -> Result<(), Errno> {
    rustix::stdio::dup2_stdin(std::io::stdout())
}

/// Whether something can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// Now.
    Readable,
    /// Maybe later.
    Pending,
    /// Never again.
    Closed,
}

/// Looks whether something can be read, without waiting for it.
///
/// # Errors
/// As `poll(2)`.
pub fn poll_readable(fd: impl AsFd) -> Result<Readiness, Errno> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    let events = fds[0].revents();
    Ok(match (events.contains(PollFlags::IN), events.is_empty()) {
        (true, _) => Readiness::Readable,
        (false, true) => Readiness::Pending,
        (false, false) => Readiness::Closed,
    })
}

/// Whether the other side of a socket has ended and nothing is left to be read.
///
/// # Errors
/// As `recv(2)`.
pub fn is_eof(socket: impl AsFd) -> Result<bool, Errno> {
    match rustix::net::recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((count, _)) => Ok(count == 0),
        Err(Errno::AGAIN) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether nobody holds the other side of a socket any more, whatever is left to be read.
///
/// # Errors
/// As `poll(2)`.
pub fn is_peer_closed(socket: impl AsFd) -> Result<bool, Errno> {
    let mut fds = [PollFd::new(&socket, PollFlags::empty())];
    rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(fds[0].revents().contains(PollFlags::HUP))
}

/// Lets no descriptor but the three streams survive the next exec.
///
/// # Errors
/// As `close_range(2)`.
pub fn keep_from_command() -> Result<(), Errno> {
    close_range(3, libc::CLOSE_RANGE_CLOEXEC)
}

pub(crate) fn close_range(first: u32, flags: u32) -> Result<(), Errno> {
    // SAFETY: takes no pointers. Who calls it without CLOSE_RANGE_CLOEXEC guarantees that the
    // process owns none of these descriptors.
    let answer = unsafe { libc::syscall(libc::SYS_close_range, first, i32::MAX, flags) };
    if answer == 0 { Ok(()) } else { Err(last_errno()) }
}

pub(crate) fn last_errno() -> Errno {
    Errno::from_raw_os_error(nix::errno::Errno::last_raw())
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read, os::fd::AsFd};

    use super::*;

    #[test]
    fn descriptors_arrive_with_their_bytes_and_are_closed_on_exec() {
        let (here, there) = socket_pair().unwrap();
        let (read, write) = pipe().unwrap();
        assert_eq!(send(&here, b"hello", &[write.as_fd()]).unwrap(), 5);
        drop(write);

        let (mut bytes, mut fds) = ([0; 16], Vec::new());
        assert_eq!(receive(&there, &mut bytes, &mut fds).unwrap(), 5);
        let received = fds.pop().unwrap();
        assert!(rustix::io::fcntl_getfd(&received).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        rustix::io::write(&received, b"through").unwrap();
        drop(received);

        let mut text = String::new();
        File::from(read).read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
    }

    #[test]
    fn the_end_of_the_other_side_is_zero_bytes() {
        let (here, there) = socket_pair().unwrap();
        drop(here);
        assert_eq!(receive(&there, &mut [0; 4], &mut Vec::new()).unwrap(), 0);
    }

    #[test]
    fn a_side_is_closed_when_the_last_one_lets_go_of_it() {
        let (here, there) = socket_pair().unwrap();
        let held = there.try_clone().unwrap();
        rustix::io::write(&there, b"unread").unwrap();
        shutdown_write(&here).unwrap();
        assert_eq!(receive(&there, &mut [0; 4], &mut Vec::new()).unwrap(), 0, "it is told the end");
        drop(there);
        assert!(!is_peer_closed(&here).unwrap());
        drop(held);
        assert!(is_peer_closed(&here).unwrap());
        shutdown_write(&here).unwrap();
    }
}
