//! The output of one run, shared by its command, the store and attached callers.
//!
//! Callers read by position; one that falls behind the window in memory learns up to which position
//! the store has the output. Up to the limit only the store slows the command. After it, nothing is
//! stored, and the command waits for its followers: the caller that it ends with.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use codelia_store::{OutputChunk, OutputStream};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

use super::buffer::{Found, OutputBuffer, Totals};

/// Unflushed output at which a flush starts without a delay.
const FLUSH_BYTES: usize = 256 * 1024;
/// Output kept for attached callers when all of it is stored.
const ENDED_WINDOW_BYTES: usize = 64 * 1024;
/// How long an ended command waits for a follower that takes nothing.
const FOLLOWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Output to be flushed.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) chunks: Vec<OutputChunk>,
    until: i64,
}

/// One run's output.
#[derive(Debug)]
pub(crate) struct OutputLog {
    buffer: Mutex<OutputBuffer>,
    /// Attached callers wait on it.
    changed: watch::Sender<()>,
    /// The flusher waits on it: there is something to flush, or a lot of it.
    due: Notify,
    /// Readers of the command's output wait on it: there is room.
    drained: Notify,
}

impl OutputLog {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            buffer: Mutex::new(OutputBuffer::new(limit)),
            changed: watch::Sender::new(()),
            due: Notify::new(),
            drained: Notify::new(),
        }
    }

    /// Adds what was read, and returns how much it is with all before. What exceeds the limit is
    /// not stored.
    pub(crate) fn append(&self, stream: OutputStream, data: Bytes) -> i64 {
        let (due, written) = {
            let mut buffer = self.buffer.lock();
            let before = buffer.unflushed_cost;
            buffer.append(stream, data);
            let after = buffer.unflushed_cost;
            let due =
                after > before && (before == 0 || (before < FLUSH_BYTES && after >= FLUSH_BYTES));
            (due, buffer.totals().written)
        };
        if due {
            self.due.notify_one();
        }
        self.changed.send_replace(());
        written
    }

    /// Waits until the command may write more.
    pub(crate) async fn room(&self) {
        loop {
            let drained = self.drained.notified();
            tokio::pin!(drained);
            drained.as_mut().enable();
            if self.buffer.lock().has_room() {
                return;
            }
            drained.await;
        }
    }

    /// Stops waiting for the store: the command has ended, and its pipes hold little.
    pub(crate) fn lift_backpressure(&self) {
        self.buffer.lock().backpressure_lifted = true;
        self.drained.notify_waiters();
    }

    /// No more output follows.
    pub(crate) fn close(&self) {
        self.buffer.lock().closed = true;
        self.changed.send_replace(());
    }

    /// Waits for the first unflushed byte, or for [`FLUSH_BYTES`] of them. May wake early.
    pub(crate) async fn due(&self) {
        self.due.notified().await;
    }

    /// Whether there is so much to flush that it should not wait for more.
    pub(crate) fn should_flush_now(&self) -> bool {
        self.buffer.lock().unflushed_cost >= FLUSH_BYTES
    }

    /// All that is not flushed, with small writes joined.
    pub(crate) fn unflushed(&self) -> Batch {
        let buffer = self.buffer.lock();
        Batch { chunks: buffer.unflushed(), until: buffer.totals().stored }
    }

    /// The last bytes that the command wrote, as far as they are in memory.
    pub(crate) fn tail(&self, max: usize) -> Vec<u8> {
        self.buffer.lock().tail(max)
    }

    /// A batch is in the store and may be dropped from memory.
    pub(crate) fn flushed(&self, batch: &Batch) {
        let more = {
            let mut buffer = self.buffer.lock();
            buffer.flushed(batch.until);
            buffer.unflushed_cost > 0
        };
        if more {
            self.due.notify_one();
        }
        self.drained.notify_waiters();
    }

    /// Everything is in the store: keeps only a little for callers that are nearly at the end.
    pub(crate) fn stored(&self) {
        let mut buffer = self.buffer.lock();
        let end = buffer.totals().stored;
        buffer.flushed(end);
        buffer.trim(ENDED_WINDOW_BYTES);
        buffer.release_followers(ENDED_WINDOW_BYTES);
    }

    /// Adds a caller that the command waits for after the limit.
    pub(crate) fn follow(self: &Arc<Self>, position: i64) -> Follower {
        Follower { number: self.buffer.lock().add_follower(position), log: self.clone() }
    }

    /// Waits until the followers have taken the output after the limit, or one takes nothing for
    /// [`FOLLOWER_TIMEOUT`].
    pub(crate) async fn followed(&self) {
        loop {
            let drained = self.drained.notified();
            tokio::pin!(drained);
            drained.as_mut().enable();
            if self.buffer.lock().is_followed() || timeout(FOLLOWER_TIMEOUT, drained).await.is_err()
            {
                return;
            }
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        self.buffer.lock().totals()
    }

    /// Reads the output at `position`.
    pub(crate) fn read(&self, position: i64) -> Found {
        self.buffer.lock().read(position)
    }

    /// Reports changes to an attached caller.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }
}

