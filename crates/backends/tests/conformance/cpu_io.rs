//! CPU and I/O limits of a policy, and the usage that is reported for them.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
    time::Duration,
};

use codelia_backends::{CgroupParent, Error};
use codelia_policy::ResourcePolicy;
use codelia_sys::{cgroup::Device, process};
use codelia_types::Outcome;

use crate::harness::{
    Finished, Fixture, Kind, Session, group_parent, has_cpusets, in_every_mode, in_mode, skip,
};

const MIB: u64 = 1024 * 1024;
const CPUS: &str = "policy.resources.cpus";

/// Tries to use every CPU and prints those it has.
const WIDEN: &str = r#"perl -e '$all = "\xff" x 128; syscall(203, 0, 128, $all); system("nproc")'
    sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status"#;

async fn command_runs_only_on_its_cpus(mut fixture: Fixture) {
    let all = process::allowed_cpus().unwrap();
    let (Some(&last), true) = (all.last(), all.len() > 1) else {
        return skip("processors", "this host has only one CPU");
    };
    if !fixture.host.enforceable.cpus {
        // Only an unprivileged user without a delegated cpuset.
        assert_ne!(process::own_uid(), 0, "root can bind commands to CPUs");
        fixture.policy.resources.cpus = Some(vec![last]);
        assert_eq!(fixture.try_plan(&fixture.session()).unwrap_err().field, CPUS);
        return;
    }
    let free = fixture.stdout_of(WIDEN).await;
    assert_eq!(
        free.lines().next(),
        Some(all.len().to_string().as_str()),
        "the control: without the policy it gets all"
    );
    fixture.policy.resources.cpus = Some(vec![last]);
    // gVisor numbers CPUs itself and lists none.
    let listed = if fixture.kind == Kind::Runsc { String::new() } else { format!("{last}\n") };
    assert_eq!(fixture.stdout_of(WIDEN).await, format!("1\n{listed}"));
    for wrong in [vec![4000], vec![last, 4000]] {
        fixture.policy.resources.cpus = Some(wrong);
        let prepared = fixture.backend.prepare(&fixture.plan(&fixture.session())).await;
        assert!(
            matches!(&prepared, Err(Error::Unenforceable { field }) if *field == CPUS),
            "{prepared:?}"
        );
    }
}

/// Returns the CPU time one command gets while a newer one uses a second of the same CPU.
async fn cpu_time_next_to_newer(fixture: &Fixture, low_priority: bool) -> Duration {
    let (first, second) = (fixture.session(), fixture.session());
    // It waits until the other command runs, so that it never has the CPU to itself.
    let newer = fixture
        .start(&second, "read line; exec perl -e '1 while (times)[0] + (times)[1] < 1'")
        .await;
    let mut older = fixture.start(&first, "echo; exec perl -e '1 while 1'").await;
    older.line();
    if low_priority {
        older.running.lower_priority();
    }
    let newer = newer.finish_with("\n").await;
    assert_eq!(newer.outcome, Outcome::Exited(0), "{newer:?}");
    older.running.kill_tree().await;
    older.finish().await.usage.cpu_time
}

/// More than a command with low priority gets next to one that uses a second of the same CPU, and
/// less than its equal share.
const SHARE_LIMIT: Duration = Duration::from_millis(600);

async fn low_priority_command_yields_cpu_to_newer_ones(mut fixture: Fixture) {
    if !has_cpusets(&fixture) {
        return;
    }
    fixture.policy.resources.cpus = process::allowed_cpus().unwrap().pop().map(|last| vec![last]);
    let normal = cpu_time_next_to_newer(&fixture, false).await;
    assert!(normal > SHARE_LIMIT, "the control: {normal:?}");
    // What it uses before the newer one runs and after it ended counts too. On a busy host that can
    // be much, so the best of three attempts counts.
    let mut lowered = Vec::new();
    while lowered.iter().all(|time| *time >= SHARE_LIMIT) {
        assert!(lowered.len() < 3, "{lowered:?}");
        lowered.push(cpu_time_next_to_newer(&fixture, true).await);
    }
}

