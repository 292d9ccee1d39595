//! Programs that exceed their limits: each ends with its own outcome and does not affect a
//! neighbour.

use std::time::Duration;

use codelia_types::Outcome;

use crate::harness::{Fixture, Started, in_every_mode, in_mode, skip};

const MIB: u64 = 1024 * 1024;

async fn memory_is_limited(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 48 * MIB;
    let session = fixture.session();
    let finished = fixture.run(&session, &["tail", "/dev/zero"]).await;
    assert_eq!(finished.outcome, Outcome::Oom, "{finished:?}");
    // The kernel counts in batches of pages.
    assert!(finished.usage.peak_memory_bytes <= 49 * MIB, "{finished:?}");
    assert_eq!(
        fixture.sh(&session, "true").await.outcome,
        Outcome::Exited(0),
        "the session still works"
    );
}

async fn tmpfs_counts_as_memory(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 32 * MIB;
    fixture.limits.tmp_bytes = 128 * MIB;
    let finished = fixture
        .run(&fixture.session(), &["dd", "if=/dev/zero", "of=/tmp/x", "bs=1M", "count=100"])
        .await;
    assert_eq!(finished.outcome, Outcome::Oom, "{finished:?}");
}

/// Fills the buffers of sockets or pipes that nothing reads. Prints how many bytes they held.
const FILL_BUFFERS: &str = r"
import fcntl, os, signal, socket, sys
MOST, held, total = 100_000_000, [], 0
def tcp():
    server = socket.create_server(('127.0.0.1', 0))
    client = socket.create_connection(server.getsockname())
    return client.fileno(), client, server.accept()[0]
def unix():
    client, server = socket.socketpair()
    return client.fileno(), client, server
def pipe():
    read, write = os.pipe()
    try: fcntl.fcntl(write, 1031, 1 << 20)
    except OSError: pass
    return write,
def fill(end):
    global total
    os.set_blocking(end, False)
    try:
        while total < MOST: total += os.write(end, bytes(32768))
    except OSError: pass
def udp():
    global total
    for _ in range(400):
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
        server.bind(('127.0.0.1', 0))
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        held.append(server)
        for _ in range(16): client.sendto(bytes(32768), server.getsockname())
    # A datagram without room is dropped silently, so count those that arrived.
    for server in held:
        server.setblocking(False)
        try:
            while True: total += len(server.recv(65536))
        except OSError: pass
if sys.argv[1] == 'udp': udp()
else:
    for _ in range(1000):
        before = total
        held.append({'tcp': tcp, 'unix': unix, 'pipe': pipe}[sys.argv[1]]())
        fill(held[-1][0])
        if total == before or total >= MOST: break
if total > int(sys.argv[2]): signal.pause()
print(total)";

/// A command that holds more than its limit waits, so that only the limit can end it.
async fn socket_buffers_count_as_memory(mut fixture: Fixture) {
    if !std::path::Path::new("/usr/bin/python3").exists() {
        return skip("python", "python3 is not installed");
    }
    fixture.limits.open_files = 4096;
    let limit = 48 * MIB;
    for kind in ["tcp", "udp", "unix", "pipe"] {
        let mut held = Vec::new();
        for memory in [limit, 1024 * MIB] {
            fixture.limits.memory_bytes = memory;
            let session = fixture.session();
            let argv = ["/usr/bin/python3", "-c", FILL_BUFFERS, kind, &memory.to_string()];
            let finished = fixture.run(&session, &argv).await;
            assert!(
                finished.outcome == Outcome::Exited(0) || finished.outcome == Outcome::Oom,
                "{finished:?}"
            );
            held.push(finished.stdout.trim().parse::<u64>().unwrap_or_default());
        }
        println!("{kind}: {} bytes held under the limit, {} without", held[0], held[1]);
        assert!(held[0] <= limit, "{kind}: {held:?}");
        assert!(held[1] > limit, "the control, {kind}: {held:?}");
    }
}

async fn cpu_time_is_limited(mut fixture: Fixture) {
    fixture.limits.cpu_time = Duration::from_secs(1);
    let finished = fixture.sh(&fixture.session(), "while :; do :; done").await;
    assert_eq!(finished.outcome, Outcome::Limit("cpu_time".to_owned()), "{finished:?}");
    assert!(finished.usage.cpu_time >= Duration::from_millis(900), "{finished:?}");
}

async fn cpu_time_limit_covers_all_processes(mut fixture: Fixture) {
    fixture.limits.cpu_time = Duration::from_secs(1);
    let finished = fixture
        .sh(&fixture.session(), "for i in 1 2 3 4; do (while :; do :; done) & done; wait")
        .await;
    assert_eq!(finished.outcome, Outcome::Limit("cpu_time".to_owned()), "{finished:?}");
    assert!(finished.usage.cpu_time < Duration::from_secs(3), "{finished:?}");
}

/// The command measures its own share of elapsed time, which other load can only lower.
async fn cpu_rate_is_limited(mut fixture: Fixture) {
    fixture.limits.cpu_millicores = 250;
    let script = r#"perl -e 'sub passed { my $b = "\0" x 16; syscall(228, 1, $b); my ($s, $n) = unpack("qq", $b); $s + $n / 1e9 }
        sub used { my ($u, $s) = times; $u + $s }
        my ($p, $u) = (passed(), used()); 1 while used() - $u < 0.6; printf "%d", 1000 * (used() - $u) / (passed() - $p)'"#;
    let share: u64 = fixture.stdout_of(script).await.parse().unwrap();
    assert!((1..=300).contains(&share), "{share} thousandths of a CPU");
}

