//! What `codelia-init` and the backends say to each other over the control socket.

#![forbid(unsafe_code)]

mod frame;
mod protocol;

pub use frame::{Decoder, FrameError, encode};
pub use protocol::{
    Exit, Expected, ExpectedMount, Failure, Launch, OVERLAY_PLACES, Overlay, Overlays, Report, Request,
    Rlimit, SecuritySetup, Setup, Status, Step,
};
