//! Policies as the kernel enforces them, and plans that are refused before anything starts.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf};

use codelia_backends::Error;
use codelia_policy::{Ids, Limit, Plan, SyscallMode, SyscallRules};
use codelia_types::{Mode, NetworkMode, Outcome};
use tempfile::TempDir;

use crate::harness::{Fixture, in_every_mode};

/// Creates a host directory that everyone may read.
fn shared() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(dir.path().join("open"), "open\n").unwrap();
    fs::write(dir.path().join("secret"), "secret\n").unwrap();
    fs::create_dir(dir.path().join("closed")).unwrap();
    fs::write(dir.path().join("closed/inner"), "inner\n").unwrap();
    dir
}

async fn read_only_path_can_be_read_not_written(mut fixture: Fixture) {
    let dir = shared();
    fixture.policy.filesystem.read_only_paths = Some(vec![dir.path().to_owned()]);
    let path = dir.path().display();
    let script = format!(
        "cat {path}/open {path}/closed/inner; echo x > {path}/new || echo x > {path}/open || echo held"
    );
    assert_eq!(fixture.stdout_of(&script).await, "open\ninner\nheld\n");
}

async fn read_write_path_can_be_written(mut fixture: Fixture) {
    let (dir, session) = (shared(), fixture.session());
    session.chown(dir.path());
    fixture.policy.filesystem.read_write_paths = Some(vec![dir.path().to_owned()]);
    let script = format!("echo new > {}/new", dir.path().display());
    let finished = fixture.sh(&session, &script).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    assert_eq!(fs::read_to_string(dir.path().join("new")).unwrap(), "new\n");
}

async fn denied_path_below_open_path_is_unreachable(mut fixture: Fixture) {
    let dir = shared();
    let files = &mut fixture.policy.filesystem;
    files.read_only_paths = Some(vec![dir.path().to_owned()]);
    files.denied_paths = vec![dir.path().join("secret"), dir.path().join("closed")];
    let path = dir.path().display();
    let script = format!(
        "cat {path}/open; cat {path}/secret {path}/closed/inner && echo reached
         ls {path}/closed | grep . && echo reached; chmod 777 {path}/closed && echo reached
         echo x > {path}/closed/new && echo reached; umount {path}/closed && echo reached; echo held"
    );
    // umount2 may be reported as a violation, so `stdout_of` does not fit.
    let finished = fixture.sh(&fixture.session(), &script).await;
    assert_eq!(finished.stdout, "open\nheld\n", "{finished:?}");
}

async fn secrets_in_open_home_are_hidden(mut fixture: Fixture) {
    let dir = shared();
    for name in [".ssh", ".config/gcloud", ".kube"] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("key"), "secret\n").unwrap();
    }
    fs::write(dir.path().join(".netrc"), "secret\n").unwrap();
    fixture.host.runtime.homes = vec![dir.path().to_owned()];
    let home = dir.path().display();
    let script = format!("cd {home}; cat open .ssh/key .config/gcloud/key .kube/key .netrc; true");
    fixture.policy.filesystem.read_only_paths = Some(vec![dir.path().to_owned()]);
    assert_eq!(fixture.stdout_of(&script).await, "open\n");
    fixture.policy.filesystem.read_only_paths =
        Some(vec![dir.path().to_owned(), dir.path().join(".kube")]);
    assert_eq!(fixture.stdout_of(&script).await, "open\n");
    // The control: without known homes the same script reads the secrets.
    fixture.host.runtime.homes.clear();
    assert_eq!(fixture.stdout_of(&script).await, "open\nsecret\nsecret\nsecret\nsecret\n");
}

async fn denied_workspace_path_is_denied_before_it_exists(mut fixture: Fixture) {
    fixture.policy.filesystem.denied_paths = vec![PathBuf::from("/workspace/.secrets")];
    let stdout = fixture
        .stdout_of(
            "mkdir -p .secrets/x && echo reached; echo x > .secrets/y && echo reached; echo held",
        )
        .await;
    assert_eq!(stdout, "held\n");
}

async fn denied_runtime_programs_are_hidden(mut fixture: Fixture) {
    fixture.policy.filesystem.denied_paths = vec![PathBuf::from("/bin/nice")];
    let stdout = fixture
        .stdout_of("nice true && echo reached; cat /usr/bin/nice > x && [ -s x ] && echo reached; echo held")
        .await;
    assert_eq!(stdout, "held\n");
}

/// Makes a plan unenforceable.
type Change = fn(&mut Plan);

