//! What a policy opens and denies, as the kernel enforces it; and what is refused before it starts.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf};

use codelia_backends::Error;
use codelia_policy::{Ids, Limit, Plan};
use codelia_types::{Mode, NetworkMode, Outcome};
use tempfile::TempDir;

use crate::harness::{Place, in_every_mode};

/// A directory of the host that everybody may read.
fn shared() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(dir.path().join("open"), "open\n").unwrap();
    fs::write(dir.path().join("secret"), "secret\n").unwrap();
    fs::create_dir(dir.path().join("closed")).unwrap();
    fs::write(dir.path().join("closed/inner"), "inner\n").unwrap();
    dir
}

async fn an_opened_path_can_be_read_and_not_written(mut place: Place) {
    let dir = shared();
    place.policy.filesystem.read_only_paths = Some(vec![dir.path().to_owned()]);
    let path = dir.path().display();
    let script = format!(
        "cat {path}/open {path}/closed/inner; echo x > {path}/new || echo x > {path}/open || echo held"
    );
    assert_eq!(place.says(&script).await, "open\ninner\nheld\n");
}

async fn a_writable_path_can_be_written(mut place: Place) {
    let (dir, session) = (shared(), place.session());
    session.give(dir.path());
    place.policy.filesystem.read_write_paths = Some(vec![dir.path().to_owned()]);
    let script = format!("echo new > {}/new", dir.path().display());
    let finished = place.sh(&session, &script).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    assert_eq!(fs::read_to_string(dir.path().join("new")).unwrap(), "new\n");
}

async fn a_denied_path_under_an_opened_one_cannot_be_read_or_reached(mut place: Place) {
    let dir = shared();
    let files = &mut place.policy.filesystem;
    files.read_only_paths = Some(vec![dir.path().to_owned()]);
    files.denied_paths = vec![dir.path().join("secret"), dir.path().join("closed")];
    let path = dir.path().display();
    let script = format!(
        "cat {path}/open; cat {path}/secret {path}/closed/inner && echo reached
         ls {path}/closed | grep . && echo reached; chmod 777 {path}/closed && echo reached
         echo x > {path}/closed/new && echo reached; umount {path}/closed && echo reached; echo held"
    );
    // To unmount is a system call that is told of, if it comes to that.
    let finished = place.sh(&place.session(), &script).await;
    assert_eq!(finished.stdout, "open\nheld\n", "{finished:?}");
}

async fn secrets_in_a_home_that_is_opened_are_hidden_even_if_they_are_named(mut place: Place) {
    let dir = shared();
    for name in [".ssh", ".config/gcloud", ".kube"] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("key"), "secret\n").unwrap();
    }
    fs::write(dir.path().join(".netrc"), "secret\n").unwrap();
    place.host.runtime.homes = vec![dir.path().to_owned()];
    let home = dir.path().display();
    let script = format!("cd {home}; cat open .ssh/key .config/gcloud/key .kube/key .netrc; true");
    place.policy.filesystem.read_only_paths = Some(vec![dir.path().to_owned()]);
    assert_eq!(place.says(&script).await, "open\n");
    place.policy.filesystem.read_only_paths = Some(vec![dir.path().to_owned(), dir.path().join(".kube")]);
    assert_eq!(place.says(&script).await, "open\n");
    // The control: with nobody's home known the same script reads them all.
    place.host.runtime.homes.clear();
    assert_eq!(place.says(&script).await, "open\nsecret\nsecret\nsecret\nsecret\n");
}

async fn a_denied_path_in_the_workspace_is_denied_before_it_exists(mut place: Place) {
    place.policy.filesystem.denied_paths = vec![PathBuf::from("/workspace/.secrets")];
    let said = place
        .says("mkdir -p .secrets/x && echo reached; echo x > .secrets/y && echo reached; echo held")
        .await;
    assert_eq!(said, "held\n");
}

async fn denied_programs_of_the_runtime_are_gone(mut place: Place) {
    place.policy.filesystem.denied_paths = vec![PathBuf::from("/bin/nice")];
    let said = place
        .says("nice true && echo reached; cat /usr/bin/nice > x && [ -s x ] && echo reached; echo held")
        .await;
    assert_eq!(said, "held\n");
}

/// Makes a good plan a bad one.
type Change = fn(&mut Plan);

