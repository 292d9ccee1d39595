//! The filter of system calls: from what a plan allows to the BPF program that `codelia-init` installs.
//!
//! Allowed calls pass, all others are notified of and answered by the supervisor, or refused with `EPERM`
//! where nobody can be told. Two things are decided
//! in the kernel alone: `clone3` is answered with `ENOSYS`, since its flags are in memory that no filter
//! can read and C libraries fall back to `clone`; a call by another ABI (ia32, x32) kills the process.

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

/// What the command's process calls between the filter and the command. A plan that forbids one of them
/// could not be carried out as it is meant.
const NEEDED: [&str; 14] = [
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

/// So many filters are kept: making one takes milliseconds, and most sandboxes have the same.
const MOST_KEPT: usize = 16;

static KEPT: Mutex<VecDeque<(Rules, Arc<[u64]>)>> = Mutex::new(VecDeque::new());

/// What a filter depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rules {
    allowed: BTreeSet<String>,
    fork: bool,
    exec: bool,
    /// Whether only named files may be executed.
    only_named: bool,
    /// Whether somebody is told of what does not pass.
    tells: bool,
}

impl Rules {
    /// All but some calls means: all of the default list but these.
    fn of(security: &Security) -> Self {
        let allowed = match &security.syscalls {
            SyscallRules::Allow(names) => names.iter().cloned().collect(),
            SyscallRules::Deny(names) => {
                syscalls::allowed(security.debug).into_iter().filter(|name| !names.contains(name)).collect()
            }
        };
        let only_named = security.executables.is_some();
        let tells = security.violation_limit.is_some();
        Self { allowed, fork: security.fork, exec: security.exec, only_named, tells }
    }
}

/// The filter for a plan, one instruction in each word.
///
/// # Errors
/// [`Error::Unenforceable`] if it forbids what every launch needs.
pub(crate) fn filter(security: &Security) -> Result<Arc<[u64]>, Error> {
    let rules = Rules::of(security);
    if let Some(filter) = kept(&rules) {
        return Ok(filter);
    }
    if NEEDED.iter().any(|name| !rules.allowed.contains(*name)) {
        return Err(Error::Unenforceable { field: "policy.syscalls" });
    }
    let filter: Arc<[u64]> = compile(&rules)?.into();
    keep(rules, Arc::clone(&filter));
    Ok(filter)
}

fn kept(rules: &Rules) -> Option<Arc<[u64]>> {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.iter().find(|(known, _)| known == rules).map(|(_, filter)| Arc::clone(filter))
}

fn keep(rules: Rules, filter: Arc<[u64]>) {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.push_back((rules, filter));
    if kept.len() > MOST_KEPT {
        kept.pop_front();
    }
}

fn compile(rules: &Rules) -> Result<Vec<u64>, Error> {
    let refusal =
        if rules.tells { ScmpAction::Notify } else { ScmpAction::Errno(Errno::PERM.raw_os_error()) };
    let mut context = ScmpFilterContext::new(refusal)?;
    context.set_act_badarch(ScmpAction::KillProcess)?;
    // A search tree: a call costs a few comparisons, not hundreds.
    context.set_ctl_optimize(2)?;
    add(&mut context, "clone3", ScmpAction::Errno(Errno::NOSYS.raw_os_error()), &[])?;
    for name in &rules.allowed {
        for condition in rules::conditions(name, rules) {
            add(&mut context, name, ScmpAction::Allow, &condition)?;
        }
    }
    export(&context)
}

/// A call that this machine does not have needs no rule.
fn add(
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
    fn a_filter_is_made_once_and_differs_with_its_rules() {
        let all = security(SyscallRules::Allow(syscalls::allowed(false)));
        let first = filter(&all).unwrap();
        assert!(Arc::ptr_eq(&first, &filter(&all).unwrap()));
        let other = filter(&Security { fork: false, ..all }).unwrap();
        assert_ne!(first, other);
    }

    #[test]
    fn a_plan_that_forbids_what_a_launch_needs_is_refused() {
        for name in NEEDED {
            let error = filter(&security(SyscallRules::Deny(vec![name.to_owned()]))).unwrap_err();
            assert!(matches!(error, Error::Unenforceable { field: "policy.syscalls" }), "{name}: {error}");
        }
    }

    #[test]
    fn every_call_of_the_default_list_has_a_number_on_x86_64() {
        let without: Vec<_> =
            syscalls::allowed(true).into_iter().filter(|name| number(name).is_none()).collect();
        assert_eq!(without, Vec::<String>::new());
    }
}
