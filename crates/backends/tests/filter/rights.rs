//! What a policy forbids to start: processes, programs, all programs but some.

use codelia_backends::Error;
use codelia_types::Outcome;

use crate::{
    attempt::{EACCES, EPERM, attempt, session},
    harness::{Place, command, in_every_mode},
};

/// Where the program is inside.
const ATTEMPT: &str = "/workspace/attempt";

async fn without_the_right_to_fork_threads_still_start(mut place: Place) {
    place.policy.process.allow_fork = Some(false);
    let Some(session) = session(&place) else { return };
    let finished = attempt(&place, &session, &["thread"]).await;
    assert_eq!((finished.stdout.as_str(), finished.violations), ("0\n", Vec::new()));
    let finished = attempt(&place, &session, &["ordinary"]).await;
    assert_eq!(finished.stdout, format!("{EPERM}\n"));
    assert_eq!(finished.violations[0].syscall, "clone");
}

async fn without_the_right_to_execute_the_command_itself_is_executed_and_nothing_else(mut place: Place) {
    place.policy.process.allow_exec = Some(false);
    let Some(session) = session(&place) else { return };
    let finished = attempt(&place, &session, &["execute", "/usr/bin/true"]).await;
    assert_eq!(finished.stdout, format!("{EPERM}\n"));
    assert_eq!(finished.violations[0].syscall, "execve");
    // One that is looked up takes several tries.
    let found = place.run(&session, &["printf", "found"]).await;
    assert_eq!((found.outcome, found.stdout.as_str()), (Outcome::Exited(0), "found"));
}

async fn only_named_programs_are_executed(mut place: Place) {
    place.policy.process.allowed_executables = Some(vec![ATTEMPT.into(), "/usr/bin/true".into()]);
    let Some(session) = session(&place) else { return };
    let named = attempt(&place, &session, &["execute", "/usr/bin/true"]).await;
    assert_eq!(
        (named.outcome, named.stdout.as_str()),
        (Outcome::Exited(0), ""),
        "a dynamic one has its loader"
    );
    let other = attempt(&place, &session, &["execute", "/usr/bin/false"]).await;
    assert_eq!(other.stdout, format!("{EACCES}\n"));
    let nameless = attempt(&place, &session, &["nameless", "/usr/bin/false"]).await;
    assert_eq!(nameless.stdout, format!("{EPERM}\n"));
    assert_eq!(nameless.violations[0].syscall, "memfd_create");
    let launched = place.launch(&session, &command(&["/usr/bin/false"])).await;
    match launched {
        Err(Error::Refused(refusal)) => assert_eq!(refusal.reason, "EXECUTABLE_NOT_PERMITTED"),
        other => panic!("{:?}", other.map(|_| "launched")),
    }
}

async fn a_nameless_program_is_executed_where_all_are_allowed(place: Place) {
    let Some(session) = session(&place) else { return };
    let finished = attempt(&place, &session, &["nameless", "/usr/bin/false"]).await;
    assert_eq!((finished.outcome, finished.stdout.as_str()), (Outcome::Exited(1), ""), "the control");
}

async fn a_policy_that_forbids_what_a_launch_needs_is_refused(mut place: Place) {
    place.policy.syscalls.mode = Some(codelia_policy::SyscallMode::Deny);
    place.policy.syscalls.names = vec!["recvmsg".into()];
    let session = place.session();
    let refused = place.launch(&session, &command(&["true"])).await;
    assert!(matches!(refused, Err(Error::Unenforceable { field: "policy.syscalls" })));
}

in_every_mode!(
    without_the_right_to_fork_threads_still_start,
    without_the_right_to_execute_the_command_itself_is_executed_and_nothing_else,
    only_named_programs_are_executed,
    a_nameless_program_is_executed_where_all_are_allowed,
    a_policy_that_forbids_what_a_launch_needs_is_refused,
);
