//! Leak detection: processes, directories and control groups that a test leaves behind.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use codelia_sys::process_id::ProcessId;
use rustix::process::{Pid, Signal, kill_process};

use crate::eventually;

/// Finds the processes of one test by its directory, and kills them on drop.
#[derive(Debug)]
pub struct LeakGuard {
    directory: PathBuf,
}

impl LeakGuard {
    /// Watches processes that mention `directory`.
    #[must_use]
    pub fn of(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Returns the processes whose command line, environment or working directory mentions the
    /// directory.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let own = std::process::id();
        all_pids().filter(|pid| *pid != own && self.belongs(*pid)).collect()
    }

    fn belongs(&self, pid: u32) -> bool {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let directory = self.directory.to_string_lossy();
        let mentions = |file: &str| {
            fs::read(proc.join(file))
                .is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(&*directory))
        };
        let inside =
            || fs::read_link(proc.join("cwd")).is_ok_and(|cwd| cwd.starts_with(&self.directory));
        mentions("cmdline") || mentions("environ") || inside()
    }

    /// Waits until no process of the test is left.
    ///
    /// # Panics
    /// If one is left after the timeout.
    pub async fn expect_no_processes(&self) {
        let gone = eventually(("all processes of the test exit", &self.directory), || async {
            self.processes().is_empty().then_some(())
        });
        gone.await;
    }
}

impl Drop for LeakGuard {
    fn drop(&mut self) {
        // Only a failed test has processes left here.
        for pid in self.processes() {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            eprintln!(
                "killing leftover process {pid}: {}",
                String::from_utf8_lossy(&command).replace('\0', " ")
            );
            if let Some(Err(error)) =
                Pid::from_raw(pid.cast_signed()).map(|pid| kill_process(pid, Signal::KILL))
            {
                eprintln!("cannot kill it: {error}");
            }
        }
    }
}

/// Processes whose working directory is below `directory`, such as the commands of a session.
#[must_use]
pub fn processes_working_in(directory: &Path) -> Vec<u32> {
    let inside = |pid: &u32| {
        fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(directory))
    };
    all_pids().filter(inside).collect()
}

pub(crate) fn all_pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the control groups that a dead process created, in every hierarchy. Those of processes that
/// started before `since` belong to another installation on this host.
#[must_use]
pub fn abandoned_cgroups(since: ProcessId) -> BTreeSet<PathBuf> {
    groups(|name| is_abandoned(name, since))
}

/// Returns the control groups whose name matches, in every hierarchy.
pub(crate) fn groups(matches: impl Fn(&str) -> bool) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut open = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(directory) = open.pop() {
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            if matches(&entry.file_name().to_string_lossy()) {
                found.insert(entry.path());
            }
            open.push(entry.path());
        }
    }
    found
}

/// The groups of the program have the identity of their creator in their name, those of tests its pid
/// at the end.
fn is_abandoned(name: &str, since: ProcessId) -> bool {
    let Some(rest) = name.strip_prefix("codelia-") else { return false };
    if let Some(creator) = ProcessId::from_name_prefix(rest) {
        return !creator.is_alive() && !creator.started_before(since);
    }
    let is_of_test = rest.starts_with("test-") || rest.starts_with("user-");
    let creator = rest.rsplit('-').next().unwrap_or_default();
    is_of_test && !Path::new("/proc").join(creator).exists()
}

/// Lists the workspaces of the sessions below a worker's root.
pub(crate) fn session_directories(root: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(root.join("sessions"))?;
    Ok(entries.map(|entry| Ok(entry?.path().join("workspace"))).collect::<std::io::Result<_>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_other_installations_are_not_abandoned() {
        let own = ProcessId::current().unwrap();
        let dead = |start: &str| format!("codelia-{}-{start}-run", std::process::id());
        assert!(is_abandoned(&dead(&u64::MAX.to_string()), own), "began later and is dead");
        assert!(is_abandoned("codelia-user-399997-0", own));
        let others = [dead("0"), format!("codelia-{own}-run"), "codelia.service".to_owned()];
        for name in others {
            assert!(!is_abandoned(&name, own), "{name}");
        }
    }
}
