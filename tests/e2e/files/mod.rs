//! File calls: what they do, what they refuse, and that they stay inside the workspace.

mod archive_attacks;
mod archive_bytes;
mod archives;
mod cli;
mod content;
mod directories;
mod disk_limits;
mod exchange;
mod links;
mod permissions;
mod refusals;
mod sessions;
mod swaps;
mod tree;
mod uploads;
mod watch;
mod watch_attacks;
mod workspace;
