//! Policies that forbid processes, programs, or all programs except some.

use codelia_backends::Error;
use codelia_types::{Outcome, Reason, Violation};

use crate::{
    harness::{Fixture, command},
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
    assert_eq!(named.violations, []);
    let other = probe(&fixture, &session, &["execute", "/usr/bin/false"]).await;
    assert_eq!(other.stdout, format!("{EACCES}\n"));
    assert_eq!(other.violations.len(), 1, "{other:?}");
    let Violation { kind, syscall, path, .. } = &other.violations[0];
    let reported = (kind.as_str(), syscall.as_str(), path.as_deref());
    assert_eq!(reported, (Violation::EXEC_DENIED, "execve", Some("/usr/bin/false")));
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
    assert_eq!(
        (finished.outcome, finished.stdout.as_str()),
        (Outcome::Exited(1), ""),
        "the control"
    );
}

/// Prints the user's id through the loader, from the runtime and from copies in the workspace.
const BY_LOADER: &str = "loader=/lib64/ld-linux-x86-64.so.2
    $loader /usr/bin/id -u
    cat /usr/bin/id > copy; $loader ./copy -u
    cat $loader > my-loader; ./my-loader /usr/bin/id -u
    ln -s $loader link; ./link /usr/bin/id -u
    sh -c 'exec -a sh /lib64/ld-linux-x86-64.so.2 /usr/bin/id -u' 2>/dev/null || $loader --preload '' /usr/bin/id -u";

async fn loader_runs_no_other_program(mut fixture: Fixture) {
    let session = fixture.session();
    let uid = fixture.ids_inside(&session).uid.to_string();
    let control = fixture.sh(&session, BY_LOADER).await.stdout;
    assert!(control.lines().filter(|line| *line == uid).count() >= 4, "the control: {control}");
    let programs = ["sh", "cat", "ln"].map(|name| format!("/usr/bin/{name}").into());
    fixture.policy.process.allowed_executables = Some(programs.to_vec());
    let finished = fixture.sh(&fixture.session(), BY_LOADER).await;
    assert_eq!(finished.stdout, "", "{finished:?}");
    // The loader is executed, and copies of it are not.
    let (executed, mapped): (Vec<_>, Vec<_>) =
        finished.violations.iter().partition(|violation| violation.kind == Violation::EXEC_DENIED);
    assert!(mapped.len() >= 3 && !executed.is_empty(), "{finished:?}");
    assert!(mapped.iter().all(|violation| violation.syscall == "mmap"), "{finished:?}");
}

async fn libraries_of_the_command_are_not_mapped(mut fixture: Fixture) {
    const PRELOAD: &str =
        "cat $(ls /usr/lib/*-linux-gnu/libz.so.1 /lib/*-linux-gnu/libm.so.6 2>/dev/null | head -1) > own.so
        LD_PRELOAD=./own.so cat /proc/self/maps | grep -c 'r-xp.*own.so'";
    let control = fixture.sh(&fixture.session(), PRELOAD).await;
    assert_ne!(control.stdout, "0\n", "the control: {control:?}");
    let programs =
        ["sh", "cat", "grep", "ls", "head"].map(|name| format!("/usr/bin/{name}").into());
    fixture.policy.process.allowed_executables = Some(programs.to_vec());
    let finished = fixture.sh(&fixture.session(), PRELOAD).await;
    assert_eq!(finished.stdout, "0\n", "{finished:?}");
    assert!(
        finished.violations.iter().any(|violation| violation.syscall == "mmap"),
        "{finished:?}"
    );
}

async fn listed_programs_map_their_libraries(mut fixture: Fixture) {
    fixture.policy.process.allowed_executables = Some(
        ["sh", "python3"]
            .map(|name| std::fs::canonicalize(format!("/usr/bin/{name}")).unwrap())
            .to_vec(),
    );
    fixture.policy.process.allowed_executables.as_mut().unwrap().push("/usr/bin/python3".into());
    // Libraries of the runtime, and executable memory without a file.
    let script = "import ctypes, json, mmap, ssl, sqlite3
mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
print(ctypes.CDLL(None).getpid() > 0)";
    let finished = fixture.run(&fixture.session(), &["/usr/bin/python3", "-c", script]).await;
    assert_eq!(
        (finished.stdout.as_str(), finished.violations),
        ("True\n", Vec::new()),
        "{}",
        finished.stderr
    );
}

async fn policy_that_blocks_launch_calls_is_refused(mut fixture: Fixture) {
    fixture.policy.syscalls.mode = Some(codelia_policy::SyscallMode::Deny);
    fixture.policy.syscalls.names = vec!["recvmsg".into()];
    let session = fixture.session();
    let refused = fixture.launch(&session, &command(&["true"])).await;
    assert!(matches!(refused, Err(Error::Unenforceable { field: "policy.syscalls" })));
}

in_every_runtime!(
    threads_start_without_allow_fork,
    command_itself_starts_without_allow_exec,
    only_allowed_executables_start,
    memfd_program_runs_where_all_are_allowed,
    loader_runs_no_other_program,
    libraries_of_the_command_are_not_mapped,
    listed_programs_map_their_libraries,
    policy_that_blocks_launch_calls_is_refused,
);
