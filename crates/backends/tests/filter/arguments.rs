//! Calls that are denied only with certain arguments, and calls that are denied without a report.
//!
//! Every call has a bad pointer or descriptor, so that without the filter it fails with the
//! kernel's own error: the control.

use crate::{
    harness::{Fixture, Kind},
    syscall_probe::{EINVAL, ENOSYS, EPERM, EPROTONOSUPPORT, call, session, unfiltered},
};

/// A descriptor that no process has.
const FD: u64 = 999;
/// A bit that the kernel ignores in 32-bit arguments.
const UPPER: u64 = 1 << 32;

/// A call, its arguments, and the expected errno.
type Case = (&'static str, i64, &'static [u64], i32);

/// Answered without a report.
const QUIET: &[Case] = &[
    ("openat2", 437, &[FD, 0, 0, 24], ENOSYS),
    ("io_setup", 206, &[1, 0], ENOSYS),
    ("io_submit", 209, &[0, 1, 0], ENOSYS),
    ("syncfs", 306, &[FD], EPERM),
    ("seccomp filter", 317, &[1, 0, 0], EINVAL),
    ("seccomp filter with listener", 317, &[1, 8, 0], EINVAL),
    ("seccomp filter, upper half", 317, &[UPPER | 1, 0, 0], EINVAL),
    ("prctl filter", 157, &[22, 2, 0], EINVAL),
    ("prctl filter, upper half", 157, &[UPPER | 22, 2, 0], EINVAL),
    ("MPTCP", 41, &[2, 1, 262], EPROTONOSUPPORT),
    ("MPTCP, upper half", 41, &[2, 1, UPPER | 262], EPROTONOSUPPORT),
    ("TCP_CONGESTION", 54, &[FD, 6, 13, 0, 0], EPERM),
    ("TCP_ULP", 54, &[FD, UPPER | 6, UPPER | 31, 0, 0], EPERM),
    ("FS_IOC_FSSETXATTR", 16, &[FD, 0x401c_5820, 0], EPERM),
    ("FS_IOC_SETFLAGS, upper half", 16, &[FD, UPPER | 0x4008_6602, 0], EPERM),
    ("real-time I/O priority", 251, &[9, 0, 0x2004], EPERM),
    ("chmod", 90, &[0, 0o4755], EPERM),
    ("chmod, set-group-ID", 90, &[0, 0o2755], EPERM),
    ("chmod, more bits", 90, &[0, UPPER | 0o106_755], EPERM),
    ("fchmod", 91, &[FD, 0o4755], EPERM),
    ("fchmodat", 268, &[FD, 0, 0o6755], EPERM),
    ("fchmodat2", 452, &[FD, 0, 0o4755, 0], EPERM),
    ("mknod", 133, &[0, 0o104_755, 0], EPERM),
    ("mknodat", 259, &[FD, 0, 0o102_755, 0], EPERM),
    ("creat", 85, &[0, 0o4755], EPERM),
    ("open to create", 2, &[0, 0o101, 0o4755], EPERM),
    ("open without a name", 2, &[0, 0o20_200_002, 0o2755], EPERM),
    ("openat to create", 257, &[FD, 0, 0o101, 0o6755], EPERM),
    ("openat without a name", 257, &[FD, 0, 0o20_200_102, 0o4755], EPERM),
    // Success without effect: the pointer is not even read.
    ("setrlimit of core dumps", 160, &[4, 1], 0),
    ("prlimit64 of core dumps", 302, &[0, UPPER | 4, 1, 0], 0),
];

/// Reported as violations.
const REPORTED: &[Case] = &[
    ("SO_ATTACH_FILTER", 54, &[FD, 1, 26, 0, 0], EPERM),
    ("SO_ATTACH_BPF", 54, &[FD, 1, 50, 0, 0], EPERM),
    ("SO_ATTACH_REUSEPORT_CBPF", 54, &[FD, 1, 51, 0, 0], EPERM),
    ("SO_ATTACH_REUSEPORT_EBPF, upper half", 54, &[FD, UPPER | 1, UPPER | 52, 0, 0], EPERM),
    ("TIOCSTI", 16, &[FD, 0x5412, 0], EPERM),
    ("TIOCSTI, upper half", 16, &[FD, UPPER | 0x5412, 0], EPERM),
    ("TIOCLINUX", 16, &[FD, 0x541c, 0], EPERM),
    ("TIOCSETD", 16, &[FD, 0x5423, 0], EPERM),
];

