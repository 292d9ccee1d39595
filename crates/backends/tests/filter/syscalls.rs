//! Forbidden system calls are refused, and reported by name and arguments.

use codelia_types::Outcome;

use crate::{
    harness::Fixture,
    require::available,
    syscall_probe::{ENOSYS, EPERM, SIGSYS, call, probe, session, unfiltered},
};

const SIGCHLD: u64 = 17;

/// The dangerous calls of RFC-0002 §8.2 and similar ones, with their numbers on x86-64.
const DANGEROUS: [(&str, i64); 16] = [
    ("ptrace", 101),
    ("kexec_load", 246),
    ("open_by_handle_at", 304),
    ("perf_event_open", 298),
    ("bpf", 321),
    ("userfaultfd", 323),
    ("io_uring_setup", 425),
    ("mount", 165),
    ("umount2", 166),
    ("pivot_root", 155),
    ("chroot", 161),
    ("unshare", 272),
    ("setns", 308),
    ("move_mount", 429),
    ("fsopen", 430),
    ("init_module", 175),
];

/// Arguments that make every call fail: bad pointers, descriptors and flags.
const ARGS: [u64; 6] = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66];

async fn dangerous_calls_are_refused_and_reported(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let (open, control) = unfiltered().await;
    for (name, nr) in DANGEROUS {
        let (errno, violations) = call(&fixture, &session, nr, &ARGS).await;
        assert_eq!(errno, EPERM, "{name}");
        let [violation] = violations.as_slice() else { panic!("{name}: {violations:?}") };
        assert_eq!(
            (violation.kind.as_str(), violation.syscall.as_str()),
            ("SYSCALL_BLOCKED", name)
        );
        assert_eq!((i64::from(violation.nr), violation.args), (nr, ARGS));
        let (errno, _) = call(&open, &control, nr, &ARGS).await;
        assert_ne!(errno, EPERM, "the control: {name} without the filter");
    }
}

async fn clone_with_namespace_flags_is_refused(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    for flag in
        [0x2_0000, 0x200_0000, 0x400_0000, 0x800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000]
    {
        let (errno, violations) = call(&fixture, &session, 56, &[flag | SIGCHLD]).await;
        assert_eq!((errno, violations.len()), (EPERM, 1), "{flag:#x}");
        assert_eq!(
            (violations[0].syscall.as_str(), violations[0].args[0]),
            ("clone", flag | SIGCHLD)
        );
    }
    assert_eq!(
        call(&fixture, &session, 56, &[SIGCHLD]).await,
        (0, Vec::new()),
        "the control: a plain fork"
    );
}

async fn clone3_returns_enosys(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    assert_eq!(call(&fixture, &session, 435, &[0, 0]).await, (ENOSYS, Vec::new()));
    let (open, control) = unfiltered().await;
    assert_ne!(call(&open, &control, 435, &[0, 0]).await.0, ENOSYS, "the control");
}

async fn unknown_call_is_reported_by_number(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let (errno, violations) = call(&fixture, &session, 999, &[7]).await;
    assert_eq!((errno, violations.len()), (ENOSYS, 1));
    assert_eq!(
        (violations[0].syscall.as_str(), violations[0].nr, violations[0].args[0]),
        ("#999", 999, 7)
    );
}

async fn dangerous_sockets_are_refused(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let (unix, inet, inet6, netlink) = (1, 2, 10, 16);
    let (stream, datagram, raw, close_on_exec) = (1, 2, 3, 0o2_000_000);
    let refused = [
        [40, stream, 0], // AF_VSOCK
        [38, 5, 0],      // AF_ALG
        [17, raw, 0],    // AF_PACKET
        [inet, 10, 0],   // SOCK_PACKET
        [inet, raw, 1],  // ICMP
        [inet6, raw | close_on_exec, 58],
        [netlink, raw, 12],        // NETLINK_NETFILTER
        [15, raw, 2],              // AF_KEY
        [29, raw, 1],              // AF_CAN
        [31, raw, 1],              // AF_BLUETOOTH
        [44, raw, 0],              // AF_XDP
        [1 << 32 | 40, stream, 0], // AF_VSOCK: the kernel ignores the upper half
        [inet, stream, 132],       // SCTP
        [inet6, datagram, 115],    // L2TP
        [inet, stream, 256],       // SMC
        [inet, datagram, 136],     // UDP-Lite
        [inet, 6, 33],             // DCCP
    ];
    for args in refused {
        let (errno, violations) = call(&fixture, &session, 41, &args).await;
        assert_eq!((errno, violations.len()), (EPERM, 1), "{args:?}");
        assert_eq!(
            (violations[0].syscall.as_str(), &violations[0].args[..3]),
            ("socket", args.as_slice())
        );
    }
    let allowed = [
        [unix, stream, 0],
        [unix, datagram | close_on_exec, 0],
        [inet, stream, 0],
        [inet, stream, 6],
        [inet, datagram, 0],
        [inet6, datagram, 17],
        [inet6, stream, 0],
        [netlink, raw, 0],
    ];
    for args in allowed {
        assert_eq!(call(&fixture, &session, 41, &args).await, (0, Vec::new()), "{args:?}");
    }
}

async fn foreign_abi_calls_kill(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let x32_getpid = (0x4000_0000_i64 + 39).to_string();
    let killed = probe(&fixture, &session, &["call", &x32_getpid]).await;
    assert_eq!(killed.outcome, Outcome::Signaled(SIGSYS));
    let (open, control) = unfiltered().await;
    let lived = probe(&open, &control, &["call", &x32_getpid]).await;
    assert_eq!(lived.outcome, Outcome::Exited(0), "the control");

    let has_ia32 = probe(&open, &control, &["ia32"]).await.outcome == Outcome::Exited(0);
    if available("ia32", (!has_ia32).then_some("this kernel does not support 32-bit programs")) {
        let killed = probe(&fixture, &session, &["ia32"]).await;
        assert_eq!(killed.outcome, Outcome::Signaled(SIGSYS));
    }
}

async fn violation_limit_kills_the_run(mut fixture: Fixture) {
    fixture.policy.syscalls.violation_limit = Some(3);
    let Some(session) = session(&fixture) else { return };
    let script =
        |times: u32| format!("for i in $(seq {times}); do ./syscall_probe call 161 17; done");
    let finished = fixture.sh(&session, &script(2)).await;
    assert_eq!((finished.outcome, finished.stdout.as_str()), (Outcome::Exited(0), "1\n1\n"));
    let finished = fixture.sh(&session, &script(100)).await;
    assert_eq!(finished.outcome, Outcome::Violation("SYSCALL_BLOCKED".into()));
    assert_eq!(
        (finished.violations.len(), finished.stdout.as_str()),
        (3, "1\n1\n"),
        "the third call gets no answer"
    );
}

in_every_runtime!(
    dangerous_calls_are_refused_and_reported,
    clone_with_namespace_flags_is_refused,
    clone3_returns_enosys,
    unknown_call_is_reported_by_number,
    dangerous_sockets_are_refused,
    foreign_abi_calls_kill,
    violation_limit_kills_the_run,
);
