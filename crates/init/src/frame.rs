//! Frames: a length, little-endian in four bytes, then as many bytes of JSON.

use serde::{Serialize, de::DeserializeOwned};

const HEADER: usize = 4;

/// More than the kernel takes as arguments and environment, however it is escaped.
const MOST_BYTES: usize = 16 * 1024 * 1024;

/// Bytes that are no frame, or a message that does not fit into one.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Longer than any message.
    #[error("a frame of {bytes} bytes is too long")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Not the JSON of a message.
    #[error("a frame is not a message: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// A message as a frame.
///
/// # Errors
/// It is too long.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; HEADER];
    serde_json::to_writer(&mut frame, message)?;
    let bytes = frame.len() - HEADER;
    match u32::try_from(bytes) {
        Ok(length) if bytes <= MOST_BYTES => frame[..HEADER].copy_from_slice(&length.to_le_bytes()),
        _ => return Err(FrameError::TooLong { bytes }),
    }
    Ok(frame)
}

/// Puts frames together from bytes as they arrive.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Adds bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next message, once it is there as a whole.
    ///
    /// # Errors
    /// The bytes are no frame; the connection is of no use any more.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let Some((header, rest)) = self.buffer.split_first_chunk::<HEADER>() else { return Ok(None) };
        let bytes = u32::from_le_bytes(*header) as usize;
        if bytes > MOST_BYTES {
            return Err(FrameError::TooLong { bytes });
        }
        let Some(body) = rest.get(..bytes) else { return Ok(None) };
        let message = serde_json::from_slice(body)?;
        self.buffer.drain(..HEADER + bytes);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_however_the_bytes_are_cut() {
        let stream = [encode(&"one").unwrap(), encode(&"two").unwrap()].concat();
        for cut in 1..stream.len() {
            let (mut decoder, mut found) = (Decoder::default(), Vec::<String>::new());
            for part in stream.chunks(cut) {
                decoder.push(part);
                while let Some(message) = decoder.next_message().unwrap() {
                    found.push(message);
                }
            }
            assert_eq!(found, ["one", "two"], "cut every {cut} bytes");
        }
    }

    #[test]
    fn a_length_beyond_all_messages_is_an_error_before_the_bytes_arrive() {
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert!(matches!(decoder.next_message::<String>(), Err(FrameError::TooLong { .. })));
    }
}
