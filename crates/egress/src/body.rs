//! Finds the end of a request's body, so that no second request follows on the connection.

use crate::{head::BodyLength, refusal::Reason};

/// The longest line of a chunk size or trailer.
const MAX_LINE: u32 = 1024;
/// The bytes of all trailers.
const MAX_TRAILERS: u32 = 8 * 1024;

/// Where in the body the next byte is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In content of which this many bytes are left.
    Content {
        left: u64,
        chunked: bool,
    },
    /// In a chunk size.
    Size {
        digits: u32,
        size: u64,
    },
    /// In the extension of a chunk, after its size.
    Extension {
        length: u32,
        size: u64,
    },
    /// Before the LF after a chunk size.
    SizeLf {
        size: u64,
    },
    /// Before the CR, then the LF, after a chunk.
    ChunkCr,
    ChunkLf,
    /// In a trailer line with this many bytes.
    Trailer {
        line: u32,
        total: u32,
    },
    /// Before the LF after a trailer line.
    TrailerLf {
        last: bool,
        total: u32,
    },
    End,
}

/// A body that is read.
#[derive(Debug)]
pub(crate) struct Body(State);

impl Body {
    pub(crate) fn new(length: BodyLength) -> Self {
        Self(match length {
            BodyLength::Bytes(0) => State::End,
            BodyLength::Bytes(left) => State::Content { left, chunked: false },
            BodyLength::Chunked => State::Size { digits: 0, size: 0 },
        })
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.0 == State::End
    }

    /// Reads bytes and returns how many of them belong to the body.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> Result<usize, Reason> {
        let mut at = 0;
        while at < bytes.len() && !self.is_complete() {
            if let State::Content { left, chunked } = self.0 {
                let count = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - at);
                at += count;
                self.0 = match left - count as u64 {
                    0 if chunked => State::ChunkCr,
                    0 => State::End,
                    left => State::Content { left, chunked },
                };
            } else {
                self.0 = next(self.0, bytes[at])?;
                at += 1;
            }
        }
        Ok(at)
    }
}

fn next(state: State, byte: u8) -> Result<State, Reason> {
    Ok(match (state, byte) {
        (State::Size { digits, size }, _) if byte.is_ascii_hexdigit() && digits < 15 => {
            let digit = char::from(byte).to_digit(16).unwrap_or_default();
            State::Size { digits: digits + 1, size: size << 4 | u64::from(digit) }
        }
        (State::Size { digits: 1.., size }, b'\r') => State::SizeLf { size },
        (State::Size { digits: 1.., size }, b';') => State::Extension { length: 0, size },
        (State::Extension { size, .. }, b'\r') => State::SizeLf { size },
        (State::Extension { length, size }, b'\t' | b' '..=b'~') if length < MAX_LINE => {
            State::Extension { length: length + 1, size }
        }
        (State::SizeLf { size: 0 }, b'\n') => State::Trailer { line: 0, total: 0 },
        (State::SizeLf { size }, b'\n') => State::Content { left: size, chunked: true },
        (State::ChunkCr, b'\r') => State::ChunkLf,
        (State::ChunkLf, b'\n') => State::Size { digits: 0, size: 0 },
        (State::Trailer { line, total }, b'\r') => State::TrailerLf { last: line == 0, total },
        (State::Trailer { line, total }, b'\t' | b' '..=b'~' | 0x80..)
            if line < MAX_LINE
                && total < MAX_TRAILERS
                && (line > 0 || !matches!(byte, b' ' | b'\t')) =>
        {
            State::Trailer { line: line + 1, total: total + 1 }
        }
        (State::TrailerLf { last: true, .. }, b'\n') => State::End,
        (State::TrailerLf { last: false, total }, b'\n') => State::Trailer { line: 0, total },
        _ => return Err(Reason::InvalidRequest),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The length of the body at the start of these bytes, read in parts of this size.
    fn end(length: BodyLength, bytes: &[u8], part: usize) -> Result<Option<usize>, Reason> {
        let (mut body, mut total) = (Body::new(length), 0);
        for part in bytes.chunks(part) {
            total += body.read(part)?;
        }
        Ok(body.is_complete().then_some(total))
    }

    #[test]
    fn end_of_body_is_found() {
        let chunked = b"4;name=\"v\"\r\nabcd\r\n0A\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\nGET /";
        for part in [1, 2, 3, 7, 100] {
            assert_eq!(end(BodyLength::Bytes(3), b"abcGET /", part), Ok(Some(3)));
            assert_eq!(end(BodyLength::Bytes(9), b"abc", part), Ok(None));
            assert_eq!(
                end(BodyLength::Chunked, chunked, part),
                Ok(Some(chunked.len() - 5)),
                "{part}"
            );
        }
        assert_eq!(end(BodyLength::Bytes(0), b"GET /", 9), Ok(Some(0)));
    }

    #[test]
    fn ambiguous_chunks_are_refused() {
        let bodies: [&[u8]; 14] = [
            b"\r\n",
            b"g\r\n",
            b"+1\r\n",
            b"0x1\r\n",
            b" 1\r\n",
            b"1 \r\n",
            b"1\na",
            b"1\r\nab",
            b"1\r\na\n",
            b"ffffffffffffffff\r\n",
            b"1;\n",
            b"0\r\n folded: x\r\n",
            b"0\r\na\nb",
            b"0\r\na\0\r\n",
        ];
        for body in bodies {
            assert_eq!(
                end(BodyLength::Chunked, body, 100),
                Err(Reason::InvalidRequest),
                "{body:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = end(BodyLength::Chunked, &bytes, 5);
        }
    }
}