async fn plans_that_cannot_be_kept_are_refused_by_field(place: Place) {
    let session = place.session();
    let plan = place.plan(&session);
    let changes: [(&str, Change); 7] = [
        ("mode", |plan| plan.mode = Mode::Logical),
        ("ids", |plan| plan.ids = None),
        ("ids", |plan| plan.ids = Some(Ids { uid: 0, gid: 0 })),
        ("hostname", |plan| plan.hostname = None),
        ("network", |plan| plan.network = NetworkMode::Host),
        ("security", |plan| plan.security = None),
        ("limits", |plan| plan.unenforced.push(Limit::Pids)),
    ];
    let mut wrong = Vec::new();
    for (field, change) in changes {
        let mut changed = plan.clone();
        change(&mut changed);
        match place.backend.prepare(&changed).await {
            Err(Error::Unenforceable { field: named }) if named == field => {}
            other => wrong.push(format!("{field}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

async fn what_a_blocked_call_tried_is_told(place: Place) {
    let finished = place
        .sh(&place.session(), r#"perl -e '($t,$d)=("tmpfs","/tmp"); syscall(165,$t,$d,$t,0,0)'; true"#)
        .await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    let names: Vec<_> = finished.violations.iter().map(|violation| violation.syscall.as_str()).collect();
    assert_eq!(names, ["mount"], "{finished:?}");
}

async fn too_many_blocked_calls_end_the_run(place: Place) {
    let script = r#"perl -e '($t,$d)=("tmpfs","/tmp"); syscall(165,$t,$d,$t,0,0) while 1'"#;
    let finished = place.sh(&place.session(), script).await;
    assert_eq!(finished.outcome, Outcome::Violation("SYSCALL_BLOCKED".to_owned()), "{finished:?}");
}

async fn processes_are_debugged_only_where_the_policy_says_so(mut place: Place) {
    let trace_me = r#"python3 -c 'import ctypes; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0))'"#;
    let refused = place.sh(&place.session(), trace_me).await;
    let tried: Vec<_> = refused.violations.iter().map(|violation| violation.syscall.as_str()).collect();
    assert_eq!((refused.stdout.as_str(), tried), ("-1\n", vec!["ptrace"]));
    place.policy.process.debug = Some(true);
    assert_eq!(place.says(trace_me).await, "0\n");
}

async fn processes_are_forbidden_by_the_kernel(mut place: Place) {
    place.policy.process.allow_fork = Some(false);
    let finished = place.sh(&place.session(), "echo alone; /bin/true; echo not reached").await;
    assert!(finished.stdout.starts_with("alone\n") && !finished.stdout.contains("reached"), "{finished:?}");
}

async fn other_programs_are_forbidden_by_the_kernel(mut place: Place) {
    place.policy.process.allow_exec = Some(false);
    let finished = place.sh(&place.session(), "echo first; /bin/echo second; exec /bin/echo third").await;
    assert_eq!(finished.stdout, "first\n", "{finished:?}");
}

async fn only_listed_programs_can_be_executed(mut place: Place) {
    place.policy.process.allowed_executables = Some(vec!["/usr/bin/sh".into(), "/usr/bin/echo".into()]);
    let script =
        "/bin/echo listed; /bin/ls /; cp /bin/ls ./ls; ./ls /; cp /bin/ls /tmp/ls; /tmp/ls /; echo end";
    let finished = place.sh(&place.session(), script).await;
    assert_eq!(finished.stdout, "listed\nend\n", "{finished:?}");
}

in_every_mode!(
    an_opened_path_can_be_read_and_not_written,
    a_writable_path_can_be_written,
    a_denied_path_under_an_opened_one_cannot_be_read_or_reached,
    secrets_in_a_home_that_is_opened_are_hidden_even_if_they_are_named,
    a_denied_path_in_the_workspace_is_denied_before_it_exists,
    denied_programs_of_the_runtime_are_gone,
    plans_that_cannot_be_kept_are_refused_by_field,
    what_a_blocked_call_tried_is_told,
    too_many_blocked_calls_end_the_run,
    processes_are_debugged_only_where_the_policy_says_so,
    processes_are_forbidden_by_the_kernel,
    other_programs_are_forbidden_by_the_kernel,
    only_listed_programs_can_be_executed,
);
