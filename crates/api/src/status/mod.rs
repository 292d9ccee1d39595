//! Errors of the API and their gRPC statuses.
//!
//! `error` defines what can go wrong and the text for callers, `grpc` maps it to a code, a stable
//! reason and details, `convert` turns errors of other crates into it. Nothing here depends on the
//! handlers.

mod approval;
mod convert;
mod error;
mod file;
mod flag;
mod grpc;
mod tool;
mod volume;

pub(crate) use self::{
    approval::ApprovalError, error::ApiError, file::FileError, flag::FlagError, tool::ToolError,
    volume::VolumeError,
};
