//! Policies that forbid processes, programs, or all programs except some.

use codelia_backends::Error;
use codelia_types::{Outcome, Reason};

use crate::{
    harness::{Fixture, command, in_every_mode},
    syscall_probe::{EACCES, EPERM, probe, session},
};

/// The path of the C program inside.
const PROBE: &str = "/workspace/syscall_probe";

async fn threads_start_without_allow_fork(mut fixture: Fixture) {
    fixture.policy.process.allow_fork = Some(false);
    let Some(session) = session(&fixture) else { return };
    let finished = probe(&fixture, &session, &["thread"]).await;
    assert_eq!((finished.stdout.as_str(), finished.violations), ("0\n", Vec::new()));
    let finished = probe(&fixture, &session, &["ordinary"]).await;
    assert_eq!(finished.stdout, format!("{EPERM}\n"));
    assert_eq!(finished.violations[0].syscall, "clone");
}

async fn command_itself_starts_without_allow_exec(mut fixture: Fixture) {
    fixture.policy.process.allow_exec = Some(false);
    let Some(session) = session(&fixture) else { return };
    let finished = probe(&fixture, &session, &["execute", "/usr/bin/true"]).await;
    assert_eq!(finished.stdout, format!("{EPERM}\n"));
    assert_eq!(finished.violations[0].syscall, "execve");
    // A lookup in PATH takes several execve calls.
    let found = fixture.run(&session, &["printf", "found"]).await;
    assert_eq!((found.outcome, found.stdout.as_str()), (Outcome::Exited(0), "found"));
}

async fn only_allowed_executables_start(mut fixture: Fixture) {
    fixture.policy.process.allowed_executables = Some(vec![PROBE.into(), "/usr/bin/true".into()]);
    let Some(session) = session(&fixture) else { return };
    let named = probe(&fixture, &session, &["execute", "/usr/bin/true"]).await;
    assert_eq!(
        (named.outcome, named.stdout.as_str()),
        (Outcome::Exited(0), ""),
        "a dynamic program may use its loader"
    );
    let other = probe(&fixture, &session, &["execute", "/usr/bin/false"]).await;
    assert_eq!(other.stdout, format!("{EACCES}\n"));
    let memfd = probe(&fixture, &session, &["memfd", "/usr/bin/false"]).await;
    assert_eq!(memfd.stdout, format!("{EPERM}\n"));
    assert_eq!(memfd.violations[0].syscall, "memfd_create");
    let launched = fixture.launch(&session, &command(&["/usr/bin/false"])).await;
    match launched {
        Err(Error::Refused(refusal)) => assert_eq!(refusal.reason, Reason::ExecutableNotPermitted),
        other => panic!("{:?}", other.map(|_| "launched")),
    }
}

async fn memfd_program_runs_where_all_are_allowed(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let finished = probe(&fixture, &session, &["memfd", "/usr/bin/false"]).await;
    assert_eq!((finished.outcome, finished.stdout.as_str()), (Outcome::Exited(1), ""), "the control");
}

async fn policy_that_blocks_launch_calls_is_refused(mut fixture: Fixture) {
    fixture.policy.syscalls.mode = Some(codelia_policy::SyscallMode::Deny);
    fixture.policy.syscalls.names = vec!["recvmsg".into()];
    let session = fixture.session();
    let refused = fixture.launch(&session, &command(&["true"])).await;
    assert!(matches!(refused, Err(Error::Unenforceable { field: "policy.syscalls" })));
}

in_every_mode!(
    threads_start_without_allow_fork,
    command_itself_starts_without_allow_exec,
    only_allowed_executables_start,
    memfd_program_runs_where_all_are_allowed,
    policy_that_blocks_launch_calls_is_refused,
);
