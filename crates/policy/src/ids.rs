//! User and group ids of commands.

use serde::{Deserialize, Serialize};

/// The user and group of a command on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// The ids of the command inside a sandbox that has private user ids.
pub const SANDBOX_IDS: Ids = Ids { uid: 1000, gid: 1000 };
