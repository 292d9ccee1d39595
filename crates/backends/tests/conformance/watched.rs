//! Limits without control groups: with best effort they are watched, otherwise the mode is not
//! usable.

use std::time::Duration;

use codelia_backends::CgroupParent;
use codelia_policy::Limit;
use codelia_types::Outcome;

use crate::harness::{Fixture, Kind, backend};

const MIB: u64 = 1024 * 1024;

/// Set if the suite runs as a user that has no delegated group.
pub(crate) const UNDELEGATED: &str = "CODELIA_TEST_UNDELEGATED";

/// A parent below which no group can be created: one that does not exist, or, for a user without a
/// delegated group, its own.
fn no_groups() -> CgroupParent {
    let is_undelegated = std::env::var_os(UNDELEGATED).is_some();
    let name = (!is_undelegated).then(|| "codelia-absent/none".to_owned());
    CgroupParent { name, cpu_idle: false }
}

async fn memory_over_limit_ends_command(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 64 * MIB;
    let script =
        |mib: u64| format!("perl -e '$x = \"x\" x ({mib} << 20); print \"held\n\"; <STDIN>'");
    let session = fixture.session();
    let finished = fixture.start(&session, &script(200)).await.finish_open().await;
    assert_eq!(finished.outcome, Outcome::Oom, "{finished:?}");
    assert!(finished.usage.peak_memory_bytes > 64 * MIB, "{finished:?}");
    let control = fixture.sh(&session, &script(20)).await;
    assert_eq!(
        (control.outcome, control.stdout.as_str()),
        (Outcome::Exited(0), "held\n"),
        "the control"
    );
}

/// Five processes share the same pages, which count once.
async fn shared_memory_counts_once(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 64 * MIB;
    let script = r#"perl -e '$| = 1; $x = "x" x (20 << 20); pipe(R, W);
        for (1..4) { if (!fork) { close W; sysread(R, $y, 1); exit } }
        close R; 1 while (times)[0] < 0.5; close W; 1 while wait != -1; print "done"'"#;
    assert_eq!(fixture.stdout_of(script).await, "done");
}

async fn too_many_processes_end_command(mut fixture: Fixture) {
    fixture.limits.pids = 10;
    let session = fixture.session();
    let sleepers =
        |count| format!("for i in $(seq {count}); do sleep 1000 & done; echo all; read x");
    let finished = fixture.start(&session, &sleepers(20)).await.finish_open().await;
    assert_eq!(finished.outcome, Outcome::Limit("pids".to_owned()), "{finished:?}");
    let control = fixture.sh(&session, &sleepers(5)).await;
    assert_eq!(control.stdout, "all\n", "the control");
    assert!(!matches!(control.outcome, Outcome::Limit(_)), "{control:?}");
}

async fn fork_bomb_is_ended(mut fixture: Fixture) {
    fixture.limits.pids = 50;
    let finished = fixture.sh(&fixture.session(), "perl -e 'fork while 1'").await;
    assert_eq!(finished.outcome, Outcome::Limit("pids".to_owned()), "{finished:?}");
    // It cannot outrun the watcher.
    assert!((51..=70).contains(&finished.usage.peak_processes), "{finished:?}");
}

async fn cpu_time_of_all_processes_ends_command(mut fixture: Fixture) {
    fixture.limits.cpu_time = Duration::from_secs(1);
    let session = fixture.session();
    // Each process alone would reach the limit only after they have used 16 times as much together.
    let spin =
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do (while :; do :; done) & done; wait";
    let finished = fixture.sh(&session, spin).await;
    assert_eq!(finished.outcome, Outcome::Limit("cpu_time".to_owned()), "{finished:?}");
    assert!(finished.usage.cpu_time < Duration::from_secs(12), "{finished:?}");
    assert_eq!(
        fixture.sh(&session, "i=0; while [ $i -lt 1000 ]; do i=$((i+1)); done").await.outcome,
        Outcome::Exited(0)
    );
}

/// The command is isolated, and its plan names what is watched and what is not enforced.
async fn isolated_command_names_watched_limits(fixture: Fixture) {
    let session = fixture.session();
    let plan = fixture.plan(&session);
    assert_eq!(plan.watched, [Limit::MemoryBytes, Limit::Pids, Limit::CpuTime]);
    assert_eq!(plan.unenforced, [Limit::CpuMillicores]);
    let seen = fixture
        .stdout_of(
            "hostname; echo $(ls -d /proc/[0-9]* | wc -l); ls /root /home 2>&1 | grep -c cannot",
        )
        .await;
    assert!(seen.starts_with("codelia\n"), "{seen}");
    let processes: u32 = seen.lines().nth(1).unwrap().parse().unwrap();
    assert!(processes < 10, "{seen}");
}

async fn file_systems_and_files_have_exact_limits(mut fixture: Fixture) {
    (fixture.limits.tmp_bytes, fixture.limits.file_bytes) = (4 * MIB, MIB);
    let script = "dd if=/dev/zero of=big bs=64k count=64 2>/dev/null; stat -c %s big
        for i in 1 2 3 4 5 6; do dd if=/dev/zero of=/tmp/$i bs=1M count=1 2>/dev/null; done; du -sm /tmp | cut -f1";
    assert_eq!(fixture.stdout_of(script).await, format!("{MIB}\n4\n"));
}

async fn proxy_sockets_serve_commands(fixture: Fixture) {
    crate::network::sockets_serve_commands(fixture).await;
}

async fn processes_near_limit_are_reported(fixture: Fixture) {
    crate::near_limits::processes_near_limit_are_reported(fixture).await;
}

async fn memory_near_limit_is_reported(fixture: Fixture) {
    crate::near_limits::memory_near_limit_is_reported(fixture).await;
}

async fn running_command_shows_its_usage(fixture: Fixture) {
    crate::near_limits::running_command_shows_its_usage(fixture).await;
}

/// Without best effort the mode is not usable, and says what to do.
async fn strict_mode_is_not_usable(kind: Kind) {
    let dir = tempfile::tempdir().unwrap();
    let found = backend(kind, no_groups(), dir.path(), false).probe().await;
    assert!(!found.usable, "{found:?}");
    let problem = found.problem();
    for text in ["limits.memory_bytes", "limits.pids", "delegated cgroup", "best_effort"] {
        assert!(problem.contains(text), "{problem}");
    }
}

macro_rules! watched_in {
    ($module:ident = $kind:ident: $($name:ident),+ $(,)?) => {
        mod $module {
            $(#[tokio::test]
            async fn $name() {
                let kind = $crate::harness::Kind::$kind;
                if let Some(fixture) = $crate::harness::Fixture::watching(kind, super::no_groups()).await {
                    super::$name(fixture).await;
                }
            })+

            #[tokio::test]
            async fn strict_mode_is_not_usable() {
                super::strict_mode_is_not_usable($crate::harness::Kind::$kind).await;
            }
        }
    };
}

macro_rules! watched_in_every_tool {
    ($($name:ident),+ $(,)?) => {
        watched_in!(bwrap = Bwrap: $($name),+);
        watched_in!(nsjail = Nsjail: $($name),+);
        watched_in!(native = Native: $($name),+);
    };
}

watched_in_every_tool!(
    processes_near_limit_are_reported,
    memory_near_limit_is_reported,
    running_command_shows_its_usage,
    memory_over_limit_ends_command,
    shared_memory_counts_once,
    too_many_processes_end_command,
    fork_bomb_is_ended,
    cpu_time_of_all_processes_ends_command,
    isolated_command_names_watched_limits,
    file_systems_and_files_have_exact_limits,
    proxy_sockets_serve_commands,
);
