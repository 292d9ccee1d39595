//! One connection: how long it may be silent, and how it is closed.

use std::{
    future::{Future, pending},
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
    time::timeout,
};
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use crate::{Limits, admission::Permit, calls::Calls};

/// How long a client may take to close a connection that has no open call, once it was asked to.
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// A socket that can be closed from outside, since its owner is a task of the transport.
#[derive(Debug)]
pub(crate) struct Connection<IO> {
    io: IO,
    killed: Pin<Box<WaitForCancellationFutureOwned>>,
    _permit: Permit,
    _closed: DropGuard,
}

/// Watches and closes a [`Connection`].
#[derive(Debug)]
pub(crate) struct Supervisor {
    pub(crate) calls: Arc<watch::Sender<Calls>>,
    kill: CancellationToken,
    closed: CancellationToken,
}

impl<IO> Connection<IO> {
    pub(crate) fn new(io: IO, permit: Permit) -> (Self, Supervisor) {
        let supervisor = Supervisor {
            calls: Arc::new(watch::channel(Calls::default()).0),
            kill: CancellationToken::new(),
            closed: CancellationToken::new(),
        };
        let connection = Self {
            io,
            killed: Box::pin(supervisor.kill.clone().cancelled_owned()),
            _permit: permit,
            _closed: supervisor.closed.clone().drop_guard(),
        };
        (connection, supervisor)
    }

    /// Fails once the connection is killed. Wakes the task that called it last.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.killed.as_mut().poll(context) {
            Poll::Ready(()) => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "connection closed: idle"))
            }
            Poll::Pending => Ok(()),
        }
    }
}

impl Supervisor {
    /// Waits until the connection has to be closed: it is silent for too long, or `shutdown`.
    /// Returns early if the client closed it.
    pub(crate) async fn end(&self, limits: &Limits, shutdown: &CancellationToken) {
        tokio::select! {
            () = self.closed.cancelled() => {}
            () = shutdown.cancelled() => {}
            () = self.silent(limits) => {}
        }
    }

    /// Closes a connection that has been asked to close: at once without open calls, or when the
    /// last of them has ended. Never returns.
    pub(crate) async fn kill_when_unused(&self) {
        let mut calls = self.calls.subscribe();
        loop {
            let unused = calls.wait_for(|calls| calls.open == 0).await.map(|calls| calls.begun);
            let Ok(begun) = unused else { break };
            if timeout(CLOSE_GRACE, calls.wait_for(|calls| calls.begun > begun)).await.is_err() {
                break;
            }
        }
        self.kill.cancel();
        pending().await
    }

    /// Waits until no request arrived in time.
    async fn silent(&self, limits: &Limits) {
        let mut calls = self.calls.subscribe();
        let mut limit = limits.first_request_timeout;
        loop {
            let unused = calls.wait_for(|calls| calls.open == 0).await.map(|calls| calls.begun);
            // The sender is ours, so the channel is open.
            let Ok(begun) = unused else { return };
            if timeout(limit, calls.wait_for(|calls| calls.begun > begun)).await.is_err() {
                return;
            }
            limit = limits.idle_timeout;
        }
    }
}

impl<IO> Connected for Connection<IO> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl<IO: AsyncRead + Unpin> AsyncRead for Connection<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        pin!(&mut self.io).poll_read(context, buffer)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Connection<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        pin!(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        pin!(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        pin!(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        pin!(&mut self.io).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
