//! The modes that start a tool for each sandbox (bwrap, nsjail), and what they share.

pub(crate) mod bwrap;
pub(crate) mod mask;
pub(crate) mod nsjail;
pub(crate) mod orphans;
pub(crate) mod overlay;
pub(crate) mod tool_backend;
pub(crate) mod tool_dirs;
pub(crate) mod tool_process;
