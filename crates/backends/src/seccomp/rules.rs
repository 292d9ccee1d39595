//! Conditions on the arguments of allowed calls.
//!
//! The filter compares whole 64-bit registers. Where the kernel reads fewer bits, a rule masks
//! them, or denies values with other bits set.

use libseccomp::{
    ScmpArgCompare,
    ScmpCompareOp::{self, Equal, MaskedEqual},
};

use super::Rules;

// Flags of clone(2) that create a namespace.
const CLONE_NEWNS: u64 = 0x0002_0000;
const CLONE_NEWCGROUP: u64 = 0x0200_0000;
const CLONE_NEWUTS: u64 = 0x0400_0000;
const CLONE_NEWIPC: u64 = 0x0800_0000;
const CLONE_NEWUSER: u64 = 0x1000_0000;
const CLONE_NEWPID: u64 = 0x2000_0000;
const CLONE_NEWNET: u64 = 0x4000_0000;
const CLONE_NAMESPACES: u64 =
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET;
/// Creates a thread instead of a process.
const CLONE_THREAD: u64 = 0x0001_0000;

const AF_UNIX: u64 = 1;
const AF_INET: u64 = 2;
const AF_INET6: u64 = 10;
const AF_NETLINK: u64 = 16;
/// The bits of a socket's type, without its flags.
const SOCK_TYPE: u64 = 0xf;
const SOCK_STREAM: u64 = 1;
const SOCK_DGRAM: u64 = 2;
const NETLINK_ROUTE: u64 = 0;

/// The memfd can never be executed.
const MFD_NOEXEC_SEAL: u64 = 0x8;

/// Would replace the supervisor as the receiver of notifications.
const SECCOMP_FILTER_FLAG_NEW_LISTENER: u64 = 0x8;

type Condition = Vec<ScmpArgCompare>;

/// The conditions under which a call is allowed. One of them must hold; an empty condition always
/// holds, and an empty list denies the call.
pub(super) fn conditions(name: &str, rules: &Rules) -> Vec<Condition> {
    match name {
        "clone" if rules.fork => vec![vec![masked(0, CLONE_NAMESPACES, 0)]],
        "clone" => vec![vec![masked(0, CLONE_NAMESPACES | CLONE_THREAD, CLONE_THREAD)]],
        // Never allowed, even if the policy lists it: its flags cannot be filtered.
        "clone3" => Vec::new(),
        "fork" | "vfork" => allow_if(rules.fork),
        // If denied, the supervisor still lets the first `execve` pass: the launch.
        "execve" | "execveat" => allow_if(rules.exec),
        // Landlock does not check files without a name.
        "memfd_create" if rules.only_named => vec![vec![masked(1, MFD_NOEXEC_SEAL, MFD_NOEXEC_SEAL)]],
        "seccomp" => vec![vec![masked(1, SECCOMP_FILTER_FLAG_NEW_LISTENER, 0)]],
        "socket" => sockets(),
        "socketpair" => vec![vec![argument(0, Equal, AF_UNIX)]],
        _ => allow_if(true),
    }
}

/// Unix, TCP and UDP sockets, and the netlink family with which C libraries list addresses. No raw
/// or packet sockets, and no rarely used families, which have a history of kernel bugs.
fn sockets() -> Vec<Condition> {
    let mut allowed = vec![
        vec![argument(0, Equal, AF_UNIX)],
        vec![argument(0, Equal, AF_NETLINK), argument(2, Equal, NETLINK_ROUTE)],
    ];
    for family in [AF_INET, AF_INET6] {
        for kind in [SOCK_STREAM, SOCK_DGRAM] {
            allowed.push(vec![argument(0, Equal, family), masked(1, SOCK_TYPE, kind)]);
        }
    }
    allowed
}

fn allow_if(allowed: bool) -> Vec<Condition> {
    if allowed { vec![Vec::new()] } else { Vec::new() }
}

fn argument(index: u32, operation: ScmpCompareOp, value: u64) -> ScmpArgCompare {
    ScmpArgCompare::new(index, operation, value)
}

fn masked(index: u32, mask: u64, value: u64) -> ScmpArgCompare {
    argument(index, MaskedEqual(mask), value)
}
