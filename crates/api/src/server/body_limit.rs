//! The request of a call while it arrives: the size of each message, and the time it may take.
//!
//! A gRPC message announces its length before its bytes, so a message that is too large is refused
//! before any of it is kept.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use codelia_types::Reason;
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};
use tonic::{Status, body::Body};

use super::{calls_in_flight::CallPermit, methods::Method};
use crate::error::ApiError;

/// Health and reflection, which need no key.
const MAX_WITHOUT_KEY: usize = 1024;

/// One byte of flags and four of length.
pub(crate) const HEADER: usize = 5;

/// JSON is longer than the message that it becomes: base64 by a third, escapes by more.
const TEXT_FACTOR: usize = 2;

/// How the messages of a body are delimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Flags and length come before each message.
    Prefixed,
    /// Each line is a message of JSON.
    Lines,
    /// The body is one message of JSON.
    Whole,
}

/// What is allowed to the request of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessageRules {
    /// Bytes of one message.
    pub(crate) max_bytes: usize,
    /// How long the caller may take; see [`Pace`].
    pub(crate) timeout: Duration,
    pub(crate) pace: Pace,
    pub(crate) framing: Framing,
}

impl MessageRules {
    /// The rules of a call of a public method.
    pub(crate) fn new(method: &Method, framing: Framing, timeout: Duration) -> Self {
        let max_bytes = match framing {
            Framing::Prefixed => method.max_message_bytes,
            Framing::Lines | Framing::Whole => TEXT_FACTOR * method.max_message_bytes,
        };
        let pace = if method.is_client_streaming { Pace::EachFrame } else { Pace::Whole };
        Self { max_bytes, timeout, pace, framing }
    }

    /// The rules of a call that needs no key: health and reflection, only as gRPC.
    pub(crate) fn without_key(path: &str, framing: Framing, timeout: Duration) -> Self {
        let is_reflection = path.starts_with("/grpc.reflection.");
        let pace = if is_reflection { Pace::EachMessage } else { Pace::Whole };
        Self { max_bytes: MAX_WITHOUT_KEY, timeout, pace, framing }
    }
}

/// What must happen within the timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// The whole request arrives: it has one message.
    Whole,
    /// The next message arrives: a stream without a key.
    EachMessage,
    /// The next bytes of a message arrive. Between messages the stream may be quiet: it may belong
    /// to an interactive command.
    EachFrame,
}

/// The caller took too long to send its request.
fn stalled() -> ApiError {
    ApiError::new(Reason::StreamStalled, "the request took too long to arrive; send it again")
}

/// A refusal as the source of the [`Status`] that a handler receives.
#[derive(Debug)]
pub(crate) struct MessageError(pub(crate) ApiError);

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text())
    }
}

impl std::error::Error for MessageError {}

/// The body of a request under [`MessageRules`].
pub(crate) struct LimitedBody {
    body: Body,
    rules: MessageRules,
    permit: Option<Arc<CallPermit>>,
    position: Position,
    /// Fires when the caller has been waited for too long. Set when the wait begins.
    timer: Pin<Box<Sleep>>,
    is_waiting: bool,
}

/// The position in the sequence of messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Position {
    header: [u8; HEADER],
    /// Bytes of the header that have arrived.
    header_bytes: usize,
    /// Bytes of the message that have not arrived.
    missing: usize,
    /// Bytes of a message without a prefix that have arrived.
    arrived: usize,
    /// Whether more than white space of it has arrived.
    has_text: bool,
    /// Whether a message is complete.
    has_message: bool,
}

impl LimitedBody {
    pub(crate) fn new(body: Body, rules: MessageRules, permit: Option<Arc<CallPermit>>) -> Self {
        let position = Position::default();
        Self {
            body,
            rules,
            permit,
            position,
            timer: Box::pin(sleep(rules.timeout)),
            is_waiting: false,
        }
    }

