//! The output of one run in memory: what is not flushed yet, a window of what is, and a window of
//! the output after the limit, which is never stored. Pure: no clock, no I/O, no task.

use std::collections::VecDeque;

use bytes::Bytes;
use codelia_store::{OutputChunk, OutputStream};

/// Output that the store, or a follower, has not taken, at which the command must wait.
pub(crate) const MAX_UNFLUSHED: usize = 1024 * 1024;
/// Output kept for attached callers that the store has, or that is not stored.
pub(crate) const WINDOW_BYTES: usize = 256 * 1024;
/// Largest row that small writes are joined to.
const MAX_ROW_BYTES: usize = 64 * 1024;
/// Cost of a piece in addition to its bytes, so that one-byte writes are bounded too.
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

/// The output at the position of a caller.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The next piece.
    Piece(Piece),
    /// The output is not in memory; the store has all output before this position.
    Stored(i64),
    /// The output is not in memory and not stored; what is left begins at this position.
    Lost(i64),
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
    /// Bytes to store.
    pub(crate) stored: i64,
    /// All bytes that the command wrote.
    pub(crate) written: i64,
}

impl Totals {
    pub(crate) fn is_truncated(self) -> bool {
        self.written > self.stored
    }
}

/// One run's output in memory.
#[derive(Debug)]
pub(crate) struct OutputBuffer {
    limit: i64,
    /// Output before the limit.
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
    /// Output after the limit.
    live: VecDeque<Piece>,
    live_cost: usize,
    /// How much of it is kept for callers that the command does not wait for.
    live_window: usize,
    /// The callers that the command waits for after the limit, by number, with their positions.
    followers: Vec<(u64, i64)>,
    last_follower: u64,
    pub(crate) closed: bool,
    /// The command has ended and need not wait.
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
            live: VecDeque::new(),
            live_cost: 0,
            live_window: WINDOW_BYTES,
            followers: Vec::new(),
            last_follower: 0,
            closed: false,
            backpressure_lifted: false,
        }
    }

    /// Adds output. What exceeds the limit is kept only for attached callers.
    pub(crate) fn append(&mut self, stream: OutputStream, mut data: Bytes) {
        let room = usize::try_from(self.limit - self.end).unwrap_or(0);
        let live = data.split_off(room.min(data.len()));
        if !data.is_empty() {
            let piece = self.next_piece(stream, data);
            self.unflushed_cost += piece.cost();
            self.pieces.push_back(piece);
        }
        if !live.is_empty() {
            let piece = self.next_piece(stream, live);
            self.live_cost += piece.cost();
            self.live.push_back(piece);
            self.trim_live();
        }
    }

    fn next_piece(&mut self, stream: OutputStream, data: Bytes) -> Piece {
        let stream_end = match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        };
        let piece = Piece { position: self.end, stream, offset: *stream_end, data };
        *stream_end += length(&piece.data);
        self.end = piece.end();
        piece
    }

    /// Whether the command may write more.
    pub(crate) fn has_room(&self) -> bool {
        self.backpressure_lifted
            || if self.totals().is_truncated() {
                self.followers.is_empty() || self.live_cost < MAX_UNFLUSHED
            } else {
                self.unflushed_cost < MAX_UNFLUSHED
            }
    }

    /// The rows that are not flushed, with small writes joined.
    pub(crate) fn unflushed(&self) -> Vec<OutputChunk> {
        join(self.pieces.iter().skip(self.flushed_pieces))
    }

    /// The last bytes, at most `max`.
    pub(crate) fn tail(&self, max: usize) -> Vec<u8> {
        let mut pieces = Vec::new();
        let mut left = max;
        for piece in self.pieces.iter().chain(&self.live).rev() {
            let start = piece.data.len().saturating_sub(left);
            left -= piece.data.len() - start;
            pieces.push(piece.data.slice(start..));
            if left == 0 {
                break;
            }
        }
        pieces.into_iter().rev().flatten().collect()
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

    /// Adds a caller that the command waits for after the limit, and returns its number.
    pub(crate) fn add_follower(&mut self, position: i64) -> u64 {
        self.last_follower += 1;
        self.followers.push((self.last_follower, position));
        self.last_follower
    }

    /// A follower has taken the output before `position`.
    pub(crate) fn advance_follower(&mut self, number: u64, position: i64) {
        if let Some(follower) = self.followers.iter_mut().find(|follower| follower.0 == number) {
            follower.1 = position;
        }
        self.trim_live();
    }

    pub(crate) fn remove_follower(&mut self, number: u64) {
        self.followers.retain(|follower| follower.0 != number);
        self.trim_live();
    }

    /// Whether every follower has taken the output after the limit.
    pub(crate) fn is_followed(&self) -> bool {
        !self.totals().is_truncated() || self.taken() >= self.end
    }

    /// The position up to which every follower has taken the output.
    fn taken(&self) -> i64 {
        self.followers.iter().map(|(_, position)| *position).min().unwrap_or(i64::MAX)
    }

    /// Waits for no follower any longer, and keeps at most `keep` bytes of the output after the
    /// limit.
    pub(crate) fn release_followers(&mut self, keep: usize) {
        self.followers.clear();
        self.live_window = keep;
        self.trim_live();
    }

    /// Drops output after the limit that every follower has taken, down to the window.
    fn trim_live(&mut self) {
        let taken = self.taken();
        while self.live_cost > self.live_window
            && self.live.front().is_some_and(|piece| piece.end() <= taken)
            && let Some(piece) = self.live.pop_front()
        {
            self.live_cost -= piece.cost();
        }
    }

    pub(crate) fn read(&self, position: i64) -> Found {
        if position < self.start {
            return Found::Stored(self.start);
        }
        let stored = position < self.totals().stored;
        let live_start = self.live.front().map_or(self.end, |piece| piece.position);
        if !stored && position < live_start {
            return Found::Lost(live_start);
        }
        let pieces = if stored { &self.pieces } else { &self.live };
        let index = pieces.partition_point(|piece| piece.end() <= position);
        match pieces.get(index) {
            Some(piece) => Found::Piece(piece.from(position)),
            None => Found::End { truncated: self.totals().is_truncated(), closed: self.closed },
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        Totals { stored: self.end.min(self.limit), written: self.end }
    }
}

/// Joins adjacent pieces of one stream into rows.
fn join<'a>(pieces: impl Iterator<Item = &'a Piece>) -> Vec<OutputChunk> {
    let mut rows: Vec<OutputChunk> = Vec::new();
    for piece in pieces {
        match rows.last_mut() {
            Some(row)
                if row.stream == piece.stream
                    && row.data.len() + piece.data.len() <= MAX_ROW_BYTES =>
            {
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
