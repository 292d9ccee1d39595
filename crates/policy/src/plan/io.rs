//! Rate limits for reading from and writing to a device.

use serde::{Deserialize, Serialize};

use crate::Policy;

/// Rate limits on the device that holds the session's directory. `None` means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoLimits {
    /// Bytes read per second.
    pub read_bytes: Option<u64>,
    /// Bytes written per second.
    pub write_bytes: Option<u64>,
    /// Read operations per second.
    pub reads: Option<u64>,
    /// Write operations per second.
    pub writes: Option<u64>,
}

/// The direction of a rate limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

impl IoLimits {
    pub(super) fn from_policy(policy: &Policy) -> Self {
        let resources = &policy.resources;
        Self {
            read_bytes: resources.max_read_bytes_per_second,
            write_bytes: resources.max_write_bytes_per_second,
            reads: resources.max_reads_per_second,
            writes: resources.max_writes_per_second,
        }
    }

    /// The policy fields that set a limit, each with its direction.
    pub(super) fn fields(self) -> impl Iterator<Item = (&'static str, Direction)> {
        [
            ("policy.resources.max_read_bytes_per_second", Direction::Read, self.read_bytes),
            ("policy.resources.max_reads_per_second", Direction::Read, self.reads),
            ("policy.resources.max_write_bytes_per_second", Direction::Write, self.write_bytes),
            ("policy.resources.max_writes_per_second", Direction::Write, self.writes),
        ]
        .into_iter()
        .filter_map(|(field, direction, limit)| limit.map(|_| (field, direction)))
    }

    /// The first policy field that sets a limit.
    #[must_use]
    pub fn field(self) -> Option<&'static str> {
        self.fields().next().map(|(field, _)| field)
    }
}
