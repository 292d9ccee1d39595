//! Splits the body of a request or response into its messages.

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http_body_util::BodyExt;
use tonic::{Status, body::Body};

use crate::server::body_limit::{Framing, HEADER};

/// Reads the messages of a body. The size of a message is limited by the body.
pub(crate) struct MessageReader {
    body: Body,
    framing: Framing,
    buffer: BytesMut,
    /// Bytes of the buffer that have no end of line.
    scanned: usize,
    has_ended: bool,
    trailers: Option<HeaderMap>,
}

impl MessageReader {
    pub(crate) fn new(body: Body, framing: Framing) -> Self {
        Self {
            body,
            framing,
            buffer: BytesMut::new(),
            scanned: 0,
            has_ended: false,
            trailers: None,
        }
    }

    /// The next message, or `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            if self.has_ended {
                return Ok(None);
            }
            match self.body.frame().await.transpose()?.map(http_body::Frame::into_data) {
                Some(Ok(data)) => self.buffer.extend_from_slice(&data),
                Some(Err(other)) => self.trailers = other.into_trailers().ok(),
                None => {
                    self.has_ended = true;
                    return self.rest();
                }
            }
        }
    }

    /// The trailers, after the end.
    pub(crate) fn trailers(&self) -> Option<&HeaderMap> {
        self.trailers.as_ref()
    }

    /// A complete message of the buffer.
    fn take(&mut self) -> Result<Option<Bytes>, Status> {
        match self.framing {
            Framing::Whole => Ok(None),
            Framing::Lines => Ok(self.take_line()),
            Framing::Prefixed => self.take_prefixed(),
        }
    }

    /// A line that is not blank.
    fn take_line(&mut self) -> Option<Bytes> {
        while let Some(end) = memchr::memchr(b'\n', &self.buffer[self.scanned..]) {
            let line = self.buffer.split_to(self.scanned + end + 1).freeze();
            self.scanned = 0;
            if !line.trim_ascii().is_empty() {
                return Some(line);
            }
        }
        self.scanned = self.buffer.len();
        None
    }

    fn take_prefixed(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(&[flags, ref length @ ..]) = self.buffer.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        if flags != 0 {
            return Err(Status::unimplemented(
                "compressed messages are not supported; send identity",
            ));
        }
        let length = u32::from_be_bytes(*length) as usize;
        if self.buffer.len() - HEADER < length {
            return Ok(None);
        }
        self.buffer.advance(HEADER);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    /// What the buffer holds at the end of the body.
    fn rest(&mut self) -> Result<Option<Bytes>, Status> {
        self.scanned = 0;
        let rest = self.buffer.split().freeze();
        match self.framing {
            Framing::Whole => Ok(Some(rest)),
            Framing::Lines => Ok((!rest.trim_ascii().is_empty()).then_some(rest)),
            Framing::Prefixed if rest.is_empty() => Ok(None),
            Framing::Prefixed => Err(Status::invalid_argument("the body ends within a message")),
        }
    }
}

/// A message with its prefix.
pub(crate) fn prefixed(flags: u8, message: &[u8]) -> Result<Bytes, Status> {
    let length = u32::try_from(message.len()).map_err(|_| Status::internal("message too long"))?;
    Ok([&[flags], length.to_be_bytes().as_slice(), message].concat().into())
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use http_body_util::StreamBody;

    use super::*;

    /// Reads a body that arrives in pieces of a size.
    async fn read(framing: Framing, body: &[u8], size: usize) -> Result<Vec<Bytes>, Status> {
        let pieces: Vec<_> = body.chunks(size).map(Bytes::copy_from_slice).collect();
        let frames =
            stream::iter(pieces).map(|piece| Ok::<_, Status>(http_body::Frame::data(piece)));
        let mut reader = MessageReader::new(Body::new(StreamBody::new(frames)), framing);
        let mut messages = Vec::new();
        while let Some(message) = reader.next().await? {
            messages.push(message);
        }
        Ok(messages)
    }

    #[tokio::test]
    async fn messages_are_found_however_they_are_cut() {
        let prefixed = [prefixed(0, b"one").unwrap(), prefixed(0, b"").unwrap()].concat();
        for size in 1..20 {
            assert_eq!(read(Framing::Prefixed, &prefixed, size).await.unwrap(), ["one", ""]);
            assert_eq!(
                read(Framing::Lines, b"one\n\r\n two\nlast", size).await.unwrap(),
                ["one\n", " two\n", "last"]
            );
            assert_eq!(read(Framing::Whole, b"one\ntwo\n", size).await.unwrap(), ["one\ntwo\n"]);
        }
        assert_eq!(read(Framing::Whole, b"", 1).await.unwrap(), [""]);
        assert!(read(Framing::Lines, b" \n", 1).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn incomplete_and_compressed_messages_fail() {
        assert!(read(Framing::Prefixed, &[0, 0, 0, 0, 2, 7], 9).await.is_err());
        assert!(read(Framing::Prefixed, &[1, 0, 0, 0, 0], 9).await.is_err());
    }
}
