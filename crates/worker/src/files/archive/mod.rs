//! `ExportFiles` and `ImportFiles`: a directory as a tar archive, in both directions.
//!
//! Both work piece by piece with flat memory: a call that waits for its caller holds no thread.

mod decompress;
mod export;
mod import;
mod staging;
mod tar;

use std::time::Duration;

use codelia_proto::internal::v1::FileRefusalReason as Reason;

use super::{
    error::FileError,
    limiter::{CallLimiter, CallPermit},
};

pub(super) use self::{export::Export, import::Import};

/// Files, directories and links in an archive.
const MAX_ENTRIES: u64 = 200_000;
/// Bytes of an archive, without compression.
const MAX_BYTES: u64 = 64 << 30;
/// Levels of directories. An export holds two descriptors for each.
const MAX_DEPTH: usize = 100;
/// The kernel's limit for a path.
const MAX_PATH: usize = 4095;
/// How long one archive may take.
const MAX_DURATION: Duration = Duration::from_secs(3600);
/// An archive counts as this many calls: it holds more descriptors and memory than others.
const WEIGHT: usize = 8;

/// The permits of an archive, in addition to that of its call.
#[derive(Debug)]
pub(super) struct ArchivePermits(#[expect(dead_code, reason = "held, never read")] Vec<CallPermit>);

impl ArchivePermits {
    /// Permission for one more archive of a tenant.
    pub(super) fn acquire(limiter: &std::sync::Arc<CallLimiter>, tenant: &str) -> Result<Self, FileError> {
        let permits: Option<Vec<_>> = (1..WEIGHT).map(|_| limiter.try_acquire(tenant)).collect();
        permits.map(Self).ok_or_else(|| Reason::Busy.into())
    }
}
