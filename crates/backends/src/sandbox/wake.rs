//! Wakes and stops the thread that answers the calls of a sandbox.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Wakes the thread.
#[derive(Debug, Clone)]
pub(super) struct Wake(Arc<WakeState>);

#[derive(Debug)]
struct WakeState {
    socket: UnixStream,
    is_stopped: AtomicBool,
}

/// The side of the thread. Readable when it was woken.
#[derive(Debug)]
pub(super) struct Woken {
    socket: UnixStream,
    wake: Wake,
}

impl Wake {
    pub(super) fn wake(&self) {
        // If the socket is full, the thread has not read the last one.
        let _ = (&self.0.socket).write(&[0]);
    }

    /// Has the thread end.
    pub(super) fn stop(&self) {
        self.0.is_stopped.store(true, Ordering::Release);
        self.wake();
    }
}

impl Woken {
    pub(super) fn new() -> io::Result<Self> {
        let (socket, woken) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let wake = Wake(Arc::new(WakeState { socket, is_stopped: AtomicBool::new(false) }));
        Ok(Self { socket: woken, wake })
    }

    pub(super) fn wake(&self) -> Wake {
        self.wake.clone()
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.wake.0.is_stopped.load(Ordering::Acquire)
    }

    /// Forgets that it was woken.
    pub(super) fn clear(&mut self) {
        let mut bytes = [0; 64];
        while self.socket.read(&mut bytes).is_ok_and(|count| count == bytes.len()) {}
    }
}

impl AsFd for Woken {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