    /// Follows the messages in a piece of the request.
    fn advance(&mut self, data: &[u8]) -> Result<(), ApiError> {
        match self.rules.framing {
            Framing::Prefixed => self.advance_prefixed(data),
            Framing::Whole => self.advance_text(data),
            Framing::Lines => data.split_inclusive(|byte| *byte == b'\n').try_for_each(|line| {
                self.advance_text(line)?;
                if line.ends_with(b"\n") {
                    self.end_line();
                }
                Ok(())
            }),
        }
    }

    fn advance_text(&mut self, data: &[u8]) -> Result<(), ApiError> {
        self.position.arrived += data.len();
        self.position.has_text |= !data.trim_ascii().is_empty();
        self.expect(self.position.arrived, data.len())
    }

    /// A blank line is not a message: the caller must still send one in time.
    fn end_line(&mut self) {
        if self.position.has_text {
            self.end_message();
        } else {
            self.position.arrived = 0;
        }
    }

    fn advance_prefixed(&mut self, mut data: &[u8]) -> Result<(), ApiError> {
        while !data.is_empty() {
            let at = &mut self.position;
            if at.header_bytes < HEADER {
                let (head, rest) = data.split_at(data.len().min(HEADER - at.header_bytes));
                at.header[at.header_bytes..at.header_bytes + head.len()].copy_from_slice(head);
                at.header_bytes += head.len();
                data = rest;
                if at.header_bytes == HEADER {
                    self.begin_message()?;
                }
            } else {
                let taken = data.len().min(at.missing);
                at.missing -= taken;
                data = &data[taken..];
            }
            if self.position.header_bytes == HEADER && self.position.missing == 0 {
                self.end_message();
            }
        }
        Ok(())
    }

    fn begin_message(&mut self) -> Result<(), ApiError> {
        let [_, length @ ..] = self.position.header;
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        self.expect(length, length)?;
        self.position.missing = length;
        Ok(())
    }

    /// Admits more bytes of a message that is now known to have a length.
    fn expect(&self, length: usize, more: usize) -> Result<(), ApiError> {
        if length > self.rules.max_bytes {
            let max = self.rules.max_bytes;
            return Err(ApiError::invalid(
                "request",
                format!("maximum is {max} bytes for a message"),
            ));
        }
        self.permit.as_ref().map_or(Ok(()), |permit| permit.hold(more))
    }

    fn end_message(&mut self) {
        let at = &mut self.position;
        (at.header_bytes, at.arrived, at.has_text, at.has_message) = (0, 0, false, true);
        // A unary call holds its only message until it ends.
        if let (Some(permit), Pace::EachMessage | Pace::EachFrame) = (&self.permit, self.rules.pace)
        {
            permit.release();
        }
        if self.rules.pace == Pace::EachMessage {
            self.is_waiting = false;
        }
    }

    /// Whether the caller has to send something in time.
    fn is_timed(&self) -> bool {
        match self.rules.pace {
            Pace::Whole | Pace::EachMessage => true,
            Pace::EachFrame => {
                let at = &self.position;
                !at.has_message || at.header_bytes > 0 || at.arrived > 0
            }
        }
    }

    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !self.is_timed() {
            return Poll::Pending;
        }
        if !self.is_waiting {
            self.is_waiting = true;
            let until = Instant::now() + self.rules.timeout;
            self.timer.as_mut().reset(until);
        }
        self.timer.as_mut().poll(context)
    }

    fn status(&self, error: ApiError) -> Status {
        refuse_message(error, self.rules.pace != Pace::Whole)
    }
}

/// The error for the handler. A handler of a stream makes its own status of the source; a unary
/// call fails before it has a handler.
pub(crate) fn refuse_message(error: ApiError, is_stream: bool) -> Status {
    if !is_stream {
        return error.into();
    }
    let mut status = Status::internal("request refused");
    status.set_source(Arc::new(MessageError(error)));
    status
}