/// Uses a second of its CPU, between two lines, and then more until it is killed, at most half a
/// minute.
const USE_A_SECOND: &str = r#"$| = 1; print "begin\n"; sub busy { 1 while (times)[0] + (times)[1] < $_[0] } busy(1); print "end\n"; busy(30)"#;

/// Returns the CPU time a command gets while a host process uses a second of the same CPU. Both
/// want it before and after that time too, however late this process sees the lines.
async fn cpu_time_next_to_host_process(mut fixture: Fixture) -> Duration {
    let last = process::allowed_cpus().unwrap().pop().unwrap();
    fixture.policy.resources.cpus = Some(vec![last]);
    let mut command = fixture.start(&fixture.session(), "echo; exec perl -e '1 while 1'").await;
    command.line();
    let reader = command.running.usage_reader().unwrap();
    let mut host_process = Command::new("taskset")
        .args(["--cpu-list", &last.to_string(), "perl", "-e", USE_A_SECOND])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(host_process.stdout.take().unwrap()).lines();
    let used = ["begin", "end"].map(|expected| {
        assert_eq!(lines.next().unwrap().unwrap(), expected);
        reader.read().unwrap().cpu_time.unwrap()
    });
    host_process.kill().unwrap();
    host_process.wait().unwrap();
    command.running.kill_tree().await;
    command.finish().await;
    used[1] - used[0]
}

/// Not in the VM of `vm.rs`: cgroup v2 weighs siblings of the parent, and there are none.
#[tokio::test]
async fn cpu_idle_commands_get_only_leftover_cpu() {
    let idle_parent = CgroupParent { cpu_idle: true, ..group_parent() };
    let Some(fixture) = Fixture::with_groups(Kind::Bwrap, idle_parent).await else { return };
    if !has_cpusets(&fixture) {
        return;
    }
    let idle = cpu_time_next_to_host_process(fixture).await;
    let shared = cpu_time_next_to_host_process(Fixture::new(Kind::Bwrap).await.unwrap()).await;
    assert!(idle < Duration::from_millis(200), "{idle:?}");
    assert!(shared > Duration::from_millis(400), "the control: {shared:?}");
}

/// Reads an uncached file with direct I/O.
async fn timed_read(fixture: &Fixture, session: &Session) -> Finished {
    let finished = fixture.sh(session, "dd if=big of=/dev/null bs=256k iflag=direct").await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    finished
}

async fn read_rate_is_limited(mut fixture: Fixture) {
    const FIELD: &str = "policy.resources.max_read_bytes_per_second";
    let session = fixture.session();
    fixture.policy.resources.max_read_bytes_per_second = Some(4 * MIB);
    if !fixture.host.enforceable.reads {
        assert_eq!(fixture.try_plan(&session).unwrap_err().field, FIELD);
        return skip(
            "root",
            "an ordinary user without a delegated io controller cannot limit reads",
        );
    }
    if let Err(error) = Device::with_file(&session.dir) {
        let prepared = fixture.backend.prepare(&fixture.plan(&session)).await;
        assert!(
            matches!(&prepared, Err(Error::Unenforceable { field }) if *field == FIELD),
            "{prepared:?}"
        );
        return skip("disk", format!("sessions are not on a disk: {error}"));
    }
    let mut big = fs::File::create(session.write("big", "")).unwrap();
    big.write_all(&vec![7; 8 << 20]).unwrap();
    big.sync_all().unwrap();
    let limited = timed_read(&fixture, &session).await.usage;
    fixture.policy.resources.max_read_bytes_per_second = None;
    let free = timed_read(&fixture, &session).await.usage;
    // A small burst is allowed.
    assert!(limited.wall_time >= Duration::from_secs(1), "{limited:?}");
    assert!(free.wall_time < limited.wall_time, "the control: {free:?}");
    assert!(limited.read_bytes >= 8 * MIB && free.read_bytes >= 8 * MIB, "{limited:?} {free:?}");
}

/// Writes with and without the page cache, each to a new file, so that its blocks are charged here.
async fn timed_writes(fixture: &Fixture) -> [Duration; 2] {
    let mut took = [Duration::ZERO; 2];
    for (took, how) in took.iter_mut().zip(["conv=fsync", "oflag=direct"]) {
        let script = format!("dd if=/dev/zero of=big bs=64k count=128 {how}");
        let finished = fixture.sh(&fixture.session(), &script).await;
        assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
        *took = finished.usage.wall_time;
    }
    took
}

