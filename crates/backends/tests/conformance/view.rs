//! What a sandbox shows of the host's runtime and kernel: nothing that others see or change, and
//! nothing that tells about the host.

use std::process::Command;

use codelia_sys::process_id::ProcessId;
use codelia_types::Outcome;

use crate::harness::{Fixture, Kind, command, in_every_mode, is_root};

/// Locks a program, watches it and its directory in every way that needs no privilege, and counts
/// the events after the next line of input.
const WATCH: &str = r#"
    $| = 1; $SIG{IO} = sub { $signals++ };
    sysopen(D, "/usr/bin", 0) or die; fcntl(D, 1026, 0x8000003f);
    open(L, "<", "/usr/bin/expr") or die; flock(L, 2) or die;
    $i = syscall(294, 0x800); $i >= 0 or die; open(I, "<&=", $i) or die;
    for $path (@ARGV) { $p = $path; syscall(254, $i, $p, 0xfff) }
    print "ready\n"; <STDIN>;
    print "signals\n" if $signals; print "events\n" if sysread(I, $b, 65536); print "end\n""#;

const WATCHED: [&str; 4] = ["/usr/bin", "/usr/bin/expr", "/etc/ld.so.cache", "/.codelia-init"];

/// What one session and the host do while another session watches them. Returns what that one saw,
/// and the output of the first.
async fn observe(fixture: &Fixture) -> (String, String) {
    let argv = [["perl", "-e", WATCH].as_slice(), WATCHED.as_slice()].concat();
    let (watcher, other) = (fixture.session(), fixture.session());
    let mut watching = fixture.launch(&watcher, &command(&argv)).await.unwrap();
    assert_eq!(watching.line(), "ready");
    assert!(Command::new("/usr/bin/expr").args(["1", "+", "1"]).output().unwrap().status.success());
    let worked = fixture.sh(&other, "expr 1 + 1; flock -n /usr/bin/expr echo locked").await;
    (watching.finish_with("continue\n").await.stdout, worked.stdout)
}

async fn runtime_watches_and_locks_stay_inside(fixture: Fixture) {
    assert_eq!(observe(&fixture).await, ("end\n".to_owned(), "2\nlocked\n".to_owned()));
}

#[tokio::test]
async fn runtime_watches_and_locks_reach_others_without_isolation() {
    let Some(fixture) = Fixture::new(Kind::Logical).await else { return };
    let (seen, worked) = observe(&fixture).await;
    assert_eq!((seen.as_str(), worked.as_str()), ("signals\nevents\nend\n", "2\n"));
}

/// Prints the name of the first file that appears in the workspace.
const WATCH_WORKSPACE: &str = r#"
    $| = 1; $i = syscall(294, 0); $p = "/workspace"; syscall(254, $i, $p, 0x100) >= 0 or die;
    open(I, "<&=", $i) or die; print "ready\n"; sysread(I, $b, 4096); print unpack("x16 Z*", $b), "\n""#;

async fn watch_sees_files_of_other_runs(fixture: Fixture) {
    let session = fixture.session();
    let mut watching =
        fixture.launch(&session, &command(&["perl", "-e", WATCH_WORKSPACE])).await.unwrap();
    assert_eq!(watching.line(), "ready");
    assert_eq!(fixture.sh(&session, "echo x > created").await.outcome, Outcome::Exited(0));
    assert_eq!(watching.finish().await.stdout, "created\n");
}

/// What tells about the host: its start, hardware, drivers, keys, locks, load and memory.
const REVEALING: [&str; 42] = [
    "acpi",
    "asound",
    "bootconfig",
    "buddyinfo",
    "bus",
    "cmdline",
    "config.gz",
    "consoles",
    "crypto",
    "devices",
    "diskstats",
    "dma",
    "driver",
    "execdomains",
    "fb",
    "fs",
    "interrupts",
    "iomem",
    "ioports",
    "irq",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "latency_stats",
    "locks",
    "mdstat",
    "misc",
    "modules",
    "mtrr",
    "pagetypeinfo",
    "partitions",
    "pressure",
    "sched_debug",
    "scsi",
    "slabinfo",
    "softirqs",
    "timer_list",
    "sys/kernel/random/boot_id",
];

/// Prints the paths in which something can be read.
fn read_all_of_proc() -> String {
    format!(
        "cd /proc; for p in {}; do if [ -d $p ]; then ls -A $p | grep -q . && echo $p
         else head -c 1 $p | od -An | grep -q . && echo $p; fi; done 2> /dev/null; true",
        REVEALING.join(" ")
    )
}

async fn proc_tells_nothing_about_host(fixture: Fixture) {
    assert_eq!(fixture.stdout_of(&read_all_of_proc()).await, "");
    // What programs need is there.
    let needed = "cd /proc; for p in cpuinfo meminfo stat loadavg uptime version filesystems self/mountinfo \
                  self/cgroup self/status net/dev sys/kernel/osrelease; do head -c 1 $p | grep -q . || echo $p; done";
    assert_eq!(fixture.stdout_of(needed).await, "");
}

#[tokio::test]
async fn proc_tells_about_host_without_isolation() {
    let Some(fixture) = Fixture::new(Kind::Logical).await else { return };
    let shown = fixture.stdout_of(&read_all_of_proc()).await;
    for path in
        ["cmdline", "interrupts", "irq", "softirqs", "timer_list", "sys/kernel/random/boot_id"]
    {
        let is_for_root = path == "timer_list" && !is_root("only root can read the timers");
        assert!(is_for_root || shown.lines().any(|line| line == path), "{path}: {shown}");
    }
}

/// Opens every setting of the kernel for writing, without writing.
const OPEN_SETTINGS: &str = r#"perl -e 'for (split /\n/, `find /proc/sys -type f`) { -f && sysopen(F, $_, 1) and print "$_\n" }'"#;

async fn kernel_settings_cannot_be_written(fixture: Fixture) {
    assert_eq!(fixture.stdout_of(OPEN_SETTINGS).await, "");
}

#[tokio::test]
async fn kernel_settings_can_be_written_without_isolation() {
    let Some(fixture) = Fixture::new(Kind::Logical).await else { return };
    if is_root("only root can write settings") {
        let writable = fixture.stdout_of(OPEN_SETTINGS).await;
        assert!(writable.contains("/proc/sys/kernel/msgmax\n"), "{writable}");
    }
}

const NAMES: &str = "cat /proc/self/cgroup /proc/self/mountinfo /proc/1/cgroup";

async fn cgroups_and_mounts_do_not_name_worker(fixture: Fixture) {
    let worker = ProcessId::current().unwrap().to_string();
    let shown = fixture.stdout_of(NAMES).await;
    assert!(!shown.contains(&worker), "{worker}: {shown}");
}

#[tokio::test]
async fn cgroups_name_worker_without_isolation() {
    let Some(fixture) = Fixture::new(Kind::Logical).await else { return };
    let worker = ProcessId::current().unwrap().to_string();
    let shown = fixture.stdout_of(NAMES).await;
    assert!(shown.contains(&worker), "{worker}: {shown}");
}

in_every_mode!(
    runtime_watches_and_locks_stay_inside,
    watch_sees_files_of_other_runs,
    proc_tells_nothing_about_host,
    kernel_settings_cannot_be_written,
    cgroups_and_mounts_do_not_name_worker,
);
