//! One run: from the push or poll that brings it to its committed outcome.

pub(crate) mod attach;
pub(crate) mod dispatch;
pub(crate) mod execute;
pub(crate) mod output;
pub(crate) mod output_pacing;
pub(crate) mod slots;
pub(crate) mod stdio;
pub(crate) mod streams;
pub(crate) mod table;
pub(crate) mod violations;
