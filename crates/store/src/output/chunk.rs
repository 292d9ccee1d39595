//! Pieces of output.

/// The stream that output was written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output or the terminal.
    Stdout = 1,
    /// Standard error.
    Stderr = 2,
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputChunk {
    /// Offset of its first byte in the combined output of both streams.
    pub position: i64,
    /// The stream.
    pub stream: OutputStream,
    /// Offset of its first byte in its own stream.
    pub offset: i64,
    /// The bytes.
    pub data: Vec<u8>,
}

impl OutputChunk {
    /// Drops the bytes before `position`.
    pub(super) fn starting_at(mut self, position: i64) -> Self {
        if let Ok(skip @ 1..) = usize::try_from(position - self.position) {
            self.data.drain(..skip.min(self.data.len()));
            self.offset += position - self.position;
            self.position = position;
        }
        self
    }
}