async fn write_rate_is_limited(mut fixture: Fixture) {
    const FIELD: &str = "policy.resources.max_write_bytes_per_second";
    fixture.policy.resources.max_write_bytes_per_second = Some(4 * MIB);
    if !fixture.host.enforceable.writes {
        assert_eq!(fixture.try_plan(&fixture.session()).unwrap_err().field, FIELD);
        return skip("cgroup2", "cgroup v1 cannot limit writes");
    }
    let limited = timed_writes(&fixture).await;
    fixture.policy.resources.max_write_bytes_per_second = None;
    fixture.policy.resources.max_writes_per_second = Some(64);
    let [_, few] = timed_writes(&fixture).await;
    fixture.policy.resources.max_writes_per_second = None;
    let free = timed_writes(&fixture).await;
    // A small burst is allowed.
    for limited in [limited[0], limited[1], few] {
        assert!(limited >= Duration::from_secs(1), "limited {limited:?}, unlimited {free:?}");
    }
    assert!(free[0] < limited[0] && free[1] < limited[1].min(few), "the control: {free:?}");
}

async fn usage_counts_writes_and_processes(fixture: Fixture) {
    let session = fixture.session();
    let script = "dd if=/dev/zero of=file bs=1M count=6 conv=fsync
        for i in 1 2 3 4; do (read line; true) & done < /dev/null; wait";
    let more = fixture.sh(&session, script).await.usage;
    let less = fixture.sh(&session, ":").await.usage;
    if Device::with_file(&session.dir).is_ok() {
        assert!((6 * MIB..12 * MIB).contains(&more.written_bytes), "{more:?}");
        assert!(less.written_bytes < MIB, "the control: {less:?}");
    }
    if fixture.kind.is_container() {
        assert_eq!(more.peak_processes, 0, "an engine's threads would count");
    } else if counts_processes() {
        assert!((2..=6).contains(&more.peak_processes), "{more:?}");
        assert_eq!(less.peak_processes, 1, "the control: {less:?}");
    }
}

/// Kernels before 6.11 do not record a peak.
fn counts_processes() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut parts = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (parts.next(), parts.next()) >= (Some(6), Some(11))
}

/// Sets a limit.
type Change = fn(&mut ResourcePolicy);

async fn containers_refuse_io_limits(mut fixture: Fixture) {
    assert!(fixture.try_plan(&fixture.session()).is_ok(), "the control: without limits");
    let limits: [(&str, Change); 4] = [
        ("max_read_bytes_per_second", |policy| policy.max_read_bytes_per_second = Some(MIB)),
        ("max_write_bytes_per_second", |policy| policy.max_write_bytes_per_second = Some(MIB)),
        ("max_reads_per_second", |policy| policy.max_reads_per_second = Some(9)),
        ("max_writes_per_second", |policy| policy.max_writes_per_second = Some(9)),
    ];
    for (field, change) in limits {
        fixture.policy.resources = ResourcePolicy::default();
        change(&mut fixture.policy.resources);
        let refused = fixture.try_plan(&fixture.session()).unwrap_err();
        assert_eq!(refused.field, format!("policy.resources.{field}"));
    }
}

in_every_mode!(command_runs_only_on_its_cpus, usage_counts_writes_and_processes);

// Container engines manage their own groups.
in_mode!(bwrap_io = Bwrap: read_rate_is_limited, write_rate_is_limited);
in_mode!(nsjail_io = Nsjail: read_rate_is_limited, write_rate_is_limited);
in_mode!(native_io = Native: read_rate_is_limited, write_rate_is_limited);
in_mode!(runc_io = Runc: containers_refuse_io_limits);
in_mode!(runsc_io = Runsc: containers_refuse_io_limits);
in_mode!(podman_io = Podman: containers_refuse_io_limits);
in_mode!(bwrap_alone = Bwrap: low_priority_command_yields_cpu_to_newer_ones);
in_mode!(nsjail_alone = Nsjail: low_priority_command_yields_cpu_to_newer_ones);
in_mode!(native_alone = Native: low_priority_command_yields_cpu_to_newer_ones);
