//! Why a mechanism of disk limits does not work on this host.

/// Why a mechanism does not work here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} ({remedy})")]
pub struct Missing {
    /// The part of the host that is missing.
    pub what: String,
    /// How to get it.
    pub remedy: &'static str,
}

impl Missing {
    pub(super) fn new(what: impl Into<String>, remedy: &'static str) -> Self {
        Self { what: what.into(), remedy }
    }
}
