//! A crash of a command does not start the host's core dump handler, which runs as root.
//!
//! Needs a host of its own, because the handler is a setting of the whole machine: the VM.

use std::{fs, path::Path};

use codelia_types::Outcome;

use crate::{
    harness::{Fixture, Kind, in_mode},
    require::available,
};

/// The handler, which creates the file.
const HANDLER: &str = "/codelia/core-handler";
const HANDLED: &str = "/codelia/core-handled";

const SIGSEGV: i32 = 11;
const CRASH: &str = "kill -SEGV $$";
/// With a soft limit of 0 the kernel does start a handler.
const LOWER_AND_CRASH: &str = "ulimit -S -c 0; kill -SEGV $$";

async fn crash_does_not_start_the_handler(fixture: Fixture) {
    let missing = (!Path::new(HANDLER).exists())
        .then_some("this host's core dump handler must not be changed");
    if !available("core_pattern", missing) {
        return;
    }
    fs::write("/proc/sys/kernel/core_pattern", format!("|{HANDLER}")).unwrap();
    // Otherwise a crashed process may end before its handler has.
    fs::write("/proc/sys/kernel/core_pipe_limit", "8").unwrap();
    for script in [CRASH, LOWER_AND_CRASH] {
        assert!(!is_handled(&fixture, script).await, "{script}");
    }
    let open = Fixture::new(Kind::Logical).await.unwrap();
    assert!(!is_handled(&open, CRASH).await);
    assert!(is_handled(&open, LOWER_AND_CRASH).await, "the control");
}

/// Whether the handler ran. A crashed process ends only after its handler has ended.
async fn is_handled(fixture: &Fixture, script: &str) -> bool {
    let _ = fs::remove_file(HANDLED);
    let finished = fixture.sh(&fixture.session(), script).await;
    assert_eq!(finished.outcome, Outcome::Signaled(SIGSEGV), "{finished:?}");
    Path::new(HANDLED).exists()
}

in_mode!(bwrap = Bwrap: crash_does_not_start_the_handler);
in_mode!(nsjail = Nsjail: crash_does_not_start_the_handler);
in_mode!(native = Native: crash_does_not_start_the_handler);
