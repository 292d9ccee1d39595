//! What a file call reserves of its session's disk limits while it writes.

use std::sync::{Arc, Mutex, PoisonError};

use codelia_telemetry::{DiskCause, DiskEffect, metrics};
use codelia_types::{DiskUsage, SessionId};

use super::error::FileError;
use crate::disk::Disk;

/// The least that a new file, directory or link is taken to use.
pub(crate) const NEW_ENTRY: DiskUsage = DiskUsage { bytes: 4096, inodes: 1 };
/// What is reserved at once, so that an import of many files does not ask for each.
const BATCH: DiskUsage = DiskUsage { bytes: 4 << 20, inodes: 256 };

/// The part of a session's limits that one call has reserved. When it ends, the session is measured.
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
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = wanted.bytes.saturating_sub(left.bytes);
        let inodes = wanted.inodes.saturating_sub(left.inodes);
        if bytes > 0 || inodes > 0 {
            let batch = |missing: u64, batch: u64| if missing > 0 { missing.max(batch) } else { 0 };
            let more = DiskUsage { bytes: batch(bytes, BATCH.bytes), inodes: batch(inodes, BATCH.inodes) };
            let reserved = match self.disk.reserve(self.session, more) {
                Ok(()) => more,
                // Near the limit there may be room for this, although not for a batch.
                Err(_) => {
                    let exact = DiskUsage { bytes, inodes };
                    self.disk.reserve(self.session, exact).inspect_err(|_| {
                        metrics().disk_limited(DiskCause::Session, DiskEffect::CallRefused);
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

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.is_change {
            self.disk.session_changed(self.session);
        }
    }
}
