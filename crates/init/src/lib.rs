//! The protocol between `codelia-init` and the backends on the control socket.

#![forbid(unsafe_code)]

mod frame;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod protocol;

pub use frame::{Decoder, FrameError, encode};
pub use protocol::{
    ChildrenUsage, Egress, Exit, ExitStatus, ExpectedEnvironment, ExpectedMount, ExpectedNamespace,
    Failure, FileIdentity, HOST_PROC, Launch, LayoutEntry, Mask, NAMESPACES, OVERLAY_MOUNTS_DIR,
    Overlay, OverlayKind, OverlayRequest, OwnMount, PrivatePath, Report, Request, RestrictRequest,
    Rlimit, STAGING_DIR, SecuritySetup, Setup, StagedMount, StartRequest, Step, View,
    WorkspaceLayout, ZYGOTE_FILES, Zygote, ZygoteMount, ZygoteRequest,
};
