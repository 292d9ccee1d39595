//! The protocol between `codelia-init` and the backends on the control socket.

#![forbid(unsafe_code)]

mod frame;
mod protocol;

pub use frame::{Decoder, FrameError, encode};
pub use protocol::{
    Exit, ExitStatus, ExpectedEnvironment, ExpectedMount, Failure, Launch, OVERLAY_MOUNTS_DIR, Overlay,
    OverlayRequest, Report, Request, RestrictRequest, Rlimit, SecuritySetup, Setup, Step,
};
