//! The commands of the server, one module each.

pub(crate) mod bootstrap;
pub(crate) mod certs;
pub(crate) mod doctor;
pub(crate) mod egress;
pub(crate) mod man;
pub(crate) mod serve;
pub(crate) mod up;