/// Similar calls that pass the filter: they have the same result without it.
const PASSED: &[Case] = &[
    ("seccomp question", 317, &[2, 0, 0], 14),
    ("prctl of another option", 157, &[15, 0], 14),
    ("SO_REUSEADDR", 54, &[FD, 1, 2, 0, 0], 9),
    ("TCP_NODELAY", 54, &[FD, 6, 1, 0, 0], 9),
    ("FS_IOC_FSGETXATTR", 16, &[FD, 0x801c_581f, 0], 9),
    ("FS_IOC_GETFLAGS", 16, &[FD, 0x8008_6601, 0], 9),
    ("TIOCGWINSZ", 16, &[FD, 0x5413, 0], 9),
    ("chmod", 90, &[0, 0o1777], 14),
    ("fchmod", 91, &[FD, 0o755], 9),
    ("open to read", 2, &[0, 0, 0o4755], 14),
    ("openat to create", 257, &[FD, 0, 0o101, 0o777], 14),
    ("setrlimit of open files", 160, &[7, 1], 14),
    ("prlimit64 that reads", 302, &[0, 4, 0, 0], 0),
];

async fn denied_arguments_are_refused_quietly(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let (open, control) = unfiltered().await;
    for &(name, nr, args, expected) in QUIET {
        assert_eq!(call(&fixture, &session, nr, args).await, (expected, Vec::new()), "{name}");
        let (errno, _) = call(&open, &control, nr, args).await;
        assert_ne!(errno, expected, "the control: {name} without the filter");
    }
}

async fn denied_arguments_are_reported(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    let (open, control) = unfiltered().await;
    for &(name, nr, args, expected) in REPORTED {
        let (errno, violations) = call(&fixture, &session, nr, args).await;
        assert_eq!((errno, violations.len()), (expected, 1), "{name}");
        let (errno, _) = call(&open, &control, nr, args).await;
        assert_ne!(errno, expected, "the control: {name} without the filter");
    }
}

async fn other_arguments_pass(fixture: Fixture) {
    let Some(session) = session(&fixture) else { return };
    for &(name, nr, args, expected) in PASSED {
        assert_eq!(call(&fixture, &session, nr, args).await, (expected, Vec::new()), "{name}");
    }
}

async fn personality_is_limited(mut fixture: Fixture) {
    const NO_RANDOMIZE: u64 = 0x4_0000;
    const READ_IMPLIES_EXEC: u64 = 0x40_0000;
    let Some(session) = session(&fixture) else { return };
    for debug in [false, true] {
        fixture.policy.process.debug = Some(debug);
        for harmless in [0, 0xffff_ffff, u64::MAX] {
            assert_eq!(
                call(&fixture, &session, 135, &[harmless]).await,
                (0, Vec::new()),
                "{harmless:#x}"
            );
        }
        let expected = if debug { 0 } else { EPERM };
        assert_eq!(
            call(&fixture, &session, 135, &[NO_RANDOMIZE]).await.0,
            expected,
            "debug: {debug}"
        );
        let (errno, _) = call(&fixture, &session, 135, &[READ_IMPLIES_EXEC]).await;
        assert_eq!(errno, EPERM, "debug: {debug}");
    }
    let (open, control) = unfiltered().await;
    assert_eq!(call(&open, &control, 135, &[READ_IMPLIES_EXEC]).await.0, 0, "the control");
}

/// Leaves a set-user-ID file in as many ways as a shell can.
const PLANT: &str = "touch a b c; mkdir d; chmod 4755 a; chmod g+s b d; \
    python3 -c 'import os; os.close(os.open(\"e\", os.O_CREAT | os.O_WRONLY, 0o4755))' 2>/dev/null; \
    python3 -c 'import os, stat; os.mknod(\"f\", stat.S_IFREG | 0o4755)' 2>/dev/null; \
    chmod 755 c; [ -x c ] && echo executable; find . -perm /6000 | sort | tr '\\n' ' '";

async fn set_id_bits_cannot_be_planted(fixture: Fixture) {
    let finished = fixture.sh(&fixture.session(), PLANT).await;
    assert_eq!((finished.stdout.as_str(), finished.violations), ("executable\n", Vec::new()));
    let open = Fixture::new(Kind::Logical).await.unwrap();
    let planted = open.sh(&open.session(), PLANT).await.stdout;
    assert_eq!(planted, "executable\n./a ./b ./d ./e ./f ", "the control");
}

/// Prints the limit of core dumps before and after the command switches core dumps off.
const LOWER_CORE_LIMIT: &str = "limit() { grep core /proc/self/limits | tr -s ' ' | cut -d' ' -f5,6; }; limit; ulimit -S -c 0; limit";

async fn core_limit_stays_at_one(fixture: Fixture) {
    let limits = fixture.sh(&fixture.session(), LOWER_CORE_LIMIT).await;
    assert_eq!(limits.stdout, "1 1\n1 1\n");
    let open = Fixture::new(Kind::Logical).await.unwrap();
    let limits = open.sh(&open.session(), LOWER_CORE_LIMIT).await;
    assert_eq!(limits.stdout, "1 1\n0 1\n", "the control");
}

in_every_runtime!(
    denied_arguments_are_refused_quietly,
    denied_arguments_are_reported,
    other_arguments_pass,
    personality_is_limited,
    set_id_bits_cannot_be_planted,
    core_limit_stays_at_one,
);
