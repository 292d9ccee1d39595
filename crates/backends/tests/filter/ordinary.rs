//! What ordinary programs do passes the filter, and nobody is told of it.

use codelia_types::Outcome;

use crate::{
    attempt::{attempt, session},
    harness::{Place, in_every_mode},
};

async fn threads_processes_memory_files_and_locks_work(place: Place) {
    let Some(session) = session(&place) else { return };
    let finished = attempt(&place, &session, &["ordinary"]).await;
    assert_eq!((finished.outcome, finished.stdout.as_str()), (Outcome::Exited(0), "0\n"));
    assert_eq!(finished.violations, []);
}

async fn files_are_renamed_and_linked_across_directories_whatever_may_be_executed(mut place: Place) {
    let programs = ["sh", "mkdir", "mv", "ln", "cat"].map(|name| format!("/usr/bin/{name}").into());
    place.policy.process.allowed_executables = Some(programs.to_vec());
    let said =
        place.says("mkdir a b; echo text > a/f; mv a/f b/g; ln b/g a/h; cat a/h; mv -T a c; cat c/h").await;
    assert_eq!(said, "text\ntext\n");
}

in_every_mode!(
    threads_processes_memory_files_and_locks_work,
    files_are_renamed_and_linked_across_directories_whatever_may_be_executed,
);
