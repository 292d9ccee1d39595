//! Pools that the whole host shares: one sandbox cannot exhaust them for others.

use crate::harness::{Fixture, Kind, Started, in_every_mode, is_root};

/// Opens pseudo-terminals until the kernel refuses one, and prints how many.
const OPEN_TERMINALS: &str = "import os
opened = 0
try:
    while opened < 200:
        os.open('/dev/ptmx', os.O_RDWR)
        opened += 1
except OSError:
    pass
print(opened)";

async fn terminals_are_limited(fixture: Fixture) {
    if !is_root("only root can limit the terminals of a sandbox in every mode") {
        return;
    }
    let finished = fixture.run(&fixture.session(), &["python3", "-c", OPEN_TERMINALS]).await;
    assert_eq!(finished.stdout, "64\n", "{finished:?}");
    let open = Fixture::new(Kind::Logical).await.unwrap();
    let finished = open.run(&open.session(), &["python3", "-c", OPEN_TERMINALS]).await;
    assert_eq!(finished.stdout, "200\n", "the control");
}

/// Opens inotify instances until the kernel refuses one, prints how many, and holds them.
const OPEN_INOTIFY: &str = "import ctypes, sys
libc, opened = ctypes.CDLL(None), 0
while libc.inotify_init1(0) >= 0:
    opened += 1
print(opened, flush=True)
sys.stdin.read()";

async fn open_inotify(fixture: &Fixture, session: &crate::harness::Session) -> (Started, u32) {
    let command = crate::harness::command(&["python3", "-c", OPEN_INOTIFY]);
    let mut started = fixture.launch(session, &command).await.unwrap();
    let opened = started.line().parse().unwrap();
    (started, opened)
}

async fn inotify_instances_are_counted_by_session(fixture: Fixture) {
    if !is_root("only root gives each session its own user") {
        return;
    }
    let (session, other) = (fixture.session(), fixture.session());
    let (first, taken) = open_inotify(&fixture, &session).await;
    assert!(taken > 0);
    let (second, left) = open_inotify(&fixture, &session).await;
    assert_eq!(left, 0, "the control: sandboxes of one session share the pool");
    let (neighbour, free) = open_inotify(&fixture, &other).await;
    assert_eq!(free, taken);
    for started in [first, second, neighbour] {
        started.finish().await;
    }
}

in_every_mode!(terminals_are_limited, inotify_instances_are_counted_by_session);
