//! Limits that a run gets near to.

use serde::{Deserialize, Serialize};

use crate::words;

words! {
    /// A limit that is reported when a run gets near to it. Named like the field of the limits.
    pub enum Resource {
        /// Memory, without cached files that the kernel can drop.
        MemoryBytes = "memory_bytes",
        /// Processes and threads.
        Pids = "pids",
        /// CPU time.
        CpuTime = "cpu_time",
        /// Stored output.
        OutputBytes = "output_bytes",
    }
}

/// A run has used most of what a limit allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NearLimit {
    /// The limit that is near.
    pub resource: Resource,
    /// The amount that the run used when that was seen: bytes, processes or milliseconds.
    pub used: u64,
    /// The limit, in the same unit.
    pub limit: u64,
}

impl NearLimit {
    /// The share of a limit, in percent, from which a run is near to it.
    pub const PERCENT: u64 = 80;

    /// A limit that what is used is near to; `None` if it is not.
    #[must_use]
    pub fn reached(resource: Resource, used: u64, limit: u64) -> Option<Self> {
        (used >= Self::threshold(limit)).then_some(Self { resource, used, limit })
    }

    /// The least amount that a run near this limit uses.
    #[must_use]
    pub fn threshold(limit: u64) -> u64 {
        (limit / 100).saturating_mul(Self::PERCENT) + (limit % 100 * Self::PERCENT).div_ceil(100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_near_from_eighty_percent() {
        for (limit, threshold) in [(100, 80), (10, 8), (1, 1), (3, 3), (512 << 20, 429_496_730)] {
            assert_eq!(NearLimit::threshold(limit), threshold);
            assert_eq!(NearLimit::reached(Resource::Pids, threshold - 1, limit), None);
            assert!(NearLimit::reached(Resource::Pids, threshold, limit).is_some());
        }
        assert!(NearLimit::threshold(u64::MAX) < u64::MAX);
    }

    #[test]
    fn names_are_those_of_stored_events() {
        for resource in Resource::ALL {
            assert_eq!(serde_json::to_value(resource).unwrap(), resource.as_str());
        }
    }
}
