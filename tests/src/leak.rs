//! Leak detection: processes, directories and control groups that a test leaves behind.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
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

/// Returns control groups named `codelia…` whose creator is dead, in every hierarchy. Their names
/// do not identify a test, so they are checked at the end of a whole test run.
#[must_use]
pub fn abandoned_cgroups() -> BTreeSet<PathBuf> {
    groups(is_abandoned)
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

/// Whether the process in the name of a `codelia` group no longer exists.
fn is_abandoned(name: &str) -> bool {
    let creator = name.split('-').find_map(|word| word.parse::<u32>().ok());
    name.contains("codelia")
        && creator.is_none_or(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

/// Lists the workspaces of the sessions below a worker's root.
pub(crate) fn session_directories(root: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(root.join("sessions"))?;
    Ok(entries.map(|entry| Ok(entry?.path().join("workspace"))).collect::<std::io::Result<_>>()?)
}
