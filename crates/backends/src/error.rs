//! How a sandbox can fail us.

use codelia_policy::Refusal;

/// A sandbox could not be prepared or launched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command cannot be executed; the caller's to mend.
    #[error("{}: {}", .0.reason, .0.message)]
    Refused(Refusal),
    /// The plan asks for what this mode or host cannot enforce.
    #[error("mode cannot enforce {field} on this host")]
    Unenforceable {
        /// The field of the plan.
        field: &'static str,
    },
}
