//! A snapshot of what an installation has on its host, to compare before and after a test. It
//! contains only what belongs to the installation, so that others may use the host.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use anyhow::Result;
use codelia_sys::{Pid, process};

use crate::{Cluster, leak, worker_containers};

/// Directories where sandboxes and their tools could leave files.
const SHARED_DIRS: [&str; 5] = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/run/user"];

/// Where a worker keeps the control sockets of its containers.
const CONTAINER_SOCKETS: &str = "run/containers";

/// Everything that an installation has on its host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostSnapshot {
    /// Number of processes by name.
    pub processes: BTreeMap<String, usize>,
    /// Namespaces of the processes.
    pub namespaces: BTreeSet<String>,
    /// Mounts in the host's mount namespace.
    pub mounts: BTreeSet<String>,
    /// Control groups that workers created.
    pub cgroups: BTreeSet<PathBuf>,
    /// Containers that workers created.
    pub containers: BTreeSet<String>,
    /// Directories of sessions and control sockets, and files of the sessions' users elsewhere.
    pub directories: BTreeSet<PathBuf>,
}

impl HostSnapshot {
    /// Takes a snapshot of an installation, given the users of its sessions and the process ids
    /// that its workers had.
    pub fn take(cluster: &Cluster, users: &Range<u32>, workers: &[u32]) -> Result<Self> {
        let processes = processes(cluster, users);
        let names =
            processes.iter().filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).ok());
        let mut counted = BTreeMap::new();
        names.for_each(|name| *counted.entry(name.trim().to_owned()).or_default() += 1);
        Ok(Self {
            processes: counted,
            namespaces: processes.iter().flat_map(|pid| namespaces(*pid)).collect(),
            mounts: mounts(cluster.directory(), users)?,
            cgroups: cgroups(workers),
            containers: worker_containers(workers)?,
            directories: directories(cluster, users)?,
        })
    }
}

/// Processes that mention the installation's directory or run as a session user, with descendants.
fn processes(cluster: &Cluster, users: &Range<u32>) -> BTreeSet<u32> {
    let mut found: BTreeSet<_> = cluster.leak_guard().processes().into_iter().collect();
    found.extend(user_processes(users));
    let below = |pid: &u32| process::descendants(Pid::from_raw(pid.cast_signed())?).ok();
    let more: Vec<_> = found.iter().filter_map(below).flatten().collect();
    found.extend(more.iter().map(|pid| pid.as_raw_nonzero().get().cast_unsigned()));
    // Not the test itself.
    found.remove(&std::process::id());
    found
}

/// Returns the processes of these users.
#[must_use]
pub fn user_processes(users: &Range<u32>) -> Vec<u32> {
    leak::all_pids().filter(|pid| user_of(*pid).is_some_and(|uid| users.contains(&uid))).collect()
}

fn user_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn namespaces(pid: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/ns")).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.map(|link| link.display().to_string()).collect()
}

fn mounts(directory: &Path, users: &Range<u32>) -> Result<BTreeSet<String>> {
    let list = fs::read_to_string("/proc/self/mountinfo")?;
    let name = directory.display().to_string();
    let is_ours = |line: &&str| line.contains(&name) || names_user(line, users);
    Ok(list.lines().filter(is_ours).map(str::to_owned).collect())
}

/// Whether the text contains the id of a user.
fn names_user(text: &str, users: &Range<u32>) -> bool {
    text.split(|c: char| !c.is_ascii_digit())
        .any(|word| word.parse().is_ok_and(|uid| users.contains(&uid)))
}

/// Control groups of the workers, without the parent group of a live worker.
fn cgroups(workers: &[u32]) -> BTreeSet<PathBuf> {
    let own = |pid: &u32, name: &str| {
        name.ends_with("-sandboxes") && Path::new("/proc").join(pid.to_string()).exists()
    };
    let of =
        |pid: &u32, name: &str| name.starts_with(&format!("codelia-{pid}-")) && !own(pid, name);
    leak::groups(|name| workers.iter().any(|pid| of(pid, name)))
}

fn directories(cluster: &Cluster, users: &Range<u32>) -> Result<BTreeSet<PathBuf>> {
    let mut found: BTreeSet<_> = cluster.session_directories()?.into_iter().collect();
    let sockets = cluster
        .workers
        .iter()
        .map(|worker| cluster.directory().join(&worker.id).join(CONTAINER_SOCKETS));
    found.extend(entries(sockets));
    let shared = entries(SHARED_DIRS.iter().map(PathBuf::from));
    let is_theirs =
        |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|it| users.contains(&it.uid()));
    found.extend(shared.filter(is_theirs));
    Ok(found)
}

/// Lists the entries of all directories that exist.
fn entries(directories: impl Iterator<Item = PathBuf>) -> impl Iterator<Item = PathBuf> {
    directories
        .filter_map(|dir| fs::read_dir(dir).ok())
        .flatten()
        .flatten()
        .map(|entry| entry.path())
}
