//! What one run wrote: a bounded window in memory over output that ends up in the store.
//!
//! Nothing here waits for a watcher. Watchers read by position; one that lags behind the window is
//! told up to where the store has the rest. Only the store slows the command down.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use codelia_store::{OutputChunk, OutputStream};
use tokio::sync::{Notify, watch};

/// Unflushed output at which a flush begins without waiting for its time.
pub(crate) const FLUSH_BYTES: usize = 256 * 1024;
/// Unflushed output at which the command has to wait.
pub(crate) const MAX_UNFLUSHED: usize = 1024 * 1024;
/// Flushed output kept for watchers.
const WINDOW_BYTES: usize = 256 * 1024;
/// Output kept for watchers once all of it is stored.
const ENDED_WINDOW_BYTES: usize = 64 * 1024;
/// Largest row that small writes are joined to.
const ROW_BYTES: usize = 64 * 1024;
/// What a piece costs beside its bytes, so that one-byte writes are bounded as well.
const PIECE_COST: usize = 64;

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

/// What a watcher finds at its position.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The next piece.
    Piece(Piece),
    /// It is not in memory; the store has all output before this position.
    Stored(i64),
    /// Nothing yet.
    End {
        /// Output was cut here.
        truncated: bool,
        /// No more will come.
        closed: bool,
    },
}

/// Output to be flushed.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) chunks: Vec<OutputChunk>,
    until: i64,
}

/// The totals of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) bytes: i64,
    pub(crate) truncated: bool,
}

/// One run's output.
#[derive(Debug)]
pub(crate) struct OutputLog {
    log: Mutex<Log>,
    /// Watchers wait on it.
    changed: watch::Sender<()>,
    /// The flusher waits on it: there is something to flush, or much of it.
    due: Notify,
    /// Readers wait on it: there is room.
    drained: Notify,
}

#[derive(Debug)]
struct Log {
    limit: i64,
    pieces: VecDeque<Piece>,
    /// Pieces at the front that are flushed.
    flushed_pieces: usize,
    flushed_cost: usize,
    unflushed_cost: usize,
    /// Where memory begins.
    start: i64,
    end: i64,
    stdout: i64,
    stderr: i64,
    truncated: bool,
    closed: bool,
    gate_open: bool,
}

impl OutputLog {
    pub(crate) fn new(limit: u64) -> Self {
        let log = Log {
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
            gate_open: false,
        };
        Self {
            log: Mutex::new(log),
            changed: watch::Sender::new(()),
            due: Notify::new(),
            drained: Notify::new(),
        }
    }

    /// Adds what was read; what is over the limit is dropped and the cut is marked.
    pub(crate) fn append(&self, stream: OutputStream, data: Bytes) {
        let due = {
            let mut log = self.lock();
            let before = log.unflushed_cost;
            log.append(stream, data);
            let after = log.unflushed_cost;
            after > before && (before == 0 || (before < FLUSH_BYTES && after >= FLUSH_BYTES))
        };
        if due {
            self.due.notify_one();
        }
        self.changed.send_replace(());
    }

    /// Waits until the command may write more.
    pub(crate) async fn room(&self) {
        loop {
            let drained = self.drained.notified();
            tokio::pin!(drained);
            drained.as_mut().enable();
            if self.lock().has_room() {
                return;
            }
            drained.await;
        }
    }

    /// The command has ended: what is left in its pipes is small and need not wait for the store.
    pub(crate) fn open_gate(&self) {
        self.lock().gate_open = true;
        self.drained.notify_waiters();
    }

