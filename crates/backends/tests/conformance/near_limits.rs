//! What a running command uses, and the limits that it gets near to.

use std::time::Duration;

use codelia_backends::CurrentUsage;
use codelia_types::{NearLimit, Outcome, Resource};
use tokio::sync::mpsc;

use crate::harness::{Finished, Fixture, Started, in_every_mode, in_mode};

const MIB: u64 = 1024 * 1024;

/// How long a report may take. Much longer than the interval between two looks.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Waits for the next report while the command runs.
async fn next(reports: &mut mpsc::Receiver<NearLimit>, command: &mut Started) -> NearLimit {
    tokio::select! {
        near = reports.recv() => near.unwrap(),
        ended = command.running.wait() => panic!("ended before the report: {ended:?}"),
        () = tokio::time::sleep(TIMEOUT) => panic!("no report"),
    }
}

/// Returns the report of a command that waits for the end of its input, and how it ended.
async fn report_of(fixture: &Fixture, script: &str) -> (NearLimit, Finished) {
    let mut command = fixture.start(&fixture.session(), script).await;
    let mut reports = command.running.near_limits().unwrap();
    let near = next(&mut reports, &mut command).await;
    let finished = command.finish().await;
    assert!(reports.recv().await.is_none(), "a limit is reported once");
    (near, finished)
}

/// Holds this much memory, in a buffer that nothing reads, until its input ends.
fn hold(mib: u64) -> String {
    format!(
        "exec 3<&0; dd if=/dev/zero bs={mib}M count=1 2>/dev/null | {{ read x <&3; cat >/dev/null; }}"
    )
}

pub(crate) async fn memory_near_limit_is_reported(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 200 * MIB;
    let (near, finished) = report_of(&fixture, &hold(170)).await;
    assert_eq!((near.resource, near.limit), (Resource::MemoryBytes, 200 * MIB));
    assert!((160 * MIB..=200 * MIB).contains(&near.used), "{near:?}");
    assert_eq!(finished.outcome, Outcome::Exited(0), "it may continue: {finished:?}");
}

/// Half of the limit, for several looks.
async fn memory_below_the_limit_is_not_near(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 200 * MIB;
    let mut command = fixture.start(&fixture.session(), &hold(100)).await;
    usage_with(&mut command, |usage| usage.memory_bytes.is_some_and(|bytes| bytes >= 100 * MIB))
        .await;
    let ended = tokio::time::timeout(Duration::from_secs(1), command.running.wait()).await;
    assert!(ended.is_err(), "{ended:?}");
    assert_eq!(command.finish().await.near_limits, []);
}

/// Files fill the group's memory, but the kernel drops them when memory is short.
async fn cached_files_are_not_near_the_limit(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 100 * MIB;
    let script = "dd if=/dev/zero of=big bs=1M count=150 2>/dev/null && echo written; read x";
    let mut command = fixture.start(&fixture.session(), script).await;
    let reader = command.running.usage_reader().unwrap();
    assert_eq!(command.line(), "written");
    let usage = reader.read().unwrap();
    let (memory, cached) = (usage.memory_bytes.unwrap(), usage.page_cache_bytes.unwrap());
    assert!(memory > 80 * MIB && memory - cached < 50 * MIB, "the control: {usage:?}");
    // Several looks.
    let ended = tokio::time::timeout(Duration::from_secs(1), command.running.wait()).await;
    assert!(ended.is_err(), "{ended:?}");
    let finished = command.finish().await;
    assert_eq!(finished.near_limits, []);
}

/// A command that reaches the limit between two looks is reported at its end.
async fn reached_limit_is_reported_at_the_end(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 48 * MIB;
    let finished = fixture.run(&fixture.session(), &["tail", "/dev/zero"]).await;
    assert_eq!(finished.outcome, Outcome::Oom, "{finished:?}");
    let resources: Vec<_> = finished.near_limits.iter().map(|near| near.resource).collect();
    assert_eq!(resources, [Resource::MemoryBytes]);
}

