//! Admission: validates a request, merges it with its session and the installation's defaults, and
//! rejects modes that are not allowed or not available.

pub(crate) mod approval;
mod fingerprint;
mod mode;
mod network;
mod policy;
pub(crate) mod quota;
pub(crate) mod rules;
mod run_request;
mod session_request;
mod tool;

pub(crate) use self::{
    fingerprint::fingerprint,
    mode::{check_available, mode_not_allowed, mode_unavailable},
    policy::admit_policy,
    run_request::RunRequest,
    session_request::SessionRequest,
    tool::{of_tool, tool_quarantined},
};

#[cfg(test)]
pub(crate) mod tests;
