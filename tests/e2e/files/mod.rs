//! File calls: what they do, what they refuse, and that they stay inside the workspace.

mod archive_attacks;
mod archive_bytes;
mod archives;
mod cli;
mod content;
mod directories;
mod disk_limits;
mod links;
mod permissions;
mod refusals;
mod sessions;
mod tree;
mod uploads;
mod workspace;
