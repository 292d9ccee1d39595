//! File descriptors: creating them, passing them over Unix sockets, keeping them from a command.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Instant,
};

use nix::libc;
use rustix::{
    cmsg_space,
    event::{PollFd, PollFlags, Timespec},
    fs::{CWD, FileType, MemfdFlags, Mode, OFlags, SeekFrom, StatVfsMountFlags},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    },
    pipe::PipeFlags,
};

use crate::call::check;

/// The largest number of descriptors in one message, which is the kernel's.
pub const MAX_FDS_PER_MESSAGE: usize = 253;

/// Creates a connected pair of stream sockets, close-on-exec.
///
/// # Errors
/// As `socketpair(2)`.
pub fn socket_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// Creates an in-memory file with this content, positioned at its start, close-on-exec.
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

/// Opens `/dev/null` for reading and writing, close-on-exec.
///
/// # Errors
/// As `open(2)`.
pub fn dev_null() -> Result<OwnedFd, Errno> {
    rustix::fs::openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Whether the mount of a file is read-only. Does not open the file.
///
/// # Errors
/// As `statvfs(3)`.
pub fn is_on_read_only_mount(path: &Path) -> Result<bool, Errno> {
    Ok(rustix::fs::statvfs(path)?.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// The size of the file system that has a file, and what of it is free for users other than root,
/// in bytes.
///
/// # Errors
/// As `statvfs(3)`.
pub fn size_and_free(path: &Path) -> Result<(u64, u64), Errno> {
    let found = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok((bytes(found.f_blocks), bytes(found.f_bavail)))
}

/// Whether a descriptor refers to a directory.
///
/// # Errors
/// As `fstat(2)`.
pub fn is_directory(fd: impl AsFd) -> Result<bool, Errno> {
    let mode = rustix::fs::fstat(fd)?.st_mode;
    Ok(FileType::from_raw_mode(mode) == FileType::Directory)
}

/// The path in `/proc` under which this process can open the file behind a descriptor.
#[must_use]
pub fn proc_fd_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Creates a pipe, read end first, close-on-exec.
///
/// # Errors
/// As `pipe2(2)`.
pub fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
}

/// Sends bytes with descriptors attached to the first of them. Returns how many bytes were sent;
/// the descriptors were sent with them.
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

/// Shuts down the write direction of a socket. Succeeds if the peer has closed it already.
///
/// # Errors
/// As `shutdown(2)`.
pub fn shutdown_write(socket: impl AsFd) -> Result<(), Errno> {
    match rustix::net::shutdown(socket, rustix::net::Shutdown::Write) {
        Err(Errno::NOTCONN) => Ok(()),
        result => result,
    }
}

/// Receives bytes and appends the descriptors that came with them to `fds`, close-on-exec. Zero
/// bytes mean end of file.
///
/// # Errors
/// As `recvmsg(2)`.
pub fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS_PER_MESSAGE))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    Ok(message.bytes)
}

/// Replaces stdin, stdout and stderr of this process.
///
/// # Errors
/// As `dup2(2)`.
pub fn replace_stdio(stdin: impl AsFd, stdout: impl AsFd, stderr: impl AsFd) -> Result<(), Errno> {
    rustix::stdio::dup2_stdin(stdin)?;
    rustix::stdio::dup2_stdout(stdout)?;
    rustix::stdio::dup2_stderr(stderr)
}

/// Replaces stdin of this process.
///
/// # Errors
/// As `dup2(2)`.
pub fn replace_stdin(stdin: impl AsFd) -> Result<(), Errno> {
    rustix::stdio::dup2_stdin(stdin)
}

/// Redirects stdout and stderr to `/dev/null`.
///
/// # Errors
/// As `open(2)` and `dup2(2)`.
pub fn redirect_output_to_null() -> Result<(), Errno> {
    let null = dev_null()?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)
}

/// Makes stdin a duplicate of stdout.
///
/// # Errors
/// As `dup2(2)`.
pub fn dup_stdout_to_stdin() -> Result<(), Errno> {
    rustix::stdio::dup2_stdin(std::io::stdout())
}

