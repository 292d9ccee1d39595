//! What a policy leaves a command of processors and devices, and what is told of its use of them.

use std::{fs, io::Write, process::Command, time::Duration};

use codelia_backends::{Error, Parent};
use codelia_sys::{cgroup::Device, process};
use codelia_types::Outcome;

use crate::harness::{Finished, Kind, Place, Session, group_parent, in_every_mode, in_mode, skip};

const MIB: u64 = 1024 * 1024;
const CPUS: &str = "policy.resources.cpus";

/// Tries to have every processor, and tells which it has.
const WIDEN: &str = r#"perl -e '$all = "\xff" x 128; syscall(203, 0, 128, $all); system("nproc")'
    sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status"#;

async fn a_command_runs_on_its_processors_alone(mut place: Place) {
    let all = process::processors().unwrap();
    let (Some(&last), true) = (all.last(), all.len() > 1) else {
        return skip("processors", "there is one processor alone");
    };
    if !place.host.enforceable.cpus {
        // Only an ordinary user, who was not given the group for it.
        assert_ne!(process::own_user(), 0, "this host chooses processors");
        place.policy.resources.cpus = Some(vec![last]);
        assert_eq!(place.try_plan(&place.session()).unwrap_err().field, CPUS);
        return;
    }
    let free = place.says(WIDEN).await;
    assert_eq!(free.lines().next(), Some(all.len().to_string().as_str()), "the control: it may have all");
    place.policy.resources.cpus = Some(vec![last]);
    // gVisor numbers processors by itself and lists none.
    let listed = if place.kind == Kind::Runsc { String::new() } else { format!("{last}\n") };
    assert_eq!(place.says(WIDEN).await, format!("1\n{listed}"));
    for wrong in [vec![4000], vec![last, 4000]] {
        place.policy.resources.cpus = Some(wrong);
        let prepared = place.backend.prepare(&place.plan(&place.session())).await;
        assert!(matches!(&prepared, Err(Error::Unenforceable { field }) if *field == CPUS), "{prepared:?}");
    }
}

/// The processor time that one command got on a processor while another one used a second of it.
async fn got_beside_another(place: &Place, steps_back: bool) -> Duration {
    let (first, second) = (place.session(), place.session());
    // It waits until the other one is there, which then never has the processor to itself.
    let young = place.start(&second, "read line; exec perl -e '1 while (times)[0] + (times)[1] < 1'").await;
    let mut old = place.start(&first, "echo; exec perl -e '1 while 1'").await;
    old.line();
    if steps_back {
        old.running.step_back();
    }
    let young = young.finish_with("\n").await;
    assert_eq!(young.outcome, Outcome::Exited(0), "{young:?}");
    old.running.kill_tree().await;
    old.finish().await.usage.cpu_time
}

async fn a_command_that_steps_back_leaves_processors_to_younger_ones(mut place: Place) {
    if !place.host.enforceable.cpus {
        return skip("processors", "this host does not choose processors");
    }
    place.policy.resources.cpus = process::processors().unwrap().pop().map(|last| vec![last]);
    let (stepped, stayed) = (got_beside_another(&place, true).await, got_beside_another(&place, false).await);
    assert!(stepped < Duration::from_millis(600), "{stepped:?}");
    assert!(stayed > Duration::from_millis(600), "the control: {stayed:?}");
}

/// The processor time that a command got on a processor while a process outside used a second of it.
async fn got_beside_a_stranger(mut place: Place) -> Duration {
    let last = process::processors().unwrap().pop().unwrap();
    place.policy.resources.cpus = Some(vec![last]);
    let mut command = place.start(&place.session(), "echo; exec perl -e '1 while 1'").await;
    command.line();
    let mut stranger = Command::new("taskset");
    stranger.args(["--cpu-list", &last.to_string(), "perl", "-e", "1 while (times)[0] + (times)[1] < 1"]);
    assert!(tokio::task::spawn_blocking(move || stranger.status()).await.unwrap().unwrap().success());
    command.running.kill_tree().await;
    command.finish().await.usage.cpu_time
}

/// Version 2 asks who is beside the parent, and nobody is in the machine of `machine.rs`.
#[tokio::test]
async fn commands_that_yield_get_what_everybody_else_leaves() {
    let yielding = Parent { yields: true, ..group_parent() };
    let Some(place) = Place::with_groups(Kind::Bwrap, yielding).await else { return };
    if !place.host.enforceable.cpus {
        return skip("processors", "this host does not choose processors");
    }
    let yielded = got_beside_a_stranger(place).await;
    let shared = got_beside_a_stranger(Place::of(Kind::Bwrap).await.unwrap()).await;
    assert!(yielded < Duration::from_millis(200), "{yielded:?}");
    assert!(shared > Duration::from_millis(400), "the control: {shared:?}");
}

