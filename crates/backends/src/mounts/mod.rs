//! The files of the host in a sandbox, for the modes that show them: `native`, `bwrap` and
//! `nsjail`.

pub(crate) mod layout;
pub(crate) mod overlay;
pub(crate) mod view;
