//! Builds the seccomp filter of a plan: the BPF program that `codelia-init` installs.
//!
//! Allowed calls pass. All others are sent to the supervisor, or fail with `EPERM` in runtimes
//! without notifications. The filter decides two cases itself: `clone3` fails with `ENOSYS`,
//! because its flags are in memory that no filter can read and C libraries fall back to `clone`; a
//! call of a foreign ABI (ia32, x32) kills the process.

mod names;
mod rules;

use std::{
    collections::{BTreeSet, VecDeque},
    fs::File,
    io::{self, Read, Seek},
    sync::{Arc, Mutex, PoisonError},
};

use codelia_policy::{Security, SyscallRules, syscalls};
use codelia_sys::{Errno, fd};
use libseccomp::{ScmpAction, ScmpFilterContext, ScmpSyscall};

use crate::Error;

pub(crate) use names::{name, number};

/// Calls that the command's process makes between installing the filter and `execve`. A plan that
/// denies one of them cannot be enforced.
const REQUIRED: [&str; 14] = [
    "sendmsg",
    "recvmsg",
    "close",
    "brk",
    "mmap",
    "munmap",
    "mremap",
    "madvise",
    "dup2",
    "dup3",
    "fchdir",
    "openat2",
    "ioctl",
    "exit_group",
];

/// Building a filter takes milliseconds, and most sandboxes have the same.
const MAX_CACHED: usize = 16;

static CACHE: Mutex<VecDeque<(Rules, Arc<[u64]>)>> = Mutex::new(VecDeque::new());

/// What a filter depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rules {
    allowed: BTreeSet<String>,
    fork: bool,
    exec: bool,
    /// Whether files without a name must not be executed.
    only_named: bool,
    /// Whether denied calls are sent to the supervisor.
    notify: bool,
}

impl Rules {
    /// A deny list removes calls from the default list.
    fn of(security: &Security) -> Self {
        let allowed = match &security.syscalls {
            SyscallRules::Allow(names) => names.iter().cloned().collect(),
            SyscallRules::Deny(names) => {
                syscalls::allowed(security.debug).into_iter().filter(|name| !names.contains(name)).collect()
            }
        };
        let only_named = security.executables.is_some();
        let notify = security.violation_limit.is_some();
        Self { allowed, fork: security.fork, exec: security.exec, only_named, notify }
    }
}

/// The filter for a plan, one BPF instruction per word.
///
/// # Errors
/// [`Error::Unenforceable`] if the plan denies a call that every launch needs.
pub(crate) fn filter(security: &Security) -> Result<Arc<[u64]>, Error> {
    let rules = Rules::of(security);
    if let Some(filter) = cached(&rules) {
        return Ok(filter);
    }
    if REQUIRED.iter().any(|name| !rules.allowed.contains(*name)) {
        return Err(Error::Unenforceable { field: "policy.syscalls" });
    }
    let filter: Arc<[u64]> = compile(&rules)?.into();
    cache(rules, Arc::clone(&filter));
    Ok(filter)
}

fn cached(rules: &Rules) -> Option<Arc<[u64]>> {
    let cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    cache.iter().find(|(known, _)| known == rules).map(|(_, filter)| Arc::clone(filter))
}

fn cache(rules: Rules, filter: Arc<[u64]>) {
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    cache.push_back((rules, filter));
    if cache.len() > MAX_CACHED {
        cache.pop_front();
    }
}

fn compile(rules: &Rules) -> Result<Vec<u64>, Error> {
    let deny = if rules.notify { ScmpAction::Notify } else { ScmpAction::Errno(Errno::PERM.raw_os_error()) };
    let mut context = ScmpFilterContext::new(deny)?;
    context.set_act_badarch(ScmpAction::KillProcess)?;
    // A binary tree: a call costs a few comparisons instead of hundreds.
    context.set_ctl_optimize(2)?;
    add_rule(&mut context, "clone3", ScmpAction::Errno(Errno::NOSYS.raw_os_error()), &[])?;
    for name in &rules.allowed {
        for condition in rules::conditions(name, rules) {
            add_rule(&mut context, name, ScmpAction::Allow, &condition)?;
        }
    }
    export(&context)
}

/// Adds a rule, unless this machine does not have the call.
fn add_rule(
    context: &mut ScmpFilterContext,
    name: &str,
    action: ScmpAction,
    condition: &[libseccomp::ScmpArgCompare],
) -> Result<(), Error> {
    let Some(number) = number(name) else { return Ok(()) };
    context.add_rule_conditional(action, ScmpSyscall::from_raw_syscall(number), condition)?;
    Ok(())
}

fn export(context: &ScmpFilterContext) -> Result<Vec<u64>, Error> {
    let mut file = File::from(fd::memfd("filter", b"").map_err(io::Error::from)?);
    context.export_bpf(&file)?;
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes.chunks_exact(8).filter_map(|word| word.try_into().ok()).map(u64::from_ne_bytes).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn security(syscalls: SyscallRules) -> Security {
        Security {
            syscalls,
            violation_limit: Some(1),
            fork: true,
            exec: true,
            executables: None,
            debug: false,
        }
    }

    #[test]
    fn filter_is_cached_by_its_rules() {
        let all = security(SyscallRules::Allow(syscalls::allowed(false)));
        let first = filter(&all).unwrap();
        assert!(Arc::ptr_eq(&first, &filter(&all).unwrap()));
        let other = filter(&Security { fork: false, ..all }).unwrap();
        assert_ne!(first, other);
    }

    #[test]
    fn denying_a_required_call_is_refused() {
        for name in REQUIRED {
            let error = filter(&security(SyscallRules::Deny(vec![name.to_owned()]))).unwrap_err();
            assert!(matches!(error, Error::Unenforceable { field: "policy.syscalls" }), "{name}: {error}");
        }
    }

    #[test]
    fn every_default_call_has_a_number() {
        let without: Vec<_> =
            syscalls::allowed(true).into_iter().filter(|name| number(name).is_none()).collect();
        assert_eq!(without, Vec::<String>::new());
    }
}
