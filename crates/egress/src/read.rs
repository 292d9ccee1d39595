//! Reads from programs until a parser has what it needs, within limits of size and time.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Duration, Instant, timeout, timeout_at},
};

use crate::refusal::{Reason, Refusal};

/// For the program to read an answer before the connection ends.
const LINGER: Duration = Duration::from_secs(2);

/// Why nothing could be parsed.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The program ended the connection.
    Ended,
    Refused(Refusal),
}

impl From<Reason> for ReadError {
    fn from(reason: Reason) -> Self {
        Self::Refused(reason.into())
    }
}

/// Reads into `buffer` until `parse` returns something. The parser fails if the buffer is too
/// large.
pub(crate) async fn read_until<T>(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
    limit: Duration,
    mut parse: impl FnMut(&[u8]) -> Result<Option<T>, Reason>,
) -> Result<T, ReadError> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(parsed) = parse(buffer)? {
            return Ok(parsed);
        }
        match timeout_at(deadline, stream.read_buf(buffer)).await {
            Err(_) => return Err(Reason::HeaderTimeout.into()),
            Ok(Ok(0) | Err(_)) => return Err(ReadError::Ended),
            Ok(Ok(_)) => {}
        }
    }
}

/// A program that speaks with the proxy.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) stream: TcpStream,
    /// Bytes that were read and not parsed yet.
    pub(crate) start: Vec<u8>,
    /// For each message.
    pub(crate) limit: Duration,
}

impl Program {
    /// Reads a message, which `parse` returns with its length. A program that ends before sent
    /// none.
    pub(crate) async fn read<T>(
        &mut self,
        parse: impl FnMut(&[u8]) -> Result<Option<(T, usize)>, Reason>,
    ) -> Result<T, Refusal> {
        match read_until(&mut self.stream, &mut self.start, self.limit, parse).await {
            Ok((message, length)) => {
                self.start.drain(..length);
                Ok(message)
            }
            Err(ReadError::Ended) => Err(Reason::InvalidRequest.into()),
            Err(ReadError::Refused(refusal)) => Err(refusal),
        }
    }
}

/// Reads what a program still sends, for a moment, after an answer to it is complete. A socket that
/// is closed with unread data is reset, and the program may lose the answer.
pub(crate) async fn drain(stream: &mut (impl AsyncRead + Unpin)) {
    let mut buffer = [0; 4096];
    let rest = async { while let Ok(1..) = stream.read(&mut buffer).await {} };
    // At a timeout the program does not want the answer.
    let _ = timeout(LINGER, rest).await;
}

/// A socket of which some bytes were read already. They are read again first.
#[derive(Debug)]
pub(crate) struct Replayed<'a> {
    pub(crate) start: Vec<u8>,
    pub(crate) stream: &'a mut TcpStream,
}

impl AsyncRead for Replayed<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.start.is_empty() {
            return Pin::new(&mut *self.stream).poll_read(cx, buf);
        }
        let count = buf.remaining().min(self.start.len());
        buf.put_slice(&self.start[..count]);
        self.start.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Replayed<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_shutdown(cx)
    }
}
