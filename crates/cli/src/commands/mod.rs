//! The commands, one module each.

pub(crate) mod admin;
pub(crate) mod approvals;
pub(crate) mod audit;
pub(crate) mod bootstrap;
pub(crate) mod certs;
pub(crate) mod context;
pub(crate) mod diff;
pub(crate) mod doctor;
pub(crate) mod drain;
pub(crate) mod egress;
pub(crate) mod files;
pub(crate) mod flags;
pub(crate) mod info;
pub(crate) mod logs;
pub(crate) mod man;
pub(crate) mod policy;
pub(crate) mod policy_scopes;
pub(crate) mod run;
pub(crate) mod runs;
pub(crate) mod serve;
pub(crate) mod session;
pub(crate) mod supervisor;
pub(crate) mod tools;
pub(crate) mod trace;
pub(crate) mod up;
pub(crate) mod volume;
