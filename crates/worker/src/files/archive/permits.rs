//! How many archives a tenant may have at the same time.

use std::sync::Arc;

use codelia_types::Reason;

use super::super::{
    error::FileError,
    limiter::{CallLimiter, CallPermit},
};

/// An archive counts as this many calls: it holds more descriptors and memory than others.
const WEIGHT: usize = 8;

/// The permits of an archive, in addition to that of its call.
#[derive(Debug)]
pub(in super::super) struct ArchivePermits(
    #[expect(dead_code, reason = "held, never read")] Vec<CallPermit>,
);

impl ArchivePermits {
    /// Permission for one more archive of a tenant.
    pub(in super::super) fn acquire(
        limiter: &Arc<CallLimiter>,
        tenant: &str,
    ) -> Result<Self, FileError> {
        let permits: Option<Vec<_>> = (1..WEIGHT).map(|_| limiter.try_acquire(tenant)).collect();
        permits.map(Self).ok_or_else(|| Reason::TooManyFileCalls.into())
    }
}
