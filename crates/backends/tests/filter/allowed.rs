//! Ordinary programs pass the filter without violations.

use codelia_types::Outcome;

use crate::{
    harness::{Fixture, in_every_mode},
    syscall_probe::{probe, session},
};

async fn threads_forks_memfds_and_locks_work(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let finished = probe(&fixture, &session, &["ordinary"]).await;
    assert_eq!((finished.outcome, finished.stdout.as_str()), (Outcome::Exited(0), "0\n"));
    assert_eq!(finished.violations, []);
}

async fn rename_and_link_work_with_allowed_executables(mut fixture: Fixture) {
    let programs = ["sh", "mkdir", "mv", "ln", "cat"].map(|name| format!("/usr/bin/{name}").into());
    fixture.policy.process.allowed_executables = Some(programs.to_vec());
    let stdout = fixture
        .stdout_of("mkdir a b; echo text > a/f; mv a/f b/g; ln b/g a/h; cat a/h; mv -T a c; cat c/h")
        .await;
    assert_eq!(stdout, "text\ntext\n");
}

in_every_mode!(threads_forks_memfds_and_locks_work, rename_and_link_work_with_allowed_executables,);
