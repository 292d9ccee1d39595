//! Frames: a length as four little-endian bytes, followed by that many bytes of JSON.

use serde::{Serialize, de::DeserializeOwned};

const HEADER_BYTES: usize = 4;

/// Larger than any arguments and environment that the kernel accepts, even when escaped as JSON.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// Invalid bytes on the socket, or a message that is too long to send.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The frame is too long.
    #[error("frame of {bytes} bytes is too long (max {MAX_BODY_BYTES})")]
    TooLong {
        /// The length of the frame in bytes.
        bytes: usize,
    },
    /// The body is not the JSON of a message.
    #[error("frame is not a valid message")]
    Malformed(#[from] serde_json::Error),
}

/// Encodes a message as a frame.
///
/// # Errors
/// The message is too long.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; HEADER_BYTES];
    serde_json::to_writer(&mut frame, message)?;
    let bytes = frame.len() - HEADER_BYTES;
    match u32::try_from(bytes) {
        Ok(length) if bytes <= MAX_BODY_BYTES => {
            frame[..HEADER_BYTES].copy_from_slice(&length.to_le_bytes())
        }
        _ => return Err(FrameError::TooLong { bytes }),
    }
    Ok(frame)
}

/// Decodes frames from a byte stream.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next message, or `None` until all its bytes have arrived.
    ///
    /// # Errors
    /// The bytes are not a valid frame. The connection is unusable then.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let Some((header, rest)) = self.buffer.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let bytes = u32::from_le_bytes(*header) as usize;
        if bytes > MAX_BODY_BYTES {
            return Err(FrameError::TooLong { bytes });
        }
        let Some(body) = rest.get(..bytes) else { return Ok(None) };
        let message = serde_json::from_slice(body)?;
        self.buffer.drain(..HEADER_BYTES + bytes);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_decode_from_chunks_of_any_size() {
        let stream = [encode(&"one").unwrap(), encode(&"two").unwrap()].concat();
        for size in 1..stream.len() {
            let (mut decoder, mut found) = (Decoder::default(), Vec::<String>::new());
            for chunk in stream.chunks(size) {
                decoder.push(chunk);
                while let Some(message) = decoder.next_message().unwrap() {
                    found.push(message);
                }
            }
            assert_eq!(found, ["one", "two"], "chunks of {size} bytes");
        }
    }

    #[test]
    fn excessive_length_fails_before_the_body_arrives() {
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert!(matches!(decoder.next_message::<String>(), Err(FrameError::TooLong { .. })));
    }
}