pub(crate) async fn processes_near_limit_are_reported(mut fixture: Fixture) {
    fixture.limits.pids = 10;
    let sleepers =
        |count| format!("for i in $(seq {count}); do sleep 1000 & done; echo all; read x");
    let (near, _) = report_of(&fixture, &sleepers(8)).await;
    assert_eq!((near.resource, near.limit), (Resource::Pids, 10));
    assert!((8..=10).contains(&near.used), "{near:?}");
}

async fn cpu_time_near_limit_is_reported(mut fixture: Fixture) {
    fixture.limits.cpu_time = Duration::from_secs(2);
    let finished = fixture.sh(&fixture.session(), "while :; do :; done").await;
    assert_eq!(finished.outcome, Outcome::Limit("cpu_time".to_owned()), "{finished:?}");
    let [near] = finished.near_limits[..] else { panic!("{finished:?}") };
    assert_eq!((near.resource, near.limit), (Resource::CpuTime, 2000));
    assert!(near.used >= 1600, "{near:?}");
}

/// Reads until a value has the expected size: without a group, values are those of the last check.
async fn usage_with(
    command: &mut Started,
    is_expected: impl Fn(&CurrentUsage) -> bool,
) -> CurrentUsage {
    let reader = command.running.usage_reader().unwrap();
    let read = async {
        loop {
            let usage = reader.read().unwrap();
            if is_expected(&usage) {
                return usage;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        usage = read => usage,
        ended = command.running.wait() => panic!("ended: {ended:?}"),
        () = tokio::time::sleep(TIMEOUT) => panic!("last reading: {:?}", reader.read()),
    }
}

pub(crate) async fn running_command_shows_its_usage(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 256 * MIB;
    let script = r#"sleep 1000 & perl -e '$| = 1; $x = "x" x (40 << 20); 1 while (times)[0] < 0.3; print "held\n"; <STDIN>'; kill $!"#;
    let mut command = fixture.start(&fixture.session(), script).await;
    assert_eq!(command.line(), "held");
    let usage = usage_with(&mut command, |usage| {
        usage.memory_bytes.is_some_and(|bytes| bytes >= 40 * MIB)
            && usage.cpu_time.is_some_and(|time| time >= Duration::from_millis(250))
    })
    .await;
    assert_eq!(usage.tasks, Some(3), "the shell, sleep and perl: {usage:?}");
    assert!(usage.memory_bytes.unwrap() < 256 * MIB, "{usage:?}");
    assert!(usage.peak_memory_bytes.is_none_or(|peak| peak >= 40 * MIB), "{usage:?}");
    // Only a control group lists them.
    if let Some(listed) = command.running.usage_reader().unwrap().processes(10).unwrap() {
        let [shell, below @ ..] = &listed[..] else { panic!("{listed:?}") };
        assert_eq!((below.len(), shell.parent_pid), (2, 0), "{listed:?}");
        assert!(below.iter().all(|process| process.parent_pid == shell.pid), "{listed:?}");
        let perl = below.iter().find(|process| process.name == "perl").unwrap();
        assert!(
            perl.memory_bytes >= 40 * MIB && perl.cpu_time >= Duration::from_millis(250),
            "{listed:?}"
        );
    }
    let finished = command.finish().await;
    assert_eq!(finished.near_limits, [], "the control: nothing is near its limit");
}

in_every_mode!(memory_near_limit_is_reported, running_command_shows_its_usage);

in_mode!(
    bwrap_alone = Bwrap:
    cached_files_are_not_near_the_limit,
    reached_limit_is_reported_at_the_end,
    processes_near_limit_are_reported,
    cpu_time_near_limit_is_reported,
);

in_mode!(native_alone = Native: reached_limit_is_reported_at_the_end, processes_near_limit_are_reported);

in_mode!(
    logical = Logical:
    memory_near_limit_is_reported,
    memory_below_the_limit_is_not_near,
    processes_near_limit_are_reported,
    running_command_shows_its_usage,
);
