//! Limits that the kernel enforces.

use std::path::{Path, PathBuf};

use codelia_backends::{Backend, Error};
use codelia_types::{Outcome, RunId};

use crate::harness::{Fixture, groups_of, has_groups};

const MIB: u64 = 1024 * 1024;

/// Finds the groups of a sandbox's processes in all hierarchies. Not all of them have its name.
fn groups_of_processes(sandbox: RunId) -> Vec<PathBuf> {
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
    let processes = read(groups_of(sandbox)[0].join("cgroup.procs"));
    let groups = read(Path::new("/proc").join(processes.lines().next().unwrap()).join("cgroup"));
    let paths = groups.lines().map(|line| line.splitn(3, ':').skip(1).collect::<Vec<_>>());
    paths
        .map(|line| Path::new("/sys/fs/cgroup").join(line[0]).join(line[1].trim_start_matches('/')))
        .collect()
}

/// Reads the first of these files that exists in the sandbox's groups.
fn read_limit(sandbox: RunId, names: &[&str]) -> String {
    let groups = groups_of_processes(sandbox);
    let mut paths = groups.iter().flat_map(|dir| names.iter().map(move |name| dir.join(name)));
    let path =
        paths.find(|path| path.exists()).unwrap_or_else(|| panic!("no {names:?} in {groups:?}"));
    std::fs::read_to_string(path).unwrap().trim().to_owned()
}

#[tokio::test]
async fn command_over_memory_limit_is_oom() {
    let mut fixture = Fixture::new().await;
    if !has_groups(&fixture) {
        return;
    }
    fixture.limits.memory_bytes = 32 * MIB;
    // `tail` keeps an endless line in memory.
    let finished = fixture.run(&["tail", "/dev/zero"]).await;
    assert_eq!(finished.outcome, Outcome::Oom);
    let peak = finished.usage.peak_memory_bytes;
    assert!((16 * MIB..=32 * MIB).contains(&peak), "{peak}");
    assert_eq!(fixture.run(&["sh", "-c", "tail /dev/zero; exit $?"]).await.outcome, Outcome::Oom);
    let survivor = fixture.run(&["sh", "-c", "tail /dev/zero; exit 4"]).await;
    assert_eq!(survivor.outcome, Outcome::Exited(4));
}

#[tokio::test]
async fn pids_limit_stops_new_processes() {
    let mut fixture = Fixture::new().await;
    if !has_groups(&fixture) {
        return;
    }
    let nine_children = ["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 & done; echo all"];
    fixture.limits.pids = 10;
    assert_eq!(fixture.run(&nine_children).await.text(), "all\n");
    fixture.limits.pids = 9;
    let finished = fixture.run(&nine_children).await;
    assert_eq!(finished.text(), "");
    assert_ne!(finished.outcome, Outcome::Exited(0));
}

#[tokio::test]
async fn cgroups_hold_plan_limits() {
    let mut fixture = Fixture::new().await;
    if !has_groups(&fixture) {
        return;
    }
    fixture.limits.cpu_millicores = 1500;
    fixture.limits.memory_bytes = 64 * MIB;
    fixture.limits.pids = 20;
    let started = fixture.start(&["cat"]).await;
    let cpu = read_limit(started.sandbox, &["cpu.cfs_quota_us", "cpu.max"]);
    assert!(cpu == "150000" || cpu == "150000 100000", "{cpu}");
    let memory = read_limit(started.sandbox, &["memory.limit_in_bytes", "memory.max"]);
    assert_eq!(memory, (64 * MIB).to_string());
    assert_eq!(read_limit(started.sandbox, &["pids.max"]), "21", "codelia-init counts too");
    assert_eq!(started.finish(Vec::new()).await.outcome, Outcome::Exited(0));
}

#[tokio::test]
async fn open_files_and_core_dumps_are_limited() {
    let mut fixture = Fixture::new().await;
    fixture.limits.open_files = 77;
    let text = fixture.run(&["sh", "-c", "ulimit -Sn; ulimit -Hn; ulimit -Hc"]).await.text();
    assert_eq!(text, "77\n77\n0\n");
    fixture.limits.open_files = u64::MAX;
    assert_eq!(
        fixture.run(&["true"]).await.outcome,
        Outcome::Exited(0),
        "the host's lower limit applies"
    );
}

#[tokio::test]
async fn plan_of_another_mode_is_refused_by_field() {
    let fixture = Fixture::new().await;
    let mut plan = fixture.plan();
    plan.hostname = Some("inside".into());
    let error = fixture.backend.prepare(&plan).await.unwrap_err();
    assert!(matches!(error, Error::Unenforceable { field: "hostname" }), "{error}");
}

#[tokio::test]
async fn probe_reports_host_capabilities() {
    let fixture = Fixture::new().await;
    assert!(fixture.host.usable, "{:?}", fixture.host.gaps);
    assert!(!fixture.host.enforceable.network);
}