/// A file of which nothing is in memory, read past the kernel's cache.
async fn read_big(place: &Place, session: &Session) -> Finished {
    let finished = place.sh(session, "dd if=big of=/dev/null bs=256k iflag=direct").await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    finished
}

async fn reading_is_held_to_its_rate(mut place: Place) {
    const FIELD: &str = "policy.resources.max_read_bytes_per_second";
    let session = place.session();
    place.policy.resources.max_read_bytes_per_second = Some(4 * MIB);
    if !place.host.enforceable.reads {
        assert!(process::own_user() != 0 || place.kind.is_container(), "this host limits reads");
        assert_eq!(place.try_plan(&session).unwrap_err().field, FIELD);
        return;
    }
    if Device::of(&session.dir).is_err() {
        let prepared = place.backend.prepare(&place.plan(&session)).await;
        assert!(matches!(&prepared, Err(Error::Unenforceable { field }) if *field == FIELD), "{prepared:?}");
        return;
    }
    let mut big = fs::File::create(session.write("big", "")).unwrap();
    big.write_all(&vec![7; 8 << 20]).unwrap();
    big.sync_all().unwrap();
    let limited = read_big(&place, &session).await.usage;
    place.policy.resources.max_read_bytes_per_second = None;
    let free = read_big(&place, &session).await.usage;
    // It may have a little ahead.
    assert!(limited.wall_time >= Duration::from_secs(1), "{limited:?}");
    assert!(free.wall_time < limited.wall_time, "the control: {free:?}");
    assert!(limited.read_bytes >= 8 * MIB && free.read_bytes >= 8 * MIB, "{limited:?} {free:?}");
}

/// Writes through the kernel's cache and past it, each to a file that nobody wrote before: its disk would be on their account.
async fn write_big(place: &Place) -> [Duration; 2] {
    let mut took = [Duration::ZERO; 2];
    for (took, how) in took.iter_mut().zip(["conv=fsync", "oflag=direct"]) {
        let script = format!("dd if=/dev/zero of=big bs=64k count=128 {how}");
        let finished = place.sh(&place.session(), &script).await;
        assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
        *took = finished.usage.wall_time;
    }
    took
}

async fn writing_is_held_to_its_rate(mut place: Place) {
    const FIELD: &str = "policy.resources.max_write_bytes_per_second";
    place.policy.resources.max_write_bytes_per_second = Some(4 * MIB);
    if !place.host.enforceable.writes {
        assert_eq!(place.try_plan(&place.session()).unwrap_err().field, FIELD);
        return;
    }
    let limited = write_big(&place).await;
    place.policy.resources.max_write_bytes_per_second = None;
    place.policy.resources.max_writes_per_second = Some(64);
    let [_, few] = write_big(&place).await;
    place.policy.resources.max_writes_per_second = None;
    let free = write_big(&place).await;
    // It may have a little ahead.
    for limited in [limited[0], limited[1], few] {
        assert!(limited >= Duration::from_secs(1), "{limited:?} of {free:?}");
    }
    assert!(free[0] < limited[0] && free[1] < limited[1].min(few), "the control: {free:?}");
}

async fn what_was_written_and_started_is_told(place: Place) {
    let session = place.session();
    let script = "dd if=/dev/zero of=file bs=1M count=6 conv=fsync
        for i in 1 2 3 4; do (read line; true) & done < /dev/null; wait";
    let more = place.sh(&session, script).await.usage;
    let less = place.sh(&session, ":").await.usage;
    if Device::of(&session.dir).is_ok() {
        assert!((6 * MIB..12 * MIB).contains(&more.written_bytes), "{more:?}");
        assert!(less.written_bytes < MIB, "the control: {less:?}");
    }
    if place.kind.is_container() {
        assert_eq!(more.peak_processes, 0, "an engine's own threads would count");
    } else if counts_processes() {
        assert!((2..=6).contains(&more.peak_processes), "{more:?}");
        assert_eq!(less.peak_processes, 1, "the control: {less:?}");
    }
}

/// Kernels before 6.10 keep no peak.
fn counts_processes() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut parts = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (parts.next(), parts.next()) >= (Some(6), Some(11))
}

in_every_mode!(
    a_command_runs_on_its_processors_alone,
    reading_is_held_to_its_rate,
    writing_is_held_to_its_rate,
    what_was_written_and_started_is_told,
);

// An engine's groups are its own.
in_mode!(bwrap_alone = Bwrap: a_command_that_steps_back_leaves_processors_to_younger_ones);
in_mode!(nsjail_alone = Nsjail: a_command_that_steps_back_leaves_processors_to_younger_ones);
