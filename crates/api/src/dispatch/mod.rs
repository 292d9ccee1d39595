//! Calls to workers: `channels` connects to them, `calls` makes the calls.

mod calls;
mod channels;
mod error;

pub(crate) use self::calls::{Dispatch, Push, push_request};
