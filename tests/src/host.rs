//! What an installation has on its host at one moment, to be compared before and after. Only what is its
//! own is seen, so that others may use the host meanwhile.

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

/// Where sandboxes and their tools could leave directories.
const SHARED: [&str; 5] = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/run/user"];

/// Where a worker keeps the control sockets of its containers.
const CHANNELS: &str = "run/containers";

/// Everything of an installation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostSnapshot {
    /// How many processes of each name.
    pub processes: BTreeMap<String, usize>,
    /// The namespaces that they are in.
    pub namespaces: BTreeSet<String>,
    /// Mounts that anybody on the host sees.
    pub mounts: BTreeSet<String>,
    /// Control groups that workers made.
    pub cgroups: BTreeSet<PathBuf>,
    /// Containers that workers had made.
    pub containers: BTreeSet<String>,
    /// Directories of sessions and of control sockets, and what the users of sessions have elsewhere.
    pub directories: BTreeSet<PathBuf>,
}

impl HostSnapshot {
    /// Looks at what is there of an installation whose sessions have these users, and whose workers had these
    /// processes.
    pub fn take(cluster: &Cluster, users: &Range<u32>, workers: &[u32]) -> Result<Self> {
        let processes = processes(cluster, users);
        let names = processes.iter().filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).ok());
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

/// Those that mention its directory, those of its sessions' users, and all their descendants.
fn processes(cluster: &Cluster, users: &Range<u32>) -> BTreeSet<u32> {
    let mut found: BTreeSet<_> = cluster.leak_guard().processes().into_iter().collect();
    found.extend(user_processes(users));
    let below = |pid: &u32| process::descendants(Pid::from_raw(pid.cast_signed())?).ok();
    let more: Vec<_> = found.iter().filter_map(below).flatten().collect();
    found.extend(more.iter().map(|pid| pid.as_raw_nonzero().get().cast_unsigned()));
    // The test itself is none of them.
    found.remove(&std::process::id());
    found
}

/// The processes of some users.
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
    let place = directory.display().to_string();
    let is_ours = |line: &&str| line.contains(&place) || names_user(line, users);
    Ok(list.lines().filter(is_ours).map(str::to_owned).collect())
}

/// Whether a word of it is the number of a user.
fn names_user(text: &str, users: &Range<u32>) -> bool {
    text.split(|c: char| !c.is_ascii_digit()).any(|word| word.parse().is_ok_and(|uid| users.contains(&uid)))
}

/// Without the parent that each living worker has for its own.
fn cgroups(workers: &[u32]) -> BTreeSet<PathBuf> {
    let own = |pid: &u32, name: &str| {
        name.ends_with("-sandboxes") && Path::new("/proc").join(pid.to_string()).exists()
    };
    let of = |pid: &u32, name: &str| name.starts_with(&format!("codelia-{pid}-")) && !own(pid, name);
    leak::groups(|name| workers.iter().any(|pid| of(pid, name)))
}

fn directories(cluster: &Cluster, users: &Range<u32>) -> Result<BTreeSet<PathBuf>> {
    let mut found: BTreeSet<_> = cluster.session_directories()?.into_iter().collect();
    let channels = cluster.workers.iter().map(|worker| cluster.directory().join(&worker.id).join(CHANNELS));
    found.extend(entries(channels));
    let shared = entries(SHARED.iter().map(PathBuf::from));
    let is_theirs = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|it| users.contains(&it.uid()));
    found.extend(shared.filter(is_theirs));
    Ok(found)
}

/// What is in those of them that are there.
fn entries(directories: impl Iterator<Item = PathBuf>) -> impl Iterator<Item = PathBuf> {
    directories.filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten().map(|entry| entry.path())
}