/// Whether a descriptor can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// A read returns data or end of file now.
    Readable,
    /// Nothing to read yet.
    Pending,
    /// Nothing to read, and nothing can arrive: the peer is gone.
    Closed,
}

/// Checks whether a descriptor can be read, without blocking.
///
/// # Errors
/// As `poll(2)`.
pub fn poll_readable(fd: impl AsFd) -> Result<Readiness, Errno> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(readiness(fds[0].revents()))
}

/// Waits until one of two descriptors can be read or is closed. Both are pending if the deadline
/// passes first.
///
/// # Errors
/// As `poll(2)`.
pub fn wait_readable(
    first: impl AsFd,
    second: impl AsFd,
    deadline: Option<Instant>,
) -> Result<[Readiness; 2], Errno> {
    let mut fds = [PollFd::new(&first, PollFlags::IN), PollFd::new(&second, PollFlags::IN)];
    loop {
        let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(Timespec::try_from).transpose().map_err(|_| Errno::INVAL)?;
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) => return Ok([0, 1].map(|index| readiness(fds[index].revents()))),
        }
    }
}

fn readiness(events: PollFlags) -> Readiness {
    match (events.contains(PollFlags::IN), events.is_empty()) {
        (true, _) => Readiness::Readable,
        (false, true) => Readiness::Pending,
        (false, false) => Readiness::Closed,
    }
}

/// Whether a socket is at end of file: the peer stopped writing and all its data was read.
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

/// Whether every descriptor of the peer's end of a socket is closed, even if data is left to read.
///
/// # Errors
/// As `poll(2)`.
pub fn is_peer_closed(socket: impl AsFd) -> Result<bool, Errno> {
    let mut fds = [PollFd::new(&socket, PollFlags::empty())];
    rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(fds[0].revents().contains(PollFlags::HUP))
}

/// Sets close-on-exec on every descriptor above stderr.
///
/// # Errors
/// As `close_range(2)`.
pub fn set_cloexec_above_stdio() -> Result<(), Errno> {
    close_range(3, libc::CLOSE_RANGE_CLOEXEC)
}

pub(crate) fn close_range(first: u32, flags: u32) -> Result<(), Errno> {
    // SAFETY: takes no pointers. A caller that passes no CLOSE_RANGE_CLOEXEC guarantees that
    // nothing in this process owns these descriptors.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, i32::MAX, flags) })
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read, os::fd::AsFd};

    use super::*;

    #[test]
    fn descriptors_arrive_with_bytes_and_cloexec() {
        let (ours, theirs) = socket_pair().unwrap();
        let (read, write) = pipe().unwrap();
        assert_eq!(send(&ours, b"hello", &[write.as_fd()]).unwrap(), 5);
        drop(write);

        let (mut bytes, mut fds) = ([0; 16], Vec::new());
        assert_eq!(receive(&theirs, &mut bytes, &mut fds).unwrap(), 5);
        let received = fds.pop().unwrap();
        assert!(rustix::io::fcntl_getfd(&received).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        rustix::io::write(&received, b"through").unwrap();
        drop(received);

        let mut text = String::new();
        File::from(read).read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
    }

    #[test]
    fn receive_returns_zero_at_eof() {
        let (ours, theirs) = socket_pair().unwrap();
        drop(ours);
        assert_eq!(receive(&theirs, &mut [0; 4], &mut Vec::new()).unwrap(), 0);
    }

    #[test]
    fn peer_is_closed_after_its_last_descriptor() {
        let (ours, theirs) = socket_pair().unwrap();
        let duplicate = theirs.try_clone().unwrap();
        rustix::io::write(&theirs, b"unread").unwrap();
        shutdown_write(&ours).unwrap();
        assert_eq!(
            receive(&theirs, &mut [0; 4], &mut Vec::new()).unwrap(),
            0,
            "the peer sees end of file"
        );
        drop(theirs);
        assert!(!is_peer_closed(&ours).unwrap());
        drop(duplicate);
        assert!(is_peer_closed(&ours).unwrap());
        shutdown_write(&ours).unwrap();
    }
}
