//! `codelia-init` installs a filter on itself once the command's process waits.

use std::{
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Command, Stdio},
};

use codelia_init::{
    Decoder, ExpectedEnvironment, ExpectedNamespace, NAMESPACES, Report, Request, SecuritySetup,
    Setup, encode,
};

use crate::{
    harness::{Fixture, init_path, is_root},
    syscall_probe::SIGSYS,
};

/// One BPF instruction that returns `SECCOMP_RET_ALLOW`.
const ALLOW_ALL: u64 = 0x7fff_0000_0000_0006;
/// One BPF instruction that returns `SECCOMP_RET_KILL_PROCESS`.
const KILL_ALWAYS: u64 = 0x8000_0000_0000_0006;

async fn init_runs_with_a_filter(fixture: Fixture) {
    let stdout = fixture.stdout_of("grep Seccomp: /proc/1/status").await;
    assert_eq!(stdout, "Seccomp:\t2\n");
}

/// Starts `codelia-init` as PID 1 with this filter. Returns its first report and its exit status.
fn start_with(init_filter: u64) -> (Option<Report>, Option<i32>) {
    let (mut control, remote) = UnixStream::pair().unwrap();
    let mut init = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "--kill-child", "--"])
        .arg(init_path())
        .stdin(Stdio::from(OwnedFd::from(remote)))
        .spawn()
        .unwrap();
    let security = SecuritySetup {
        expected: ExpectedEnvironment {
            namespaces: NAMESPACES.map(|name| (name.to_owned(), ExpectedNamespace::Shared)).into(),
            covered: Some("/".into()),
            ..ExpectedEnvironment::default()
        },
        filter: vec![ALLOW_ALL],
        init_filter: vec![init_filter],
        ..SecuritySetup::default()
    };
    let setup = Setup { security: Some(security), relay_launch: true, ..Setup::default() };
    control.write_all(&encode(&Request::Setup(Box::new(setup))).unwrap()).unwrap();
    let (mut decoder, mut bytes) = (Decoder::default(), [0; 1024]);
    let report = loop {
        if let Some(report) = decoder.next_message().unwrap() {
            break Some(report);
        }
        match control.read(&mut bytes).unwrap_or(0) {
            0 => break None,
            count => decoder.push(&bytes[..count]),
        }
    };
    drop(control);
    (report, init.wait().unwrap().code())
}

#[test]
fn call_outside_its_filter_kills_init() {
    if !is_root("only root can start a PID namespace directly") {
        return;
    }
    // `unshare` dies by the signal of its child, or exits with 128 and its number.
    let (report, status) = start_with(KILL_ALWAYS);
    assert_eq!(report, None);
    assert!(status.is_none_or(|code| code == 128 + SIGSYS), "{status:?}");
    assert_eq!(start_with(ALLOW_ALL), (Some(Report::Ready), Some(0)), "the control");
}

in_every_runtime!(init_runs_with_a_filter);
