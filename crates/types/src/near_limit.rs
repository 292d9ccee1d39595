//! Limits that a run gets near to.

use serde::{Deserialize, Serialize};

/// A limit that is reported when a run gets near to it. Named like the field of the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Memory, without cached files that the kernel can drop.
    MemoryBytes,
    /// Processes and threads.
    Pids,
    /// CPU time.
    CpuTime,
    /// Stored output.
    OutputBytes,
}

impl Resource {
    /// Every resource.
    pub const ALL: [Self; 4] = [Self::MemoryBytes, Self::Pids, Self::CpuTime, Self::OutputBytes];

    /// The name in the API, in events and in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MemoryBytes => "memory_bytes",
            Self::Pids => "pids",
            Self::CpuTime => "cpu_time",
            Self::OutputBytes => "output_bytes",
        }
    }
}

/// A run has used most of what a limit allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NearLimit {
    /// The limit.
    pub resource: Resource,
    /// What the run used when that was seen: bytes, processes or milliseconds.
    pub used: u64,
    /// The limit, in the same unit.
    pub limit: u64,
}

impl NearLimit {
    /// The share of a limit, in percent, from which a run is near to it.
    pub const PERCENT: u64 = 80;

    /// `None` if what is used is not near the limit.
    #[must_use]
    pub fn of(resource: Resource, used: u64, limit: u64) -> Option<Self> {
        (used >= Self::threshold(limit)).then_some(Self { resource, used, limit })
    }

    /// What a run that is near this limit uses at least.
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
            assert_eq!(NearLimit::of(Resource::Pids, threshold - 1, limit), None);
            assert!(NearLimit::of(Resource::Pids, threshold, limit).is_some());
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
