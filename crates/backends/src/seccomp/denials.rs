//! Calls that are denied whatever the policy allows: some always, most only with certain arguments.
//!
//! The kernel reads fewer bits of most arguments than a register has, so every rule compares only
//! those bits. `docs/syscalls.md` is generated from this table.

use codelia_sys::Errno;
use libseccomp::{
    ScmpArgCompare,
    ScmpCompareOp::{MaskedEqual, NotEqual},
};

use super::rules::MFD_NOEXEC_SEAL;

/// A denied call.
#[derive(Debug)]
pub(super) struct Denial {
    pub(super) call: &'static str,
    /// The arguments that are denied: all must match. Without any, every call is denied.
    pub(super) arguments: [Option<Argument>; 2],
    pub(super) answer: Answer,
}

/// A condition on the argument at an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Argument {
    /// The masked bits have this value.
    Equal { index: u32, mask: u64, value: u64 },
    /// At least one of these bits is set.
    AnyBit { index: u32, mask: u64 },
    /// The argument is not zero.
    NotZero { index: u32 },
}

impl Argument {
    /// The comparisons of which one must hold. They exclude each other, because libseccomp does not
    /// try the next one after a later argument did not match.
    pub(super) fn comparisons(self) -> Vec<ScmpArgCompare> {
        match self {
            Self::Equal { index, mask, value } => {
                vec![ScmpArgCompare::new(index, MaskedEqual(mask), value)]
            }
            Self::AnyBit { index, mask } => {
                // Every non-empty set of the bits.
                let sets =
                    std::iter::successors(Some(mask), |set| Some(set.checked_sub(1)? & mask));
                let sets = sets.take_while(|set| *set != 0);
                sets.map(|set| ScmpArgCompare::new(index, MaskedEqual(mask), set)).collect()
            }
            Self::NotZero { index } => vec![ScmpArgCompare::new(index, NotEqual, 0)],
        }
    }
}

/// How a denied call is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// The call is a violation: reported, counted, and failed with `EPERM`.
    Violation,
    /// The call fails with this errno and is not reported, because ordinary programs try it.
    Fail(Errno),
    /// The call returns success without effect and is not reported.
    Ignore,
}

use Answer::{Fail, Ignore, Violation};

/// Denied calls that have the same reason.
#[derive(Debug)]
pub(super) struct DenialGroup {
    /// The denied calls and arguments, as text for the documentation.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) what: &'static str,
    /// Why, and what programs do then, as text for the documentation.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) why: &'static str,
    pub(super) denials: &'static [Denial],
}

const INT: u64 = 0xffff_ffff;

const SOL_SOCKET: u64 = 1;
const SO_ATTACH_FILTER: u64 = 26;
const SO_ATTACH_BPF: u64 = 50;
const SO_ATTACH_REUSEPORT_CBPF: u64 = 51;
const SO_ATTACH_REUSEPORT_EBPF: u64 = 52;
const IPPROTO_TCP: u64 = 6;
const TCP_CONGESTION: u64 = 13;
const TCP_ULP: u64 = 31;
const IPPROTO_MPTCP: u64 = 262;

const SECCOMP_SET_MODE_FILTER: u64 = 1;
const PR_SET_SECCOMP: u64 = 22;
const SECCOMP_MODE_FILTER: u64 = 2;

const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541c;
const TIOCSETD: u64 = 0x5423;

/// `FS_IOC_FSSETXATTR` and `FS_IOC_SETFLAGS`.
const FSSETXATTR: u64 = 0x401c_5820;
const SETFLAGS: u64 = 0x4008_6602;

const RLIMIT_CORE: u64 = 4;

/// The bits of an I/O priority that hold its class.
const IOPRIO_CLASS: u64 = 0xe000;
const IOPRIO_CLASS_RT: u64 = 0x2000;

/// `S_ISUID` and `S_ISGID`.
const SET_ID: u64 = 0o6000;
/// `O_CREAT` and `O_TMPFILE`: without them the mode has no effect.
const CREATES: u64 = 0o20_000_100;

const PROT_EXEC: u64 = 4;

