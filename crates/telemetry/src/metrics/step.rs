//! The steps of a run.

use codelia_types::words;

words! {
    /// A step of a run whose latency is measured.
    pub enum Step {
        /// Authenticate, validate, build the run specification.
        Admit = "admit",
        /// Insert the run into the store.
        Record = "record",
        /// Push the run to the lease holder.
        Dispatch = "dispatch",
        /// Wait for a slot.
        Queue = "queue",
        /// Create a sandbox, if none was prepared.
        Prepare = "prepare",
        /// From the launch request to the command's `execve`.
        Setup = "setup",
        /// Execute the command.
        Execute = "execute",
        /// Commit the outcome.
        Commit = "commit",
    }
}
