//! Creation and removal of control groups on a real kernel. Cases for cgroup v2 run on a v2 host
//! and in the VM of `vm.rs`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use codelia_backends::{Backend, Logical, LogicalOptions};
use codelia_sys::cgroup::{Group, Hierarchy, Limits};

use crate::{
    harness::{group_parent, init_path, skip},
    require::available,
};

const V2_ROOT: &str = "/sys/fs/cgroup";
const LIMITS: Limits =
    Limits { memory_bytes: Some(64 << 20), pids: Some(16), cpu_millicores: Some(1000) };

/// The case that other cases start as a separate process.
const CHILD_CASE: &str = "cgroups::worker_finds_cgroup_parent_by_itself";

fn hierarchy() -> Hierarchy {
    Hierarchy::detect(&group_parent()).unwrap()
}

fn has_cgroup_v2() -> bool {
    let all = fs::read_to_string(Path::new(V2_ROOT).join("cgroup.controllers")).unwrap_or_default();
    let has = ["memory", "pids", "cpu"]
        .iter()
        .all(|name| all.split_whitespace().any(|word| word == *name));
    available("cgroup2", (!has).then_some("this host does not use cgroup v2"))
}

/// A cgroup v2 directory for one test. Dropping it removes its children too.
struct Parent(PathBuf);

impl Parent {
    /// Enables the controllers for its children if `delegated`.
    fn new(name: &str, delegated: bool) -> Self {
        let dir = Path::new(V2_ROOT).join(format!("test-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        if delegated {
            fs::write(dir.join("cgroup.subtree_control"), "+memory +pids +cpu").unwrap();
        }
        Self(dir)
    }

    fn child(&self, name: &str) -> PathBuf {
        let dir = self.0.join(name);
        fs::create_dir(&dir).unwrap();
        dir
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        for entry in fs::read_dir(&self.0).unwrap().flatten().filter(|entry| entry.path().is_dir())
        {
            fs::remove_dir(entry.path()).unwrap();
        }
        fs::remove_dir(&self.0).unwrap();
    }
}

/// Returns a shell command that joins a group and runs a script.
fn script_in(group: &Path, script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("echo $$ > {}/cgroup.procs && {script}", group.display())]);
    command.stdin(Stdio::null());
    command
}

/// Runs the child case in a group, as a worker would start there. Returns its output.
fn worker_in(group: &Path) -> String {
    let suite = std::env::current_exe().unwrap();
    let script = format!("exec {} --exact {CHILD_CASE} --nocapture", suite.display());
    let done = script_in(group, &script).env_remove("CODELIA_TEST_CGROUP_PARENT").output().unwrap();
    let output = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success() && output.contains("1 passed"), "{output}");
    output
}

/// Probes twice, as a worker with two modes does.
#[tokio::test]
async fn worker_finds_cgroup_parent_by_itself() {
    for _ in 0..2 {
        let backend =
            Logical::new(LogicalOptions { init: init_path(), cgroup_parent: Default::default() })
                .unwrap();
        let found = backend.probe().await;
        let can = found.enforceable;
        if !(can.memory && can.pids && can.cpu) {
            return skip(
                "cgroup",
                format!("control groups cannot be created here: {:?}", found.gaps),
            );
        }
    }
    println!("cgroup {}", fs::read_to_string("/proc/self/cgroup").unwrap());
    let hierarchy = Hierarchy::detect(&Default::default()).unwrap();
    let mut group = Group::create(&hierarchy, "test", LIMITS).unwrap();
    println!("parent {}", shared_parent(group.directories().next().unwrap()).display());
    println!("own parent {}", group.directories().next().unwrap().parent().unwrap().display());
    group.remove().unwrap();
}

#[test]
fn worker_alone_in_its_cgroup_moves_aside() {
    if !has_cgroup_v2() {
        return;
    }
    let parent = Parent::new("alone", false);
    let output = worker_in(&parent.0);
    assert!(output.contains(&format!("parent {}\n", parent.0.display())), "{output}");
    assert!(output.contains("-worker\n"), "{output}");
}

