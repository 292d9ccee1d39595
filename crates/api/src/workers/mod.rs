//! Calls to workers: `channels` connects to them, `transport` reaches one in this process, `calls`
//! makes the calls, `placement` chooses between them.

mod calls;
mod channels;
mod error;
mod placement;
mod transport;

pub use self::placement::Placement;
pub(crate) use self::{
    calls::{Push, WorkerCalls, push_request},
    transport::WorkerTransport,
};