/// Denied in every sandbox.
pub(super) const DENIALS: &[DenialGroup] = &[
    DenialGroup {
        what: "`clone3`",
        why: "its flags are in memory that no filter can read; C libraries fall back to `clone`",
        denials: &[always("clone3", Fail(Errno::NOSYS))],
    },
    DenialGroup {
        what: "`openat2`",
        why: "its mode is in memory that no filter can read; programs fall back to `openat`",
        denials: &[always("openat2", Fail(Errno::NOSYS))],
    },
    DenialGroup {
        what: "`io_setup`, `io_submit` and the other calls of asynchronous I/O",
        why: "contexts come from one pool of the host (`fs.aio-max-nr`); programs use threads instead, as \
              the C library does",
        denials: &[
            always("io_setup", Fail(Errno::NOSYS)),
            always("io_destroy", Fail(Errno::NOSYS)),
            always("io_submit", Fail(Errno::NOSYS)),
            always("io_cancel", Fail(Errno::NOSYS)),
            always("io_getevents", Fail(Errno::NOSYS)),
            always("io_pgetevents", Fail(Errno::NOSYS)),
        ],
    },
    DenialGroup {
        what: "`sync`, `syncfs`",
        why: "they flush the host's file systems and stall every tenant; `fsync` works; the C library's \
              `sync` cannot report an error, so `sync` programs succeed",
        denials: &[always("sync", Fail(Errno::PERM)), always("syncfs", Fail(Errno::PERM))],
    },
    DenialGroup {
        what: "`seccomp` and `prctl` that install a filter",
        why: "compiled filters come from one pool of the host (`net.core.bpf_jit_limit`); `EINVAL` is the \
              answer of a kernel without filters, which programs with an optional sandbox accept",
        denials: &[
            if_one("seccomp", equal(0, INT, SECCOMP_SET_MODE_FILTER), Fail(Errno::INVAL)),
            if_both(
                "prctl",
                equal(0, INT, PR_SET_SECCOMP),
                equal(1, u64::MAX, SECCOMP_MODE_FILTER),
                Fail(Errno::INVAL),
            ),
        ],
    },
    DenialGroup {
        what: "`setsockopt` with `SO_ATTACH_FILTER`, `SO_ATTACH_BPF`, `SO_ATTACH_REUSEPORT_CBPF`, \
               `SO_ATTACH_REUSEPORT_EBPF`",
        why: "the same pool",
        denials: &[
            option(SOL_SOCKET, SO_ATTACH_FILTER, Violation),
            option(SOL_SOCKET, SO_ATTACH_BPF, Violation),
            option(SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, Violation),
            option(SOL_SOCKET, SO_ATTACH_REUSEPORT_EBPF, Violation),
        ],
    },
    DenialGroup {
        what: "`setsockopt` with `TCP_CONGESTION`, `TCP_ULP`",
        why: "kernel modules that nothing needs; libraries that try them continue without",
        denials: &[
            option(IPPROTO_TCP, TCP_CONGESTION, Fail(Errno::PERM)),
            option(IPPROTO_TCP, TCP_ULP, Fail(Errno::PERM)),
        ],
    },
    DenialGroup {
        what: "`socket` with `IPPROTO_MPTCP`",
        why: "a kernel interface with a history of bugs; Go asks for it first and falls back to TCP",
        denials: &[if_one("socket", equal(2, INT, IPPROTO_MPTCP), Fail(Errno::PROTONOSUPPORT))],
    },
    DenialGroup {
        what: "`ioctl` with `TIOCSTI`, `TIOCLINUX`, `TIOCSETD`",
        why: "they type into a terminal, control a console, or load line disciplines",
        denials: &[ioctl(TIOCSTI), ioctl(TIOCLINUX), ioctl(TIOCSETD)],
    },
    DenialGroup {
        what: "`ioctl` with `FS_IOC_FSSETXATTR`, `FS_IOC_SETFLAGS`",
        why: "they take a file out of the project whose disk quota counts it; programs that set file \
              attributes (`chattr`, databases that turn copy-on-write off) continue without",
        denials: &[
            if_one("ioctl", equal(1, INT, FSSETXATTR), Fail(Errno::PERM)),
            if_one("ioctl", equal(1, INT, SETFLAGS), Fail(Errno::PERM)),
        ],
    },
    DenialGroup {
        what: "`setrlimit` and `prlimit64` that change `RLIMIT_CORE`",
        why: "the limit of 1 is what keeps the host's core dump handler from running, and 0 would not; \
              commands never dump core, so a program that switches dumps off (gpg, ssh-agent) gets what it \
              asks for",
        denials: &[
            if_one("setrlimit", equal(0, INT, RLIMIT_CORE), Ignore),
            if_both(
                "prlimit64",
                equal(1, INT, RLIMIT_CORE),
                Argument::NotZero { index: 2 },
                Ignore,
            ),
        ],
    },
    DenialGroup {
        what: "`ioprio_set` with the real-time class",
        why: "it would starve other tenants' disk access; the kernel refuses it with the same error",
        denials: &[if_one(
            "ioprio_set",
            equal(2, IOPRIO_CLASS, IOPRIO_CLASS_RT),
            Fail(Errno::PERM),
        )],
    },
    DenialGroup {
        what: "`chmod`, `fchmod`, `fchmodat`, `fchmodat2`, `mknod`, `mknodat`, `creat`, `open` and `openat` \
               with a set-user-ID or set-group-ID bit in the mode",
        why: "such a file in a workspace would give other users of the host the session's rights; `cp -p`, \
              `tar -p` and `rsync -p` of such files fail, and so do set-group-ID directories (`git init \
              --shared`); `mkdir` ignores the bits",
        denials: &[
            if_one("chmod", any_bit(1, SET_ID), Fail(Errno::PERM)),
            if_one("fchmod", any_bit(1, SET_ID), Fail(Errno::PERM)),
            if_one("fchmodat", any_bit(2, SET_ID), Fail(Errno::PERM)),
            if_one("fchmodat2", any_bit(2, SET_ID), Fail(Errno::PERM)),
            if_one("mknod", any_bit(1, SET_ID), Fail(Errno::PERM)),
            if_one("mknodat", any_bit(2, SET_ID), Fail(Errno::PERM)),
            if_one("creat", any_bit(1, SET_ID), Fail(Errno::PERM)),
            if_both("open", any_bit(1, CREATES), any_bit(2, SET_ID), Fail(Errno::PERM)),
            if_both("openat", any_bit(2, CREATES), any_bit(3, SET_ID), Fail(Errno::PERM)),
        ],
    },
];

