//! What an allowed call may say: rules about arguments, as data.
//!
//! Arguments are compared as the kernel's registers hold them. Where it reads fewer bits than that, a
//! rule is a mask of those bits, or refuses what has others set.

use libseccomp::{
    ScmpArgCompare,
    ScmpCompareOp::{self, Equal, MaskedEqual},
};

use super::Rules;

// Flags of clone(2): each makes a namespace.
const CLONE_NEWNS: u64 = 0x0002_0000;
const CLONE_NEWCGROUP: u64 = 0x0200_0000;
const CLONE_NEWUTS: u64 = 0x0400_0000;
const CLONE_NEWIPC: u64 = 0x0800_0000;
const CLONE_NEWUSER: u64 = 0x1000_0000;
const CLONE_NEWPID: u64 = 0x2000_0000;
const CLONE_NEWNET: u64 = 0x4000_0000;
const CLONE_NAMESPACES: u64 =
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET;
/// And this one a thread.
const CLONE_THREAD: u64 = 0x0001_0000;

const AF_UNIX: u64 = 1;
const AF_INET: u64 = 2;
const AF_INET6: u64 = 10;
const AF_NETLINK: u64 = 16;
/// The bits of a socket's type beside its flags.
const SOCK_TYPE: u64 = 0xf;
const SOCK_STREAM: u64 = 1;
const SOCK_DGRAM: u64 = 2;
const NETLINK_ROUTE: u64 = 0;

/// A file in memory that can never be executed.
const MFD_NOEXEC_SEAL: u64 = 0x8;

/// Would take the notifications that are ours.
const SECCOMP_FILTER_FLAG_NEW_LISTENER: u64 = 0x8;

type Condition = Vec<ScmpArgCompare>;

/// On which conditions a call passes, any of them: an empty one holds always, none at all never.
pub(super) fn conditions(name: &str, rules: &Rules) -> Vec<Condition> {
    match name {
        "clone" if rules.fork => vec![vec![masked(0, CLONE_NAMESPACES, 0)]],
        "clone" => vec![vec![masked(0, CLONE_NAMESPACES | CLONE_THREAD, CLONE_THREAD)]],
        // Never allowed, whatever the list says: it could not be filtered.
        "clone3" => Vec::new(),
        "fork" | "vfork" => when(rules.fork),
        // The first one is the launch itself; the supervisor tells it from others.
        "execve" | "execveat" => when(rules.exec),
        // Landlock does not ask about files without a name.
        "memfd_create" if rules.only_named => vec![vec![masked(1, MFD_NOEXEC_SEAL, MFD_NOEXEC_SEAL)]],
        "seccomp" => vec![vec![masked(1, SECCOMP_FILTER_FLAG_NEW_LISTENER, 0)]],
        "socket" => sockets(),
        "socketpair" => vec![vec![argument(0, Equal, AF_UNIX)]],
        _ => when(true),
    }
}

/// Neither raw nor packet sockets, nor a family with a history, nor netlink but for what C libraries ask:
/// which addresses there are.
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

fn when(allowed: bool) -> Vec<Condition> {
    if allowed { vec![Vec::new()] } else { Vec::new() }
}

fn argument(index: u32, operation: ScmpCompareOp, value: u64) -> ScmpArgCompare {
    ScmpArgCompare::new(index, operation, value)
}

fn masked(index: u32, mask: u64, value: u64) -> ScmpArgCompare {
    argument(index, MaskedEqual(mask), value)
}