async fn unenforceable_plan_is_refused_by_field(fixture: Fixture) {
    let session = fixture.session();
    let plan = fixture.plan(&session);
    let changes: [(&str, Change); 7] = [
        ("mode", |plan| plan.mode = Mode::Logical),
        ("ids", |plan| plan.ids = None),
        ("ids", |plan| plan.ids = Some(Ids { uid: 0, gid: 0 })),
        ("hostname", |plan| plan.hostname = None),
        ("network", |plan| plan.network = NetworkMode::Proxy),
        ("security", |plan| plan.security = None),
        ("limits", |plan| plan.unenforced.push(Limit::Pids)),
    ];
    let mut wrong = Vec::new();
    for (field, change) in changes {
        let mut changed = plan.clone();
        change(&mut changed);
        match fixture.backend.prepare(&changed).await {
            Err(Error::Unenforceable { field: named }) if named == field => {}
            other => wrong.push(format!("{field}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

async fn blocked_call_is_reported(fixture: Fixture) {
    let finished = fixture
        .sh(
            &fixture.session(),
            r#"perl -e '($t,$d)=("tmpfs","/tmp"); syscall(165,$t,$d,$t,0,0)'; true"#,
        )
        .await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    let names: Vec<_> =
        finished.violations.iter().map(|violation| violation.syscall.as_str()).collect();
    assert_eq!(names, ["mount"], "{finished:?}");
}

async fn too_many_blocked_calls_kill_the_run(fixture: Fixture) {
    let script = r#"perl -e '($t,$d)=("tmpfs","/tmp"); syscall(165,$t,$d,$t,0,0) while 1'"#;
    let finished = fixture.sh(&fixture.session(), script).await;
    assert_eq!(finished.outcome, Outcome::Violation("SYSCALL_BLOCKED".to_owned()), "{finished:?}");
}

async fn syscall_lists_allow_or_deny(mut fixture: Fixture) {
    let script = r#"perl -e 'print socket(S, 1, 1, 0) ? "made" : "refused"'"#;
    assert_eq!(fixture.stdout_of(script).await, "made", "the control: the default list has it");
    let security = fixture.plan(&fixture.session()).security.unwrap();
    let SyscallRules::Allow(all) = security.syscalls else { panic!("expected an allow-list") };
    let others = all.iter().filter(|name| *name != "socket").cloned().collect();
    for (mode, names) in
        [(SyscallMode::Deny, vec!["socket".to_owned()]), (SyscallMode::Allow, others)]
    {
        (fixture.policy.syscalls.mode, fixture.policy.syscalls.names) = (Some(mode), names);
        let finished = fixture.sh(&fixture.session(), script).await;
        assert_eq!(
            (finished.stdout.as_str(), &finished.outcome),
            ("refused", &Outcome::Exited(0)),
            "{mode:?}"
        );
        let tried: Vec<_> =
            finished.violations.iter().map(|violation| violation.syscall.as_str()).collect();
        let expected: &[_] = if fixture.host.enforceable.violations { &["socket"] } else { &[] };
        assert_eq!(tried, expected, "{mode:?}");
    }
}

async fn ptrace_needs_debug_policy(mut fixture: Fixture) {
    let trace_me = r#"python3 -c 'import ctypes; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0))'"#;
    let refused = fixture.sh(&fixture.session(), trace_me).await;
    let tried: Vec<_> =
        refused.violations.iter().map(|violation| violation.syscall.as_str()).collect();
    assert_eq!((refused.stdout.as_str(), tried), ("-1\n", vec!["ptrace"]));
    fixture.policy.process.debug = Some(true);
    assert_eq!(fixture.stdout_of(trace_me).await, "0\n");
}

async fn allow_fork_false_is_enforced(mut fixture: Fixture) {
    fixture.policy.process.allow_fork = Some(false);
    let finished = fixture.sh(&fixture.session(), "echo alone; /bin/true; echo not reached").await;
    assert!(
        finished.stdout.starts_with("alone\n") && !finished.stdout.contains("reached"),
        "{finished:?}"
    );
}

async fn allow_exec_false_is_enforced(mut fixture: Fixture) {
    fixture.policy.process.allow_exec = Some(false);
    let finished =
        fixture.sh(&fixture.session(), "echo first; /bin/echo second; exec /bin/echo third").await;
    assert_eq!(finished.stdout, "first\n", "{finished:?}");
}

async fn only_allowed_executables_run(mut fixture: Fixture) {
    fixture.policy.process.allowed_executables =
        Some(vec!["/usr/bin/sh".into(), "/usr/bin/echo".into()]);
    let script = "/bin/echo listed; /bin/ls /; cp /bin/ls ./ls; ./ls /; cp /bin/ls /tmp/ls; /tmp/ls /; echo end";
    let finished = fixture.sh(&fixture.session(), script).await;
    assert_eq!(finished.stdout, "listed\nend\n", "{finished:?}");
    let mut paths: Vec<_> =
        finished.violations.iter().filter_map(|violation| violation.path.as_deref()).collect();
    paths.sort_unstable();
    // A shell tries all directories of PATH.
    paths.dedup();
    assert_eq!(paths, ["/usr/bin/cp", "/usr/bin/ls"], "files that do not exist are none");
}

/// Prints what it costs that programs are listed.
async fn cost_of_listed_programs_is_printed(mut fixture: Fixture) {
    const SCRIPT: &str = "i=0; while [ $i -lt 500 ]; do /bin/true; i=$((i+1)); done; echo end";
    let free = fixture.sh(&fixture.session(), SCRIPT).await;
    fixture.policy.process.allowed_executables =
        Some(vec!["/usr/bin/sh".into(), "/usr/bin/true".into()]);
    let listed = fixture.sh(&fixture.session(), SCRIPT).await;
    for (name, finished) in [("any program", free), ("listed programs", listed)] {
        assert_eq!((finished.stdout.as_str(), finished.violations.len()), ("end\n", 0), "{name}");
        println!("{name}: {:?} for each of 500 executions", finished.usage.wall_time / 500);
    }
}

in_every_mode!(
    read_only_path_can_be_read_not_written,
    read_write_path_can_be_written,
    denied_path_below_open_path_is_unreachable,
    secrets_in_open_home_are_hidden,
    denied_workspace_path_is_denied_before_it_exists,
    denied_runtime_programs_are_hidden,
    unenforceable_plan_is_refused_by_field,
    blocked_call_is_reported,
    too_many_blocked_calls_kill_the_run,
    syscall_lists_allow_or_deny,
    ptrace_needs_debug_policy,
    allow_fork_false_is_enforced,
    allow_exec_false_is_enforced,
    only_allowed_executables_run,
    cost_of_listed_programs_is_printed,
);
