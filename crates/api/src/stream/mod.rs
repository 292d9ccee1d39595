//! The stream of a run's events, for `WatchRun` and `Exec`.
//!
//! `follow` reads past events from the store and new ones from the worker, `attach` connects to the
//! worker, `deliver` sends each event once, `client` ends the stream, `output` cuts output into
//! events, `response` sends them in few messages, `waiting` says why a run waits, `exec` forwards
//! the client's input.
//!
//! The store is authoritative: a worker that cannot be reached or does not know the run is retried.

mod attach;
mod client;
mod deliver;
mod exec;
mod follow;
mod output;
mod response;
mod waiting;

pub(crate) use self::{
    client::{EVENT_BUFFER, StreamError, send_final_error, stopped},
    exec::{ExecInput, ExecOpening, ExecStream, read_opening},
    follow::{EventStreamer, watch},
    response::response_events,
};
