//! Calls to workers: `channels` connects to them, `calls` makes the calls,
//! `placement` chooses between them.

mod calls;
mod channels;
mod error;
mod placement;

pub(crate) use self::calls::{Dispatch, Push, push_request};
pub use self::placement::Placement;
