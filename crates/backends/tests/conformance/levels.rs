//! What `LEVEL_1` isolates and what it does not, compared with `LEVEL_2`.

use std::{fs, net::TcpListener, os::unix::fs::PermissionsExt};

use codelia_policy::IsolationLevel;
use codelia_types::Outcome;

use crate::harness::{Fixture, in_mode};

/// Makes a system call by its number on x86-64 and prints whether it succeeded.
fn call(number: u32, arguments: &str) -> String {
    format!("perl -e 'print syscall({number}{arguments})==0 ? \"done\\n\" : \"blocked\\n\"'")
}

/// `set_mempolicy` to the default: harmless, and not in the list of `LEVEL_2`.
const UNUSUAL: (u32, &str) = (238, ",0,0,0");

/// The control is the same command at `LEVEL_2`.
async fn process_level_filters_only_dangerous_calls(mut fixture: Fixture) {
    let (number, arguments) = UNUSUAL;
    let finished = fixture.sh(&fixture.session(), &call(number, arguments)).await;
    assert_eq!(finished.stdout, "blocked\n", "LEVEL_2: {finished:?}");
    assert_eq!(finished.violations[0].syscall, "set_mempolicy", "{finished:?}");
    fixture.level = IsolationLevel::Process;
    assert_eq!(fixture.stdout_of(&call(number, arguments)).await, "done\n", "LEVEL_1");
    // mount, unshare of the user namespace, ptrace of itself, bpf, chroot, setns.
    for dangerous in [
        (165, ",0,0,0,0,0"),
        (272, ",0x10000000"),
        (101, ",0,0,0,0"),
        (321, ",0,0,0"),
        (161, ",0"),
        (308, ",0,0"),
    ] {
        let finished = fixture.sh(&fixture.session(), &call(dangerous.0, dangerous.1)).await;
        assert_eq!(finished.stdout, "blocked\n", "{dangerous:?}: {finished:?}");
        assert!(!finished.violations.is_empty(), "{dangerous:?}: {finished:?}");
    }
}

async fn process_level_isolates_processes_files_network(mut fixture: Fixture) {
    fixture.level = IsolationLevel::Process;
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (secret, session) = (dir.path().join("secret"), fixture.session());
    fs::write(&secret, "secret\n").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // The controls: all three work outside.
    assert!(
        fs::read_to_string(&secret).is_ok()
            && fs::exists(format!("/proc/{}", std::process::id())).unwrap()
    );
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let script = format!(
        "cat {} && echo reached; ls -d /proc/[0-9]* | wc -l
         perl -MSocket -e 'socket(S,AF_INET,SOCK_STREAM,0); connect(S,pack_sockaddr_in({port},INADDR_LOOPBACK)) and print \"reached\\n\"'
         echo mine > mine && cat mine",
        secret.display()
    );
    let finished = fixture.sh(&session, &script).await;
    let lines: Vec<_> = finished.stdout.lines().collect();
    assert_eq!((lines.len(), lines[1]), (2, "mine"), "{finished:?}");
    assert!(lines[0].parse::<u32>().unwrap() < 8, "it sees only its own processes: {finished:?}");
}

async fn process_level_enforces_limits(mut fixture: Fixture) {
    fixture.level = IsolationLevel::Process;
    fixture.limits.memory_bytes = 48 * 1024 * 1024;
    let finished = fixture.run(&fixture.session(), &["tail", "/dev/zero"]).await;
    assert_eq!(finished.outcome, Outcome::Oom, "{finished:?}");
}

in_mode!(bwrap = Bwrap: process_level_filters_only_dangerous_calls, process_level_isolates_processes_files_network,
    process_level_enforces_limits);
in_mode!(nsjail = Nsjail: process_level_filters_only_dangerous_calls, process_level_isolates_processes_files_network,
    process_level_enforces_limits);
in_mode!(native = Native: process_level_filters_only_dangerous_calls, process_level_isolates_processes_files_network,
    process_level_enforces_limits);
