//! Rules of a plan: the calls that it allows, and conditions on their arguments. [`super::denials`]
//! come first.
//!
//! The filter compares whole 64-bit registers. Where the kernel reads fewer bits, a rule masks
//! them, or denies values with other bits set.

use std::collections::BTreeSet;

use codelia_policy::{LoggedCalls, Security, SyscallRules, syscalls};
use libseccomp::{
    ScmpArgCompare,
    ScmpCompareOp::{self, Equal, MaskedEqual},
};

use super::observed::{self, CHANGES, ObservedCall};

// Flags of clone(2) that create a namespace.
const CLONE_NEWNS: u64 = 0x0002_0000;
const CLONE_NEWCGROUP: u64 = 0x0200_0000;
const CLONE_NEWUTS: u64 = 0x0400_0000;
const CLONE_NEWIPC: u64 = 0x0800_0000;
const CLONE_NEWUSER: u64 = 0x1000_0000;
const CLONE_NEWPID: u64 = 0x2000_0000;
const CLONE_NEWNET: u64 = 0x4000_0000;
const CLONE_NAMESPACES: u64 = CLONE_NEWNS
    | CLONE_NEWCGROUP
    | CLONE_NEWUTS
    | CLONE_NEWIPC
    | CLONE_NEWUSER
    | CLONE_NEWPID
    | CLONE_NEWNET;
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
/// The protocol that belongs to the type of the socket.
const DEFAULT_PROTOCOL: u64 = 0;
const IPPROTO_ICMP: u64 = 1;
const IPPROTO_TCP: u64 = 6;
const IPPROTO_UDP: u64 = 17;
const IPPROTO_ICMPV6: u64 = 58;

const PER_LINUX: u64 = 0;
/// Makes `personality` only return the current value.
const PER_QUERY: u64 = 0xffff_ffff;
const ADDR_NO_RANDOMIZE: u64 = 0x4_0000;

/// The memfd can never be executed.
pub(super) const MFD_NOEXEC_SEAL: u64 = 0x8;

/// Whether a plan allows a call, apart from its arguments.
pub(crate) fn is_allowed(security: &Security, name: &str) -> bool {
    match &security.syscalls {
        SyscallRules::Allow(names) => names.iter().any(|allowed| allowed == name),
        SyscallRules::Deny(names) => {
            syscalls::is_allowed(name, security.debug) && !names.iter().any(|denied| denied == name)
        }
    }
}

/// The parts of a plan that a filter depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(super) allowed: BTreeSet<String>,
    pub(super) fork: bool,
    pub(super) exec: bool,
    pub(super) debug: bool,
    /// Whether only listed files may be executed.
    pub(super) only_listed: bool,
    /// Whether files in memory can never be executed.
    pub(super) seals_memory_files: bool,
    /// Whether denied calls are sent to the supervisor.
    pub(super) notify: bool,
    /// Whether calls that open files are sent to the supervisor, too.
    pub(super) asks: bool,
    /// Which allowed calls are sent to it to be logged.
    pub(super) logged: LoggedCalls,
}

impl Rules {
    /// A deny list removes calls from the default list.
    pub(crate) fn for_plan(security: &Security) -> Self {
        let allowed = match &security.syscalls {
            SyscallRules::Allow(names) => names.iter().cloned().collect(),
            SyscallRules::Deny(names) => {
                let default = syscalls::allowed(security.debug);
                default.iter().filter(|name| !names.contains(name)).cloned().collect()
            }
        };
        Self { allowed, ..Self::without_names(security) }
    }

    /// The rules without the allowed calls.
    pub(super) fn without_names(security: &Security) -> Self {
        Self {
            allowed: BTreeSet::new(),
            fork: security.fork,
            exec: security.exec,
            debug: security.debug,
            only_listed: security.executables.is_some(),
            seals_memory_files: false,
            notify: security.violation_limit.is_some(),
            asks: !security.asked_reads.is_empty(),
            logged: security.logged,
        }
    }

    /// The allowed calls that are logged.
    pub(crate) fn observed(&self) -> impl Iterator<Item = &'static ObservedCall> {
        observed::observed(self.logged).filter(|call| self.allowed.contains(call.name))
    }
}

type Condition = Vec<ScmpArgCompare>;

/// The conditions under which a call is allowed. One of them must hold; an empty condition always
/// holds, and an empty list denies the call.
pub(super) fn conditions(name: &str, rules: &Rules) -> Vec<Condition> {
    match name {
        "clone" if rules.fork => vec![vec![masked(0, CLONE_NAMESPACES, 0)]],
        "clone" => vec![vec![masked(0, CLONE_NAMESPACES | CLONE_THREAD, CLONE_THREAD)]],
        "fork" | "vfork" => allow_if(rules.fork),
        // If denied, the supervisor still lets the first `execve` pass: the launch.
        // Where the plan lists executables, Landlock decides, and the supervisor reports.
        "execve" | "execveat" => allow_if(rules.exec && !rules.only_listed),
        // Landlock does not check files without a name.
        "memfd_create" if rules.only_listed => {
            vec![vec![masked(1, MFD_NOEXEC_SEAL, MFD_NOEXEC_SEAL)]]
        }
        // The supervisor opens what needs a decision.
        "open" | "openat" if rules.asks => allow_if(false),
        "open" if rules.logged.files => vec![vec![masked(1, CHANGES, 0)]],
        "openat" if rules.logged.files => vec![vec![masked(2, CHANGES, 0)]],
        "personality" => personalities(rules.debug),
        "socket" => sockets(),
        "socketpair" => vec![vec![argument(0, Equal, AF_UNIX)]],
        // The supervisor logs them and lets them continue.
        _ => allow_if(!rules.observed().any(|call| call.name == name)),
    }
}

/// Unix, TCP and UDP sockets, pings, and the netlink family with which C libraries list addresses.
/// No raw or packet sockets, and no rarely used families and protocols (SCTP, L2TP, SMC, UDP-Lite),
/// which have a history of kernel bugs.
fn sockets() -> Vec<Condition> {
    let mut allowed = vec![
        vec![argument(0, Equal, AF_UNIX)],
        vec![argument(0, Equal, AF_NETLINK), argument(2, Equal, NETLINK_ROUTE)],
    ];
    for (family, ping) in [(AF_INET, IPPROTO_ICMP), (AF_INET6, IPPROTO_ICMPV6)] {
        let kinds = [
            (SOCK_STREAM, DEFAULT_PROTOCOL),
            (SOCK_STREAM, IPPROTO_TCP),
            (SOCK_DGRAM, DEFAULT_PROTOCOL),
            (SOCK_DGRAM, IPPROTO_UDP),
            (SOCK_DGRAM, ping),
        ];
        for (kind, protocol) in kinds {
            let same_protocol = argument(2, Equal, protocol);
            allowed.push(vec![
                argument(0, Equal, family),
                masked(1, SOCK_TYPE, kind),
                same_protocol,
            ]);
        }
    }
    allowed
}

/// The usual personality and asking for it; a debugger also switches address randomization off.
/// Others change how addresses are checked or mapped.
fn personalities(debug: bool) -> Vec<Condition> {
    let debugger = debug.then_some(ADDR_NO_RANDOMIZE);
    let allowed = [PER_LINUX, PER_QUERY].into_iter().chain(debugger);
    allowed.map(|value| vec![masked(0, PER_QUERY, value)]).collect()
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
