//! The ids of a process in its own new user namespace.

use std::{fs, path::Path};

use rustix::io::Errno;

use crate::call::from_io;

/// Maps this process's user and group in its new user namespace, each as (inside, outside).
/// `proc_dir` is where `/proc` is mounted.
///
/// # Errors
/// As `open(2)` and `write(2)`: `EACCES` if this process is not dumpable.
pub fn map_ids(proc_dir: &Path, uids: (u32, u32), gids: (u32, u32)) -> Result<(), Errno> {
    let write = |name: &str, text: String| {
        let path = proc_dir.join("self").join(name);
        fs::write(path, text).map_err(from_io)
    };
    // The kernel accepts an unprivileged gid_map only after setgroups is denied.
    write("setgroups", "deny".to_owned())?;
    write("uid_map", format!("{} {} 1", uids.0, uids.1))?;
    write("gid_map", format!("{} {} 1", gids.0, gids.1))
}
