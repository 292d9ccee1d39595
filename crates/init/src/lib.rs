//! The protocol between `codelia-init` and the backends on the control socket.

#![forbid(unsafe_code)]

mod frame;
mod protocol;

pub use frame::{Decoder, FrameError, encode};
pub use protocol::{
    Egress, Exit, ExitStatus, ExpectedEnvironment, ExpectedMount, ExpectedNamespace, Failure, FileIdentity,
    Launch, Mask, NAMESPACES, OVERLAY_MOUNTS_DIR, Overlay, OverlayRequest, PrivatePath, Report, Request,
    RestrictRequest, Rlimit, SecuritySetup, Setup, StagedMount, Step, View,
};