    /// No more will come.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.send_replace(());
    }

    /// Waits for the first unflushed byte, or for many. May wake early.
    pub(crate) async fn due(&self) {
        self.due.notified().await;
    }

    /// Whether there is so much to flush that it should not wait.
    pub(crate) fn is_much(&self) -> bool {
        self.lock().unflushed_cost >= FLUSH_BYTES
    }

    /// All that is not flushed, small writes joined. Empty if there is nothing.
    pub(crate) fn unflushed(&self) -> Batch {
        let log = self.lock();
        Batch { chunks: join(log.pieces.iter().skip(log.flushed_pieces)), until: log.end }
    }

    /// A batch is in the store; it may be dropped from memory.
    pub(crate) fn flushed(&self, batch: &Batch) {
        let more = {
            let mut log = self.lock();
            log.flushed(batch.until);
            log.unflushed_cost > 0
        };
        if more {
            self.due.notify_one();
        }
        self.drained.notify_waiters();
    }

    /// Everything is in the store: keeps only a little for watchers that are nearly there.
    pub(crate) fn stored(&self) {
        let mut log = self.lock();
        let end = log.end;
        log.flushed(end);
        log.trim(ENDED_WINDOW_BYTES);
    }

    pub(crate) fn totals(&self) -> Totals {
        let log = self.lock();
        Totals { bytes: log.end, truncated: log.truncated }
    }

    /// What a watcher finds at `position`.
    pub(crate) fn read(&self, position: i64) -> Found {
        self.lock().read(position)
    }

    /// Tells a watcher of changes.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log {
    fn append(&mut self, stream: OutputStream, mut data: Bytes) {
        let room = usize::try_from(self.limit - self.end).unwrap_or(0);
        if data.len() > room {
            data.truncate(room);
            self.truncated = true;
        }
        if data.is_empty() {
            return;
        }
        let of_stream = match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        };
        let piece = Piece { position: self.end, stream, offset: *of_stream, data };
        *of_stream += length(&piece.data);
        self.end = piece.end();
        self.unflushed_cost += piece.cost();
        self.pieces.push_back(piece);
    }

    fn has_room(&self) -> bool {
        self.gate_open || self.truncated || self.unflushed_cost < MAX_UNFLUSHED
    }

    fn flushed(&mut self, until: i64) {
        while let Some(piece) = self.pieces.get(self.flushed_pieces)
            && piece.end() <= until
        {
            self.unflushed_cost -= piece.cost();
            self.flushed_cost += piece.cost();
            self.flushed_pieces += 1;
        }
        self.trim(WINDOW_BYTES);
    }

    fn trim(&mut self, keep: usize) {
        while self.flushed_pieces > 0
            && self.flushed_cost > keep
            && let Some(piece) = self.pieces.pop_front()
        {
            self.flushed_pieces -= 1;
            self.flushed_cost -= piece.cost();
            self.start = piece.end();
        }
    }

    fn read(&self, position: i64) -> Found {
        if position < self.start {
            return Found::Stored(self.start);
        }
        let index = self.pieces.partition_point(|piece| piece.end() <= position);
        match self.pieces.get(index) {
            Some(piece) => Found::Piece(piece.from(position)),
            None => Found::End { truncated: self.truncated, closed: self.closed },
        }
    }
}

