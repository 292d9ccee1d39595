//! Reservations of file calls: their part of its session's disk limits while it writes.

use std::sync::Arc;

use codelia_telemetry::{DiskCause, DiskEffect, metrics};
use codelia_types::{DiskUsage, SessionId};
use parking_lot::Mutex;

use super::error::FileError;
use crate::disk::Disk;

/// The least that a new file, directory or link is taken to use.
pub(crate) const NEW_ENTRY: DiskUsage = DiskUsage { bytes: 4096, inodes: 1 };
/// The least that is reserved at once, so that an import of many files does not ask for each.
const BATCH: DiskUsage = DiskUsage { bytes: 4 << 20, inodes: 256 };

/// Files without a name are counted in steps of this many bytes.
const UNNAMED_STEP: u64 = 1 << 20;

/// The part of a session's limits that one call has reserved. When it ends, the session is
/// measured.
#[derive(Debug)]
pub(crate) struct Reservation {
    disk: Arc<Disk>,
    session: SessionId,
    is_change: bool,
    /// Reserved and not yet written.
    left: Mutex<DiskUsage>,
}

impl Reservation {
    /// `is_change` says whether the call may change the session.
    pub(crate) fn new(disk: Arc<Disk>, session: SessionId, is_change: bool) -> Self {
        Self { disk, session, is_change, left: Mutex::default() }
    }

    /// Blocking. Takes what is about to be written.
    pub(crate) fn take(&self, wanted: DiskUsage) -> Result<(), FileError> {
        let mut left = self.left.lock();
        let bytes = wanted.bytes.saturating_sub(left.bytes);
        let inodes = wanted.inodes.saturating_sub(left.inodes);
        if bytes > 0 || inodes > 0 {
            let batch = |missing: u64, batch: u64| if missing > 0 { missing.max(batch) } else { 0 };
            let more =
                DiskUsage { bytes: batch(bytes, BATCH.bytes), inodes: batch(inodes, BATCH.inodes) };
            let reserved = match self.disk.reserve(self.session, more) {
                Ok(()) => more,
                // Near the limit there may be room for this, although not for a batch.
                Err(_) => {
                    let exact = DiskUsage { bytes, inodes };
                    self.disk.reserve(self.session, exact).inspect_err(|_| {
                        metrics().disk.limited(DiskCause::Session, DiskEffect::CallRefused);
                    })?;
                    exact
                }
            };
            left.bytes += reserved.bytes;
            left.inodes += reserved.inodes;
        }
        left.bytes -= wanted.bytes;
        left.inodes -= wanted.inodes;
        Ok(())
    }
}

impl Reservation {
    /// Counts the bytes of a file of this call that has no name yet.
    pub(crate) fn unnamed(&self) -> UnnamedBytes {
        UnnamedBytes {
            disk: self.disk.clone(),
            session: self.session,
            written: 0,
            held: 0,
            has_name: false,
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.is_change {
            self.disk.session_changed(self.session);
        }
    }
}

/// The bytes of a file that has no name yet. No measurement finds it, so they are counted here.
#[derive(Debug)]
pub(crate) struct UnnamedBytes {
    disk: Arc<Disk>,
    session: SessionId,
    written: u64,
    /// The part of them that is counted: in steps, so that small files cost nothing.
    held: u64,
    has_name: bool,
}

impl UnnamedBytes {
    /// Adds bytes that were taken and are written.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.written += bytes;
        if self.written - self.held >= UNNAMED_STEP {
            self.disk.hold_unnamed(self.session, self.written - self.held);
            self.held = self.written;
        }
    }

    /// The file has a name now.
    pub(crate) fn set_named(&mut self) {
        self.has_name = true;
    }
}

impl Drop for UnnamedBytes {
    fn drop(&mut self) {
        if self.held > 0 {
            self.disk.release_unnamed(self.session, self.held, self.has_name);
        }
    }
}
