//! The output of one run in memory: what is not flushed yet, and a window of what is. Pure: no
//! clock, no I/O, no task.

use std::collections::VecDeque;

use bytes::Bytes;
use codelia_store::{OutputChunk, OutputStream};

/// Unflushed output at which the command must wait.
pub(crate) const MAX_UNFLUSHED: usize = 1024 * 1024;
/// Flushed output kept for attached callers.
pub(crate) const WINDOW_BYTES: usize = 256 * 1024;
/// Largest row that small writes are joined to.
const MAX_ROW_BYTES: usize = 64 * 1024;
/// What a piece costs in addition to its bytes, so that one-byte writes are bounded too.
pub(crate) const PIECE_COST: usize = 64;

/// A piece of output in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where it starts in both streams taken together.
    pub(crate) position: i64,
    pub(crate) stream: OutputStream,
    /// Where it starts within its stream.
    pub(crate) offset: i64,
    pub(crate) data: Bytes,
}

impl Piece {
    pub(crate) fn end(&self) -> i64 {
        self.position + length(&self.data)
    }

    fn cost(&self) -> usize {
        self.data.len() + PIECE_COST
    }

    /// The part that begins at `position`.
    fn from(&self, position: i64) -> Self {
        let skip = (position - self.position).max(0);
        let cut = usize::try_from(skip).unwrap_or(self.data.len()).min(self.data.len());
        Self {
            position: self.position + skip,
            offset: self.offset + skip,
            stream: self.stream,
            data: self.data.slice(cut..),
        }
    }
}

/// What a caller finds at its position.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The next piece.
    Piece(Piece),
    /// It is not in memory; the store has all output before this position.
    Stored(i64),
    /// Nothing yet.
    End {
        /// Output was truncated here.
        truncated: bool,
        /// No more output follows.
        closed: bool,
    },
}

/// The size of a run's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) bytes: i64,
    pub(crate) truncated: bool,
}

/// One run's output in memory.
#[derive(Debug)]
pub(crate) struct OutputBuffer {
    limit: i64,
    pieces: VecDeque<Piece>,
    /// Pieces at the front that are flushed.
    flushed_pieces: usize,
    flushed_cost: usize,
    pub(crate) unflushed_cost: usize,
    /// The position of the first byte in memory.
    start: i64,
    pub(crate) end: i64,
    stdout: i64,
    stderr: i64,
    truncated: bool,
    pub(crate) closed: bool,
    /// The command has ended and need not wait for the store.
    pub(crate) backpressure_lifted: bool,
}

impl OutputBuffer {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            limit: i64::try_from(limit).unwrap_or(i64::MAX),
            pieces: VecDeque::new(),
            flushed_pieces: 0,
            flushed_cost: 0,
            unflushed_cost: 0,
            start: 0,
            end: 0,
            stdout: 0,
            stderr: 0,
            truncated: false,
            closed: false,
            backpressure_lifted: false,
        }
    }

    /// Adds output; drops what exceeds the limit and marks the output as truncated.
    pub(crate) fn append(&mut self, stream: OutputStream, mut data: Bytes) {
        let room = usize::try_from(self.limit - self.end).unwrap_or(0);
        if data.len() > room {
            data.truncate(room);
            self.truncated = true;
        }
        if data.is_empty() {
            return;
        }
        let stream_end = match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        };
        let piece = Piece { position: self.end, stream, offset: *stream_end, data };
        *stream_end += length(&piece.data);
        self.end = piece.end();
        self.unflushed_cost += piece.cost();
        self.pieces.push_back(piece);
    }

    /// Whether the command may write more.
    pub(crate) fn has_room(&self) -> bool {
        self.backpressure_lifted || self.truncated || self.unflushed_cost < MAX_UNFLUSHED
    }

    /// The rows that are not flushed, with small writes joined.
    pub(crate) fn unflushed(&self) -> Vec<OutputChunk> {
        join(self.pieces.iter().skip(self.flushed_pieces))
    }

    /// Marks the output before `until` as stored.
    pub(crate) fn flushed(&mut self, until: i64) {
        while let Some(piece) = self.pieces.get(self.flushed_pieces)
            && piece.end() <= until
        {
            self.unflushed_cost -= piece.cost();
            self.flushed_cost += piece.cost();
            self.flushed_pieces += 1;
        }
        self.trim(WINDOW_BYTES);
    }

    /// Drops flushed pieces until at most `keep` bytes are left.
    pub(crate) fn trim(&mut self, keep: usize) {
        while self.flushed_pieces > 0
            && self.flushed_cost > keep
            && let Some(piece) = self.pieces.pop_front()
        {
            self.flushed_pieces -= 1;
            self.flushed_cost -= piece.cost();
            self.start = piece.end();
        }
    }

    pub(crate) fn read(&self, position: i64) -> Found {
        if position < self.start {
            return Found::Stored(self.start);
        }
        let index = self.pieces.partition_point(|piece| piece.end() <= position);
        match self.pieces.get(index) {
            Some(piece) => Found::Piece(piece.from(position)),
            None => Found::End { truncated: self.truncated, closed: self.closed },
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        Totals { bytes: self.end, truncated: self.truncated }
    }
}

/// Joins adjacent pieces of one stream into rows.
fn join<'a>(pieces: impl Iterator<Item = &'a Piece>) -> Vec<OutputChunk> {
    let mut rows: Vec<OutputChunk> = Vec::new();
    for piece in pieces {
        match rows.last_mut() {
            Some(row) if row.stream == piece.stream && row.data.len() + piece.data.len() <= MAX_ROW_BYTES => {
                row.data.extend_from_slice(&piece.data);
            }
            _ => rows.push(OutputChunk {
                position: piece.position,
                stream: piece.stream,
                offset: piece.offset,
                data: piece.data.to_vec(),
            }),
        }
    }
    rows
}

fn length(data: &Bytes) -> i64 {
    i64::try_from(data.len()).unwrap_or(i64::MAX)
}