#[test]
fn worker_in_shared_cgroup_uses_parent() {
    if !has_cgroup_v2() {
        return;
    }
    let parent = Parent::new("shared", true);
    let shared = parent.child("shared");
    let mut other =
        script_in(&shared, "echo in; exec sleep 1000").stdout(Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(other.stdout.as_mut().unwrap(), &mut [0; 3]).unwrap();
    let output = worker_in(&shared);
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(output.contains(&format!("parent {}\n", parent.0.display())), "{output}");
}

#[tokio::test]
async fn cgroup_parent_with_processes_is_a_gap() {
    if !has_cgroup_v2() {
        return;
    }
    let parent = Parent::new("busy", false);
    let mut other =
        script_in(&parent.0, "echo in; exec sleep 1000").stdout(Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(other.stdout.as_mut().unwrap(), &mut [0; 3]).unwrap();
    let name = parent.0.file_name().map(|name| name.to_string_lossy().into_owned());
    let groups = codelia_backends::CgroupParent { name, cpu_idle: false };
    let found = Logical::new(LogicalOptions { init: init_path(), cgroup_parent: groups })
        .unwrap()
        .probe()
        .await;
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(!found.enforceable.memory && !found.enforceable.pids && !found.enforceable.cpu);
    let remedy = codelia_policy::limits_remedy(found.mode, false);
    assert_eq!(found.gaps.iter().filter(|gap| gap.remedy == remedy).count(), 1, "{:?}", found.gaps);
}

#[test]
fn cgroup_limits_are_written_and_swap_is_off() {
    if !has_cgroup_v2() {
        return;
    }
    let mut group = Group::create(&hierarchy(), "limits", LIMITS).unwrap();
    let dir = group.directories().next().unwrap().clone();
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap().trim().to_owned();
    assert_eq!(
        ["memory.max", "memory.swap.max", "pids.max", "cpu.max"].map(read),
        ["67108864", "0", "16", "100000 100000"]
    );
    group.remove().unwrap();
}

/// The processes fork faster than a list of them can be read.
#[test]
fn cgroup_kills_fork_bomb_and_is_removed() {
    let Ok(mut group) = Group::create(&hierarchy(), "kill", LIMITS) else {
        return skip("cgroup", "control groups cannot be created here");
    };
    let mut shell = start_in(&group, "while :; do (setsid sleep 1000 &) ; done 2>/dev/null");
    assert!(!group.processes().unwrap().is_empty());
    assert!(group.remove().is_err(), "the control: a group with processes cannot be removed");
    let mut tries = 0;
    while group.remove().is_err() {
        group.kill_all().unwrap();
        tries += 1;
        assert!(tries < 10_000, "processes left: {:?}", group.processes());
        std::thread::yield_now();
    }
    assert!(!shell.wait().unwrap().success());
    assert_eq!(group.directories().count(), 0);
}

/// A sandbox whose group has no processes is refused.
#[test]
fn cgroup_tells_whether_a_process_is_in_all_its_directories() {
    let Ok(mut group) = Group::create(&hierarchy(), "members", LIMITS) else {
        return skip("cgroup", "control groups cannot be created here");
    };
    assert!(!group.has_processes().unwrap(), "nothing joined it");
    let mut sleep = start_in(&group, "exec sleep 1000");
    assert!(group.has_processes().unwrap(), "the control");
    let one = group.directories().next().unwrap();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    if own.lines().count() > 1 {
        // On cgroup v1 a process can be in some of them only.
        let parent = one.parent().unwrap().parent().unwrap();
        fs::write(parent.join("cgroup.procs"), sleep.id().to_string()).unwrap();
        assert!(!group.has_processes().unwrap(), "it left one directory");
    }
    sleep.kill().unwrap();
    sleep.wait().unwrap();
    group.remove().unwrap();
}

fn has_cgroup_v1() -> bool {
    let has = Path::new(V2_ROOT).join("cpu/cgroup.procs").exists();
    available("cgroup1", (!has).then_some("this host does not use cgroup v1"))
}

/// Starts a script in all directories of a group, and waits until it says that it is there.
fn start_in(group: &Group, script: &str) -> std::process::Child {
    let enter = group.directories().map(|dir| format!("echo $$ > {}/cgroup.procs", dir.display()));
    let script = format!("{} && echo in; {script}", enter.collect::<Vec<_>>().join(" && "));
    let mut shell =
        Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut [0; 3]).unwrap();
    shell
}

/// Uses processor time and 20 MB of memory.
const BUSY: &str = "i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done
    head -c 20000000 /dev/zero | tail -c 20000000 > /dev/null; exit 3";

/// The directory of a group that has this file.
fn dir_with(group: &Group, file: &str) -> PathBuf {
    group.directories().find(|dir| dir.join(file).exists()).unwrap().clone()
}

fn read_number(path: PathBuf) -> u64 {
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
fn reused_cgroup_is_like_a_new_one() {
    if !has_cgroup_v1() {
        return;
    }
    let hierarchy = hierarchy();
    let mut first = Group::create(&hierarchy, "first", LIMITS).unwrap();
    let cpu = dir_with(&first, "cpu.shares");
    let mut busy = start_in(&first, BUSY);
    assert_eq!(busy.wait().unwrap().code(), Some(3));
    first.lower_priority().unwrap();
    let used = first.usage().unwrap();
    assert!(
        !used.cpu_time.unwrap().is_zero() && used.peak_memory_bytes.unwrap() > 20_000_000,
        "{used:?}"
    );
    assert_eq!(read_number(cpu.join("cpu.shares")), 128, "the control: the weight was changed");
    let reader = first.reader();
    first.remove().unwrap();

    let limits = Limits { memory_bytes: Some(32 << 20), pids: Some(5), cpu_millicores: Some(700) };
    let mut second = Group::create(&hierarchy, "second", limits).unwrap();
    assert_eq!(dir_with(&second, "cpu.shares"), cpu, "the control: it is used again");
    let used = second.usage().unwrap();
    assert!(
        used.cpu_time.unwrap().is_zero() && used.peak_memory_bytes.unwrap() < 1 << 20,
        "{used:?}"
    );
    assert_eq!((used.oom_kills, used.pids_refused, used.peak_pids.unwrap_or_default()), (0, 0, 0));
    assert_eq!(read_number(cpu.join("cpu.shares")), 1024);
    assert_eq!(read_number(cpu.join("cpu.cfs_quota_us")), 70_000);
    assert_eq!(read_number(cpu.join("cpu.cfs_period_us")), 100_000);
    assert_eq!(read_number(dir_with(&second, "pids.max").join("pids.max")), 5);
    assert!(reader.read().is_err(), "who watched the first must not see the second");
    second.remove().unwrap();
    assert!(cpu.exists(), "the control: it waits for the next");
    drop(hierarchy);
    assert!(!cpu.exists());
}

/// A process that moved between groups, or a child group, which a command without isolation can
/// make.
#[test]
fn cgroup_that_is_not_empty_is_not_reused() {
    if !has_cgroup_v1() {
        return;
    }
    let hierarchy = hierarchy();
    let mut first = Group::create(&hierarchy, "first", LIMITS).unwrap();
    let cpu = dir_with(&first, "cpu.shares");
    let mut moved =
        script_in(&cpu, "echo in; exec sleep 1000").stdout(Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(moved.stdout.as_mut().unwrap(), &mut [0; 3]).unwrap();
    assert!(first.remove().is_err());
    let mut second = Group::create(&hierarchy, "second", LIMITS).unwrap();
    assert_ne!(dir_with(&second, "cpu.shares"), cpu);
    moved.kill().unwrap();
    moved.wait().unwrap();
    first.remove().unwrap();
    assert!(!cpu.exists());

    let (cpu, child) =
        (dir_with(&second, "cpu.shares"), dir_with(&second, "cpu.shares").join("child"));
    fs::create_dir(&child).unwrap();
    assert!(second.remove().is_err());
    fs::remove_dir(child).unwrap();
    second.remove().unwrap();
    assert!(!cpu.exists());
}

/// A rate that needs its own period must not leave it to the next group.
#[test]
fn cgroup_with_own_period_is_not_reused() {
    if !has_cgroup_v1() {
        return;
    }
    let hierarchy = hierarchy();
    let limits = Limits { cpu_millicores: Some(5), ..LIMITS };
    let mut slow = Group::create(&hierarchy, "slow", limits).unwrap();
    let cpu = dir_with(&slow, "cpu.shares");
    assert_eq!(read_number(cpu.join("cpu.cfs_period_us")), 1_000_000);
    slow.remove().unwrap();
    assert!(!cpu.exists());
}

/// A process removes the groups of a dead owner and keeps those of live ones.
#[test]
fn only_cgroups_of_dead_owners_are_removed() {
    let hierarchy = hierarchy();
    let Ok(mut mine) = Group::create(&hierarchy, "mine", LIMITS) else {
        return skip("cgroup", "control groups cannot be created here");
    };
    let parents: Vec<_> = mine.directories().map(|dir| dir.parent().unwrap().to_owned()).collect();
    let orphans: Vec<_> =
        parents.iter().map(|dir| dir.with_file_name(orphaned_name(dir))).collect();
    for orphan in &orphans {
        fs::create_dir_all(orphan.join("one")).unwrap();
        fs::create_dir(orphan.join("another")).unwrap();
    }
    hierarchy.remove_orphans().unwrap();
    assert!(orphans.iter().all(|dir| !dir.exists()), "{orphans:?}");
    assert!(mine.directories().all(|dir| dir.exists()));
    mine.remove().unwrap();
}

/// Runs in a separate process, which has its own cgroup parent.
#[test]
fn cgroup_parent_of_process_is_removed_with_it() {
    let suite = std::env::current_exe().unwrap();
    let done = Command::new(suite).args(["--exact", CHILD_CASE, "--nocapture"]).output().unwrap();
    let output = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{output}");
    let Some(parent) = output.lines().find_map(|line| line.strip_prefix("own parent ")) else {
        return skip("cgroup", "control groups cannot be created here");
    };
    assert!(parent.contains("/codelia-") && parent.ends_with("-sandboxes"), "{parent}");
    assert!(!Path::new(parent).exists());
}

/// Returns the directory above a process's own cgroup parent.
fn shared_parent(group: &Path) -> &Path {
    group.parent().unwrap().parent().unwrap()
}

/// Returns the group name of a process that has ended.
fn orphaned_name(like: &Path) -> String {
    let mut ended = Command::new("true").spawn().unwrap();
    let pid = ended.id();
    ended.wait().unwrap();
    let name = like.file_name().unwrap().to_string_lossy();
    name.replacen(&format!("codelia-{}-", std::process::id()), &format!("codelia-{pid}-"), 1)
}
