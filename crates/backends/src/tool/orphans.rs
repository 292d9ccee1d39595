//! Kills processes whose tool was killed after it had created them and before it let them start.
//! They would wait for it indefinitely, in their own namespaces and in no control group.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use codelia_sys::{Pid, proc_self, process};

use super::status::ProcessStatus;

/// Kills the orphans of a tool that run as sandbox users. Returns how many it killed.
pub(super) fn kill(program: &Path, is_sandbox_uid: impl Fn(u32) -> bool) -> io::Result<usize> {
    let Some(name) = program.file_name().and_then(|name| name.to_str()) else { return Ok(0) };
    let own_namespace = proc_self::namespace_id("pid")?;
    let mut killed = 0;
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) =
            entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        // Most processes have another name: the shortest file of a process says so.
        if !fs::read(entry.path().join("comm"))
            .is_ok_and(|comm| comm.trim_ascii_end() == name.as_bytes())
        {
            continue;
        }
        // Open it before the checks, so that they and the kill mean the same process.
        let Ok(pidfd) = process::PidFd::open(pid) else { continue };
        if is_orphan(&entry.path(), name, own_namespace, &is_sandbox_uid) {
            pidfd.kill()?;
            killed += 1;
        }
    }
    Ok(killed)
}

/// An orphan still has the tool's name but is in another PID namespace, and its parent is not the
/// tool. The tool itself is in the worker's namespace; a process that was started has another name.
fn is_orphan(
    dir: &Path,
    name: &str,
    own_namespace: u64,
    is_sandbox_uid: impl Fn(u32) -> bool,
) -> bool {
    // A process that has ended in the meantime is not an orphan.
    let Some(status) = ProcessStatus::read(dir) else { return false };
    let namespace = proc_self::namespace_id_of(dir, "pid");
    let parent = ProcessStatus::read(&PathBuf::from(format!("/proc/{}", status.parent)));
    status.name == name
        && is_sandbox_uid(status.uid)
        && namespace.is_ok_and(|namespace| namespace != own_namespace)
        && parent.is_none_or(|parent| parent.name != name)
}
