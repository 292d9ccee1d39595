//! Path resolution that never leaves a root directory, although the sandbox may change the tree
//! meanwhile. Built on `openat2`.
//!
//! - [`Root::resolve`] walks one component at a time and follows symlinks as the command sees them:
//!   an absolute target below the workspace path inside the sandbox resolves from the root.
//! - [`open_directory_beneath`] lets the kernel resolve the whole path and fails if it leaves the
//!   root.

mod directory;
mod entry;
mod error;
mod open;
#[cfg(test)]
mod tests;
mod walk;

pub use directory::{
    create_directories_without_symlinks, open_directory, open_directory_across_mounts,
    open_directory_beneath, open_directory_without_symlinks,
};
pub use entry::{Entry, ResolvedPath};
pub use error::ResolveError;
pub use walk::{FinalSymlink, Root};

pub use crate::fd::proc_fd_path;
