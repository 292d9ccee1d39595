//! The modes that start a tool for each sandbox (bwrap, nsjail), and what they share.

mod backend;
pub(crate) mod bwrap;
mod dirs;
pub(crate) mod nsjail;
mod orphans;
mod process;
mod status;

pub use backend::ToolOptions;
