//! Processes whose tool was killed after it had made them and before it let them go on: they wait for it for
//! ever, in namespaces of their own and in no control group.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use codelia_sys::{Pid, proc_self, process};

/// Kills those of users that only sandboxes have; answers how many.
pub(crate) fn kill(program: &Path, is_ours: impl Fn(u32) -> bool) -> io::Result<usize> {
    let Some(name) = program.file_name().and_then(|name| name.to_str()) else { return Ok(0) };
    let own = proc_self::namespace_id("pid")?;
    let mut killed = 0;
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        // From here on the id means this process alone.
        let Ok(handle) = process::PidFd::open(pid) else { continue };
        if is_orphan(&entry.path(), name, own, &is_ours) {
            handle.kill()?;
            killed += 1;
        }
    }
    Ok(killed)
}

/// The tool itself is where its worker is, and what it lets go on is another program. One that is gone
/// meanwhile is none.
fn is_orphan(dir: &Path, name: &str, own_namespace: u64, is_ours: impl Fn(u32) -> bool) -> bool {
    let Some(found) = Found::read(dir) else { return false };
    let namespace = proc_self::namespace_id_of(dir, "pid");
    let parent = Found::read(&PathBuf::from(format!("/proc/{}", found.parent)));
    found.name == name
        && is_ours(found.user)
        && namespace.is_ok_and(|namespace| namespace != own_namespace)
        && parent.is_none_or(|parent| parent.name != name)
}

/// What the kernel says of a process.
struct Found {
    name: String,
    parent: u32,
    user: u32,
}

impl Found {
    fn read(dir: &Path) -> Option<Self> {
        let status = fs::read_to_string(dir.join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        let number = |name: &str| field(name)?.split_whitespace().next()?.parse().ok();
        Some(Self { name: field("Name:")?.to_owned(), parent: number("PPid:")?, user: number("Uid:")? })
    }
}