/// A caller that the command waits for after the limit, until it is dropped.
#[derive(Debug)]
pub(crate) struct Follower {
    log: Arc<OutputLog>,
    number: u64,
}

impl Follower {
    /// The caller has taken the output before `position`.
    pub(crate) fn advance(&self, position: i64) {
        self.log.buffer.lock().advance_follower(self.number, position);
        self.log.drained.notify_waiters();
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.log.buffer.lock().remove_follower(self.number);
        self.log.drained.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;
    use crate::run::io::buffer::{MAX_UNFLUSHED, PIECE_COST, Piece, WINDOW_BYTES};

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
    fn pieces_keep_order_positions_and_offsets() {
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
    fn read_inside_piece_returns_its_rest() {
        let log = OutputLog::new(100);
        log.append(OutputStream::Stderr, bytes("abc"));
        log.append(OutputStream::Stdout, bytes("0123456"));
        assert_eq!(log.read(5), piece(5, OutputStream::Stdout, 2, "23456"));
    }

    #[test]
    fn every_byte_value_is_preserved() {
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
    fn output_over_limit_is_live_but_not_stored() {
        let log = OutputLog::new(5);
        log.append(OutputStream::Stdout, bytes("12345"));
        assert_eq!(log.totals(), Totals { stored: 5, written: 5 });
        log.append(OutputStream::Stderr, bytes("6"));
        log.append(OutputStream::Stdout, bytes("78"));
        assert_eq!(log.totals(), Totals { stored: 5, written: 8 });
        assert_eq!(log.read(7), piece(7, OutputStream::Stdout, 6, "8"));
        assert_eq!(log.read(8), Found::End { truncated: true, closed: false });
        assert_eq!(read_all(&log, 0), b"12345678");
        let stored: Vec<u8> =
            log.unflushed().chunks.into_iter().flat_map(|chunk| chunk.data).collect();
        assert_eq!(stored, b"12345");
    }

    #[test]
    fn piece_over_limit_is_cut_at_exact_byte() {
        let log = OutputLog::new(4);
        log.append(OutputStream::Stdout, bytes("123456"));
        assert_eq!(log.unflushed().chunks[0].data, b"1234");
        assert_eq!(log.read(4), piece(4, OutputStream::Stdout, 4, "56"));
        log.flushed(&log.unflushed());
        assert!(log.unflushed().chunks.is_empty());
    }

    #[test]
    fn unfollowed_output_over_limit_is_bounded_and_lost() {
        let log = OutputLog::new(4);
        for _ in 0..100 {
            assert!(
                log.room().now_or_never().is_some(),
                "without a follower the command never waits"
            );
            log.append(OutputStream::Stdout, Bytes::from(vec![7; 64 * 1024]));
        }
        let Found::Lost(start) = log.read(4) else { panic!("{:?}", log.read(4)) };
        assert!(read_all(&log, start).len() <= WINDOW_BYTES);
        assert_eq!(log.totals(), Totals { stored: 4, written: 100 * 64 * 1024 });
    }

    #[tokio::test]
    async fn command_waits_for_its_follower_after_limit() {
        let log = Arc::new(OutputLog::new(4));
        let follower = log.follow(0);
        let mut written = 0;
        while log.room().now_or_never().is_some() {
            log.append(OutputStream::Stdout, Bytes::from(vec![7; 64 * 1024]));
            written += 64 * 1024;
        }
        assert!(written <= MAX_UNFLUSHED + 64 * 1024, "bounded: {written}");
        assert_eq!(read_all(&log, 0).len(), written, "nothing is lost");
        assert!(log.followed().now_or_never().is_none());
        follower.advance(i64::try_from(written).unwrap());
        assert!(log.room().now_or_never().is_some());
        assert!(log.followed().now_or_never().is_some());
        drop(follower);
        assert!(log.room().now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn ended_command_does_not_wait_for_stalled_follower() {
        let log = Arc::new(OutputLog::new(4));
        let _stalled = log.follow(0);
        log.append(OutputStream::Stdout, Bytes::from(vec![7; 640 * 1024]));
        log.followed().await;
        log.stored();
        assert!(matches!(log.read(4), Found::Lost(_)), "the memory is free again");
    }

    #[test]
    fn lagging_reader_is_sent_to_store() {
        let log = OutputLog::new(u64::MAX);
        let block = Bytes::from(vec![7; 64 * 1024]);
        for _ in 0..16 {
            log.append(OutputStream::Stdout, block.clone());
        }
        log.flushed(&log.unflushed());
        let Found::Stored(start) = log.read(0) else { panic!("the beginning is still in memory") };
        assert!(start > 0);
        let kept = read_all(&log, start);
        assert_eq!(start + i64::try_from(kept.len()).unwrap(), 16 * 64 * 1024);
        assert!(kept.len() <= WINDOW_BYTES);
    }

    #[test]
    fn unflushed_output_is_never_dropped() {
        let log = OutputLog::new(u64::MAX);
        for _ in 0..10 {
            log.append(OutputStream::Stdout, Bytes::from(vec![1; 64 * 1024]));
        }
        let early = log.unflushed();
        log.append(OutputStream::Stderr, bytes("late"));
        log.flushed(&early);
        let left = log.unflushed();
        assert_eq!(left.chunks.len(), 1);
        assert_eq!(
            (left.chunks[0].position, left.chunks[0].data.as_slice()),
            (655_360, b"late".as_slice())
        );
    }

    #[test]
    fn command_waits_for_store_until_flush() {
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
    fn command_never_waits_after_its_end() {
        let log = OutputLog::new(u64::MAX);
        log.append(OutputStream::Stdout, Bytes::from(vec![0; MAX_UNFLUSHED]));
        assert!(log.room().now_or_never().is_none());
        log.lift_backpressure();
        assert!(log.room().now_or_never().is_some());
    }

    #[test]
    fn flusher_wakes_for_first_byte_and_large_output() {
        let log = OutputLog::new(u64::MAX);
        assert!(log.due().now_or_never().is_none());
        log.append(OutputStream::Stdout, bytes("a"));
        assert!(log.due().now_or_never().is_some());
        log.append(OutputStream::Stdout, bytes("b"));
        assert!(log.due().now_or_never().is_none());
        log.append(OutputStream::Stdout, Bytes::from(vec![0; FLUSH_BYTES]));
        assert!(log.due().now_or_never().is_some() && log.should_flush_now());
    }

    #[test]
    fn flusher_wakes_for_output_added_during_flush() {
        let log = OutputLog::new(u64::MAX);
        log.append(OutputStream::Stdout, bytes("a"));
        assert!(log.due().now_or_never().is_some());
        let batch = log.unflushed();
        log.append(OutputStream::Stdout, bytes("b"));
        log.flushed(&batch);
        assert!(log.due().now_or_never().is_some());
    }

    #[test]
    fn stored_log_keeps_small_window() {
        let log = OutputLog::new(u64::MAX);
        for _ in 0..8 {
            log.append(OutputStream::Stdout, Bytes::from(vec![1; 32 * 1024]));
        }
        log.close();
        log.stored();
        assert!(log.unflushed().chunks.is_empty());
        let Found::Stored(start) = log.read(0) else { panic!("everything was kept") };
        assert!(read_all(&log, start).len() <= ENDED_WINDOW_BYTES);
        assert_eq!(log.read(8 * 32 * 1024), Found::End { truncated: false, closed: true });
    }
}