impl http_body::Body for LimitedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                if self.rules.pace == Pace::EachFrame {
                    self.is_waiting = false;
                }
                let advanced = frame.data_ref().map_or(Ok(()), |data| self.advance(data));
                Poll::Ready(Some(advanced.map_err(|error| self.status(error)).map(|()| frame)))
            }
            Poll::Pending => match self.poll_timeout(context) {
                Poll::Ready(()) => Poll::Ready(Some(Err(self.status(stalled())))),
                Poll::Pending => Poll::Pending,
            },
            ended => ended,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::methods::Methods;

    fn limited(pace: Pace, framing: Framing) -> LimitedBody {
        let rules = MessageRules { max_bytes: 10, timeout: Duration::from_secs(60), pace, framing };
        LimitedBody::new(Body::empty(), rules, None)
    }

    fn message(length: u8) -> Vec<u8> {
        [vec![0, 0, 0, 0, length], vec![7; length.into()]].concat()
    }

    #[tokio::test]
    async fn messages_are_measured_however_they_are_cut() {
        let bytes = [message(3), message(0), message(10), message(11)].concat();
        for size in 1..bytes.len() {
            let mut body = limited(Pace::EachMessage, Framing::Prefixed);
            let mut pieces = bytes.chunks(size);
            let refused = pieces.find_map(|piece| body.advance(piece).err());
            let error = ApiError::invalid("request", "maximum is 10 bytes for a message");
            assert_eq!(refused, Some(error), "in pieces of {size}");
        }
    }

    #[tokio::test]
    async fn text_is_measured_however_it_is_cut() {
        for (framing, text, fits) in [
            (Framing::Whole, "0123456789", true),
            (Framing::Whole, "01234\n56789", false),
            (Framing::Lines, "012345678\n01\n0123456789", true),
            (Framing::Lines, "01\n0123456789\n", false),
        ] {
            for size in 1..text.len() {
                let mut body = limited(Pace::EachFrame, framing);
                let measured =
                    text.as_bytes().chunks(size).try_for_each(|piece| body.advance(piece));
                assert_eq!(measured.is_ok(), fits, "{text:?} in pieces of {size}");
                assert!(body.is_timed(), "the last message is not complete");
            }
        }
    }

    #[tokio::test]
    async fn blank_lines_are_not_messages() {
        let mut body = limited(Pace::EachFrame, Framing::Lines);
        for piece in ["\n", " ", "\n\r\n"] {
            body.advance(piece.as_bytes()).unwrap();
            assert!(body.is_timed(), "the first message");
        }
        body.advance(b"{}\n\n").unwrap();
        assert!(!body.is_timed(), "a quiet stream");
    }

    #[test]
    fn method_decides_size_and_pace() {
        let methods = Methods::load().unwrap();
        let of = |path: &str, framing| {
            MessageRules::new(methods.get(path).unwrap(), framing, Duration::from_secs(60))
        };
        let plain = of("/codelia.v1.RunService/WatchRun", Framing::Prefixed);
        let content = of("/codelia.v1.RunService/Exec", Framing::Prefixed);
        assert_eq!((plain.max_bytes, plain.pace), (256 * 1024, Pace::Whole));
        assert_eq!((content.max_bytes, content.pace), (4 * 1024 * 1024, Pace::EachFrame));
        let json = of("/codelia.v1.RunService/Exec", Framing::Lines);
        assert_eq!(json.max_bytes, TEXT_FACTOR * content.max_bytes);
    }

    #[tokio::test]
    async fn only_unfinished_messages_of_keys_are_timed() {
        let mut body = limited(Pace::EachFrame, Framing::Prefixed);
        assert!(body.is_timed(), "the first message");
        body.advance(&message(3)).unwrap();
        assert!(!body.is_timed(), "a quiet stream");
        body.advance(&[0]).unwrap();
        assert!(body.is_timed(), "part of a header");
        body.advance(&message(3)[1..5]).unwrap();
        assert!(body.is_timed(), "part of a message");
        body.advance(&[7; 3]).unwrap();
        assert!(!body.is_timed());
        for pace in [Pace::Whole, Pace::EachMessage] {
            let mut body = limited(pace, Framing::Prefixed);
            body.advance(&message(3)).unwrap();
            assert!(body.is_timed(), "{pace:?}");
        }
    }
}