/// Denied where the plan lists executables, unless the supervisor permits it: executable memory.
pub(super) const EXECUTABLE_MEMORY: &[Denial] = &[
    if_one("mmap", any_bit(2, PROT_EXEC), Violation),
    if_one("mprotect", any_bit(2, PROT_EXEC), Violation),
    if_one("pkey_mprotect", any_bit(2, PROT_EXEC), Violation),
];

/// Denied where the layout of a plan says where files can be executed: files in memory that could
/// be.
pub(super) const EXECUTABLE_MEMORY_FILES: &[Denial] =
    &[if_one("memfd_create", equal(1, MFD_NOEXEC_SEAL, 0), Fail(Errno::ACCESS))];

const fn always(call: &'static str, answer: Answer) -> Denial {
    Denial { call, arguments: [None, None], answer }
}

const fn if_one(call: &'static str, argument: Argument, answer: Answer) -> Denial {
    Denial { call, arguments: [Some(argument), None], answer }
}

const fn if_both(call: &'static str, first: Argument, second: Argument, answer: Answer) -> Denial {
    Denial { call, arguments: [Some(first), Some(second)], answer }
}

const fn option(level: u64, name: u64, answer: Answer) -> Denial {
    if_both("setsockopt", equal(1, INT, level), equal(2, INT, name), answer)
}

const fn ioctl(request: u64) -> Denial {
    if_one("ioctl", equal(1, INT, request), Violation)
}

const fn equal(index: u32, mask: u64, value: u64) -> Argument {
    Argument::Equal { index, mask, value }
}

const fn any_bit(index: u32, mask: u64) -> Argument {
    Argument::AnyBit { index, mask }
}