/// Joins neighbours of one stream into rows.
fn join<'a>(pieces: impl Iterator<Item = &'a Piece>) -> Vec<OutputChunk> {
    let mut rows: Vec<OutputChunk> = Vec::new();
    for piece in pieces {
        match rows.last_mut() {
            Some(row) if row.stream == piece.stream && row.data.len() + piece.data.len() <= ROW_BYTES => {
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

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn bytes(text: &str) -> Bytes {
        Bytes::copy_from_slice(text.as_bytes())
    }

    fn piece(position: i64, stream: OutputStream, offset: i64, text: &str) -> Found {
        Found::Piece(Piece { position, stream, offset, data: bytes(text) })
    }

    fn read_all(log: &OutputLog, mut position: i64) -> Vec<u8> {
        let mut all = Vec::new();
        while let Found::Piece(piece) = log.read(position) {
            assert_eq!(piece.position, position);
            position = piece.end();
            all.extend_from_slice(&piece.data);
        }
        all
    }

    #[test]
    fn pieces_come_back_in_order_with_positions_and_offsets() {
        let log = OutputLog::new(100);
        log.append(OutputStream::Stdout, bytes("out"));
        log.append(OutputStream::Stderr, bytes("err"));
        log.append(OutputStream::Stdout, bytes("more"));
        assert_eq!(log.read(0), piece(0, OutputStream::Stdout, 0, "out"));
        assert_eq!(log.read(3), piece(3, OutputStream::Stderr, 0, "err"));
        assert_eq!(log.read(6), piece(6, OutputStream::Stdout, 3, "more"));
        assert_eq!(log.read(10), Found::End { truncated: false, closed: false });
    }

    #[test]
    fn a_watcher_that_resumes_inside_a_piece_gets_the_rest_of_it() {
        let log = OutputLog::new(100);
        log.append(OutputStream::Stderr, bytes("abc"));
        log.append(OutputStream::Stdout, bytes("0123456"));
        assert_eq!(log.read(5), piece(5, OutputStream::Stdout, 2, "23456"));
    }

    #[test]
    fn every_byte_value_survives() {
        let all: Vec<u8> = (0..=255).collect();
        let log = OutputLog::new(1000);
        for byte in &all {
            log.append(OutputStream::Stdout, Bytes::copy_from_slice(&[*byte]));
        }
        assert_eq!(read_all(&log, 0), all);
        let batch = log.unflushed();
        assert_eq!(batch.chunks.len(), 1, "small writes become one row");
        assert_eq!(batch.chunks[0].data, all);
    }

    #[test]
    fn output_up_to_the_limit_is_whole_and_one_byte_more_is_cut_and_marked() {
        let log = OutputLog::new(5);
        log.append(OutputStream::Stdout, bytes("12345"));
        assert_eq!(log.totals(), Totals { bytes: 5, truncated: false });
        log.append(OutputStream::Stderr, bytes("6"));
        assert_eq!(log.totals(), Totals { bytes: 5, truncated: true });
        assert_eq!(log.read(5), Found::End { truncated: true, closed: false });
        assert_eq!(read_all(&log, 0), b"12345");
    }

    #[test]
    fn a_piece_over_the_limit_is_cut_at_the_exact_byte() {
        let log = OutputLog::new(4);
        log.append(OutputStream::Stdout, bytes("123456"));
        assert_eq!(read_all(&log, 0), b"1234");
        assert!(log.totals().truncated);
    }

    #[test]
    fn a_lagging_watcher_is_sent_to_the_store_up_to_where_memory_begins() {
        let log = OutputLog::new(u64::MAX);
        let block = Bytes::from(vec![7; 64 * 1024]);
        for _ in 0..16 {
            log.append(OutputStream::Stdout, block.clone());
        }
        log.flushed(&log.unflushed());
        let Found::Stored(start) = log.read(0) else { panic!("memory still holds the beginning") };
        assert!(start > 0);
        let kept = read_all(&log, start);
        assert_eq!(start + i64::try_from(kept.len()).unwrap(), 16 * 64 * 1024);
        assert!(kept.len() <= WINDOW_BYTES);
    }

    #[test]
    fn what_is_not_flushed_is_never_dropped() {
        let log = OutputLog::new(u64::MAX);
        for _ in 0..10 {
            log.append(OutputStream::Stdout, Bytes::from(vec![1; 64 * 1024]));
        }
        let early = log.unflushed();
        log.append(OutputStream::Stderr, bytes("late"));
        log.flushed(&early);
        let left = log.unflushed();
        assert_eq!(left.chunks.len(), 1);
        assert_eq!((left.chunks[0].position, left.chunks[0].data.as_slice()), (655_360, b"late".as_slice()));
    }

    #[test]
    fn the_command_waits_for_the_store_and_goes_on_after_a_flush() {
        let log = OutputLog::new(u64::MAX);
        let mut appended = 0;
        while log.room().now_or_never().is_some() {
            log.append(OutputStream::Stdout, Bytes::from_static(b"x"));
            appended += 1;
        }
        assert!(
            appended * (1 + PIECE_COST) < MAX_UNFLUSHED + PIECE_COST + 1,
            "one-byte writes are bounded too"
        );
        log.flushed(&log.unflushed());
        assert!(log.room().now_or_never().is_some());
    }

    #[test]
    fn the_command_never_waits_once_its_output_is_cut_or_it_has_ended() {
        let log = OutputLog::new(4);
        log.append(OutputStream::Stdout, bytes("12345"));
        assert!(log.room().now_or_never().is_some());
        let log = OutputLog::new(u64::MAX);
        log.append(OutputStream::Stdout, Bytes::from(vec![0; MAX_UNFLUSHED]));
        assert!(log.room().now_or_never().is_none());
        log.open_gate();
        assert!(log.room().now_or_never().is_some());
    }

    #[test]
    fn the_flusher_hears_of_the_first_byte_and_of_much_output_only() {
        let log = OutputLog::new(u64::MAX);
        assert!(log.due().now_or_never().is_none());
        log.append(OutputStream::Stdout, bytes("a"));
        assert!(log.due().now_or_never().is_some());
        log.append(OutputStream::Stdout, bytes("b"));
        assert!(log.due().now_or_never().is_none());
        log.append(OutputStream::Stdout, Bytes::from(vec![0; FLUSH_BYTES]));
        assert!(log.due().now_or_never().is_some() && log.is_much());
    }

    #[test]
    fn the_flusher_hears_of_what_came_while_it_flushed() {
        let log = OutputLog::new(u64::MAX);
        log.append(OutputStream::Stdout, bytes("a"));
        assert!(log.due().now_or_never().is_some());
        let batch = log.unflushed();
        log.append(OutputStream::Stdout, bytes("b"));
        log.flushed(&batch);
        assert!(log.due().now_or_never().is_some());
    }

    #[test]
    fn a_stored_log_keeps_little_and_forgets_nothing() {
        let log = OutputLog::new(u64::MAX);
        for _ in 0..8 {
            log.append(OutputStream::Stdout, Bytes::from(vec![1; 32 * 1024]));
        }
        log.close();
        log.stored();
        assert!(log.unflushed().chunks.is_empty());
        let Found::Stored(start) = log.read(0) else { panic!("kept everything") };
        assert!(read_all(&log, start).len() <= ENDED_WINDOW_BYTES);
        assert_eq!(log.read(8 * 32 * 1024), Found::End { truncated: false, closed: true });
    }
}