/// Usage covers all processes, including killed ones: peak memory together, CPU time summed.
async fn usage_is_reported(mut fixture: Fixture) {
    fixture.limits.memory_bytes = 256 * MIB;
    let script = r#"
        for i in 1 2; do perl -e '$| = 1; $x = "x" x (40 << 20); 1 while (times)[0] < 0.2; print "done\n"; sleep 1000' &
        done | { read a && read b && kill -9 $$; }"#;
    let usage = fixture.sh(&fixture.session(), script).await.usage;
    assert!((80 * MIB..256 * MIB).contains(&usage.peak_memory_bytes), "{usage:?}");
    assert!(usage.cpu_time >= Duration::from_millis(380), "{usage:?}");
    assert!(usage.wall_time >= Duration::from_millis(180), "{usage:?}");
}

async fn private_file_systems_have_size_limits(mut fixture: Fixture) {
    fixture.limits.tmp_bytes = 4 * MIB;
    let script = "for d in /tmp /var/tmp /run /dev/shm; do
        dd if=/dev/zero of=$d/x bs=1M count=8 2>&1 | grep -q 'No space' && stat -c %s $d/x; done";
    assert_eq!(fixture.stdout_of(script).await, format!("{}\n", 4 * MIB).repeat(4));
}

async fn file_size_is_limited(mut fixture: Fixture) {
    fixture.limits.file_bytes = MIB;
    let session = fixture.session();
    let finished =
        fixture.run(&session, &["dd", "if=/dev/zero", "of=big", "bs=64k", "count=64"]).await;
    assert_ne!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    assert_eq!(std::fs::metadata(session.dir.join("big")).unwrap().len(), MIB);
}

async fn open_files_are_limited(mut fixture: Fixture) {
    fixture.limits.open_files = 64;
    let script = r#"perl -e 'while (open(my $f, "<", "/dev/null")) { push @f, $f } print 0+$!, " ", @f < 64 ? "few" : "many"'"#;
    assert_eq!(fixture.stdout_of(script).await, "24 few");
}

/// Runs a fork bomb in one session and short runs in another.
async fn fork_bomb_does_not_stop_neighbour(mut fixture: Fixture) {
    fixture.limits.pids = 64;
    fixture.limits.cpu_millicores = 500;
    let (bomber, neighbour) = (fixture.session(), fixture.session());
    let script = r#"echo lit; perl -e 'while (1) { fork; fork; select(undef,undef,undef,0.001) }'"#;
    let mut bomb = fixture.start(&bomber, script).await;
    assert_eq!(bomb.line(), "lit");
    for _ in 0..5 {
        assert_eq!(fixture.sh(&neighbour, "echo fine").await.stdout, "fine\n");
    }
    let ended = tokio::time::timeout(Duration::ZERO, bomb.running.wait()).await;
    assert!(ended.is_err(), "the control: the bomb still runs, {ended:?}");
    stop(bomb).await;
}

/// Dying takes CPU time too, and a hundred processes share a fiftieth of a CPU.
async fn throttled_fork_bomb_can_be_killed(mut fixture: Fixture) {
    fixture.limits.pids = 100;
    fixture.limits.cpu_millicores = 20;
    // All start to spin together once all exist.
    let script = r#"perl -e '$| = 1; pipe(R, W);
        for (1..90) { if (!fork) { close W; sysread(R, $x, 1); 1 while 1 } } close W; print "lit\n"; 1 while 1'"#;
    let mut bomb = fixture.start(&fixture.session(), script).await;
    assert_eq!(bomb.line(), "lit");
    stop(bomb).await;
}

async fn stop(mut bomb: Started) {
    bomb.running.kill_tree().await;
    bomb.running.wait().await;
    let receipt = bomb.running.destroy().await;
    assert!(receipt.is_clean(), "{receipt:?}");
}

async fn pids_limit_is_reported_as_outcome(mut fixture: Fixture) {
    fixture.limits.pids = 10;
    let session = fixture.session();
    let many = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1000 & done; echo all";
    let finished = fixture.sh(&session, many).await;
    assert_eq!(finished.outcome, Outcome::Limit("pids".to_owned()), "{finished:?}");
    let few = "for i in 1 2 3 4 5; do sleep 1000 & done; echo all";
    assert_eq!(fixture.sh(&session, few).await.stdout, "all\n", "the control: five fit");
}

async fn threads_count_as_processes(mut fixture: Fixture) {
    fixture.limits.pids = 20;
    let script = "import threading,time
n=0
try:
    while n < 1000:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); n+=1
except RuntimeError: pass
print('few' if n < 20 else n, flush=True)
import os; os._exit(0)";
    if !std::path::Path::new("/usr/bin/python3").exists() {
        return skip("python", "python3 is not installed");
    }
    let finished = fixture.run(&fixture.session(), &["/usr/bin/python3", "-c", script]).await;
    assert_eq!(finished.stdout, "few\n", "{finished:?}");
}

in_every_mode!(
    memory_is_limited,
    tmpfs_counts_as_memory,
    socket_buffers_count_as_memory,
    cpu_time_is_limited,
    cpu_time_limit_covers_all_processes,
    cpu_rate_is_limited,
    usage_is_reported,
    private_file_systems_have_size_limits,
    file_size_is_limited,
    open_files_are_limited,
    fork_bomb_does_not_stop_neighbour,
    throttled_fork_bomb_can_be_killed,
    pids_limit_is_reported_as_outcome,
    threads_count_as_processes,
);

// Cases that also hold without isolation.
in_mode!(
    logical = Logical:
    memory_is_limited,
    socket_buffers_count_as_memory,
    cpu_time_limit_covers_all_processes,
    cpu_rate_is_limited,
    usage_is_reported,
    fork_bomb_does_not_stop_neighbour,
    throttled_fork_bomb_can_be_killed,
    pids_limit_is_reported_as_outcome,
    threads_count_as_processes,
);
