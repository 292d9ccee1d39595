//! Copies bytes between a program and its destination, counted and limited.

use std::{
    future::Future,
    io,
    os::fd::{AsFd, OwnedFd},
    pin::pin,
    sync::atomic::{AtomicU64, Ordering},
};

use codelia_policy::EgressLimits;
use rustix::{
    net::Shutdown,
    pipe::{PipeFlags, SpliceFlags},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest},
    net::TcpStream,
    task::coop::consume_budget,
    time::{Duration, Instant, sleep_until, timeout},
};

use crate::{
    record::Record,
    refusal::Reason,
    sandbox::{Direction, Sandbox},
};

/// Copied at once. Connections without traffic hold no buffer.
const TCP_BUFFER: usize = 64 * 1024;
const BUFFER: usize = 16 * 1024;
/// The size of a pipe, and so of what is moved at once.
const PIPE_BYTES: usize = 256 * 1024;
/// A pipe is closed after it was idle for this long.
const PIPE_IDLE: Duration = Duration::from_secs(1);

/// The traffic of one connection.
#[derive(Debug)]
pub(crate) struct Traffic<'a> {
    sandbox: &'a Sandbox,
    record: &'a Record,
    limits: EgressLimits,
    started: Instant,
    /// Milliseconds from the start to the last byte.
    last: AtomicU64,
}

impl<'a> Traffic<'a> {
    pub(crate) fn new(sandbox: &'a Sandbox, record: &'a Record) -> Self {
        let limits = sandbox.limits();
        Self { sandbox, record, limits, started: Instant::now(), last: AtomicU64::new(0) }
    }

    /// Counts bytes before they are sent on.
    pub(crate) fn count(&self, direction: Direction, bytes: usize) -> Result<(), Reason> {
        let millis = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(millis, Ordering::Relaxed);
        self.record.count(direction, bytes as u64);
        self.sandbox.count_bytes(direction, bytes as u64, &self.limits)
    }

    /// Waits until there was no traffic for the idle timeout.
    async fn idle(&self) {
        loop {
            let last = self.started + Duration::from_millis(self.last.load(Ordering::Relaxed));
            let at = last + self.limits.idle_timeout;
            if at <= Instant::now() {
                return;
            }
            sleep_until(at).await;
        }
    }

    /// Runs a transfer until it ends or is idle. A connection that breaks or is idle has ended.
    pub(crate) async fn limit(
        &self,
        transfer: impl Future<Output = Result<(), Ended>>,
    ) -> Result<(), Reason> {
        tokio::select! {
            result = transfer => match result {
                Err(Ended::Refused(reason)) => Err(reason),
                Ok(()) | Err(Ended::Broken) => Ok(()),
            },
            () = self.idle() => Ok(()),
        }
    }
}

/// Why a transfer ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// One side broke the connection.
    Broken,
    Refused(Reason),
}

impl From<io::Error> for Ended {
    fn from(_: io::Error) -> Self {
        Self::Broken
    }
}

impl From<Reason> for Ended {
    fn from(reason: Reason) -> Self {
        Self::Refused(reason)
    }
}

/// Copies both ways between two sockets until both sides have ended.
pub(crate) async fn copy_sockets(
    traffic: &Traffic<'_>,
    program: &TcpStream,
    destination: &TcpStream,
) -> Result<(), Ended> {
    let sent = copy_socket(traffic, Direction::Sent, program, destination);
    let received = copy_socket(traffic, Direction::Received, destination, program);
    tokio::try_join!(sent, received).map(|_| ())
}

async fn copy_socket(
    traffic: &Traffic<'_>,
    direction: Direction,
    from: &TcpStream,
    to: &TcpStream,
) -> Result<(), Ended> {
    let mut pipe = None;
    loop {
        if pipe.is_some() && timeout(PIPE_IDLE, from.readable()).await.is_err() {
            pipe = None;
        }
        from.readable().await?;
        if copy_available(traffic, direction, from, to, &mut pipe).await? == Source::Ended {
            return Ok(rustix::net::shutdown(to, Shutdown::Write).map_err(io::Error::from)?);
        }
    }
}

/// The state of a socket after all that was there was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Empty,
    Ended,
}

/// Copies what can be read now. Makes the pipe when more is there than fits into a buffer: from
/// there on the kernel moves it.
async fn copy_available(
    traffic: &Traffic<'_>,
    direction: Direction,
    from: &TcpStream,
    to: &TcpStream,
    pipe: &mut Option<Pipe>,
) -> Result<Source, Ended> {
    if let Some(pipe) = pipe {
        return splice_available(traffic, direction, from, to, pipe).await;
    }
    let mut buffer = Vec::with_capacity(TCP_BUFFER);
    loop {
        consume_budget().await;
        buffer.clear();
        match from.try_read_buf(&mut buffer) {
            Ok(0) => return Ok(Source::Ended),
            Ok(count) => traffic.count(direction, count)?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Source::Empty),
            Err(error) => return Err(error.into()),
        }
        write_all(to, &buffer).await?;
        if buffer.len() == TCP_BUFFER
            && let Ok(made) = Pipe::new()
        {
            drop(buffer);
            return splice_available(traffic, direction, from, to, pipe.insert(made)).await;
        }
    }
}

async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        to.writable().await?;
        match to.try_write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Moves what can be read now through a pipe, without copying it.
async fn splice_available(
    traffic: &Traffic<'_>,
    direction: Direction,
    from: &TcpStream,
    to: &TcpStream,
    pipe: &Pipe,
) -> Result<Source, Ended> {
    loop {
        consume_budget().await;
        let mut left = match from
            .try_io(Interest::READABLE, || splice(from, &pipe.input, PIPE_BYTES))
        {
            Ok(0) => return Ok(Source::Ended),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Source::Empty),
            Err(error) => return Err(error.into()),
        };
        traffic.count(direction, left)?;
        while left > 0 {
            to.writable().await?;
            match to.try_io(Interest::WRITABLE, || splice(&pipe.output, to, left)) {
                Ok(count) => left -= count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Holds bytes between two sockets. Empty whenever no transfer is under way.
#[derive(Debug)]
struct Pipe {
    output: OwnedFd,
    input: OwnedFd,
}

impl Pipe {
    /// Fails for a user whose pipes hold too much already: through the small pipe that the kernel
    /// gives then, bytes move slower than by copying.
    fn new() -> io::Result<Self> {
        let (output, input) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        rustix::pipe::fcntl_setpipe_size(&input, PIPE_BYTES)?;
        Ok(Self { output, input })
    }
}

fn splice(from: impl AsFd, to: impl AsFd, max: usize) -> io::Result<usize> {
    Ok(rustix::pipe::splice(from, None, to, None, max, SpliceFlags::MOVE | SpliceFlags::NONBLOCK)?)
}

/// Copies one way until the end, and ends the other side then.
pub(crate) async fn copy_to_end(
    traffic: &Traffic<'_>,
    direction: Direction,
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> Result<(), Ended> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        if from.read_buf(&mut buffer).await? == 0 {
            return Ok(to.shutdown().await?);
        }
        traffic.count(direction, buffer.len())?;
        to.write_all(&buffer).await?;
        to.flush().await?;
    }
}

/// Waits for the first of two: the response, which ends an exchange, or a failure of the request.
pub(crate) async fn until_response<E>(
    request: impl Future<Output = Result<(), E>>,
    response: impl Future<Output = Result<(), E>>,
) -> Result<(), E> {
    let mut response = pin!(response);
    tokio::select! {
        result = &mut response => result,
        result = request => match result {
            Ok(()) => response.await,
            Err(error) => Err(error),
        },
    }
}
