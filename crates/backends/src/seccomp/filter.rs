//! Builds the filter of a plan from its rules, and keeps the last ones.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use codelia_policy::{Security, SyscallRules};
use codelia_sys::Errno;
use libseccomp::{ScmpAction, ScmpArgCompare, ScmpFilterContext};

use super::{
    denials::{Answer, Argument, DENIALS, Denial, EXECUTABLE_MEMORY, EXECUTABLE_MEMORY_FILES},
    names::number,
    program::{self, add_rule},
    ranges::Ranges,
    rules::{self, Rules},
};
use crate::Error;

/// Calls that the command's process makes between installing the filter and `execve`. A plan that
/// denies one of them cannot be enforced.
const REQUIRED: [&str; 15] = [
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
    "chdir",
    "getcwd",
    "ioctl",
    "exit_group",
];

/// Building a filter takes milliseconds, and most sandboxes have the same.
const MAX_CACHED: usize = 16;

static CACHE: Mutex<VecDeque<Cached>> = Mutex::new(VecDeque::new());

/// A filter, with what it was built from.
#[derive(Debug)]
struct Cached {
    /// The list of calls. The same list is compared by its address.
    syscalls: SyscallRules,
    /// Without the names.
    rules: Rules,
    filter: Arc<[u64]>,
}

/// The filter for a plan, one BPF instruction per word.
///
/// # Errors
/// [`Error::Unenforceable`] if the plan denies a call that every launch needs, or needs a
/// supervisor and has none.
pub(crate) fn filter(security: &Security, seals_memory_files: bool) -> Result<Arc<[u64]>, Error> {
    if let Some(filter) = cached(security, seals_memory_files) {
        return Ok(filter);
    }
    let rules = Rules { seals_memory_files, ..Rules::for_plan(security) };
    if REQUIRED.iter().any(|name| !rules.allowed.contains(*name)) {
        return Err(Error::Unenforceable { field: "policy.syscalls" });
    }
    let needs_supervisor = [
        // The supervisor decides about executable memory.
        ("policy.process.allowed_executables", rules.only_listed),
        ("policy.filesystem.mode", rules.asks),
        ("policy.logging", rules.logged.any()),
    ];
    if let Some((field, _)) = needs_supervisor.iter().find(|(_, needs)| *needs && !rules.notify) {
        return Err(Error::Unenforceable { field });
    }
    let filter: Arc<[u64]> = compile(&rules)?.into();
    let syscalls = security.syscalls.clone();
    let rules = Rules { allowed: BTreeSet::new(), ..rules };
    cache(Cached { syscalls, rules, filter: Arc::clone(&filter) });
    Ok(filter)
}

fn cached(security: &Security, seals_memory_files: bool) -> Option<Arc<[u64]>> {
    let rules = Rules { seals_memory_files, ..Rules::without_names(security) };
    let cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let known =
        cache.iter().find(|known| known.rules == rules && known.syscalls == security.syscalls);
    known.map(|known| Arc::clone(&known.filter))
}

fn cache(new: Cached) {
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    cache.push_back(new);
    if cache.len() > MAX_CACHED {
        cache.pop_front();
    }
}

/// One program: the calls that are always allowed, the denials, then the rest of the allow-list.
fn compile(rules: &Rules) -> Result<Vec<u64>, Error> {
    let denials = denial_program(rules)?;
    let always = always_allowed(rules);
    if let Some(ranges) = Ranges::new(&always)
        && let Some(program) =
            ranges.before(&program::chain(&denials, &allow_program(rules, &always)?)?)
    {
        return Ok(program);
    }
    program::chain(&denials, &allow_program(rules, &BTreeSet::new())?)
}

/// The numbers of the calls that are allowed with any arguments.
fn always_allowed(rules: &Rules) -> BTreeSet<u32> {
    let denied: BTreeSet<_> = denials_of(rules).filter_map(|denial| number(denial.call)).collect();
    let is_always = |name: &&String| rules::conditions(name, rules).iter().any(Vec::is_empty);
    let allowed = rules.allowed.iter().filter(is_always).filter_map(|name| number(name));
    allowed
        .filter(|number| !denied.contains(number))
        .filter_map(|number| number.try_into().ok())
        .collect()
}

fn denials_of(rules: &Rules) -> impl Iterator<Item = &'static Denial> {
    let executable_memory = if rules.only_listed { EXECUTABLE_MEMORY } else { &[] };
    let memory_files = if rules.seals_memory_files { EXECUTABLE_MEMORY_FILES } else { &[] };
    let by_plan = executable_memory.iter().chain(memory_files);
    DENIALS.iter().flat_map(|group| group.denials).chain(by_plan)
}

fn denial_program(rules: &Rules) -> Result<Vec<u64>, Error> {
    let mut context = new_context(ScmpAction::Allow)?;
    for denial in denials_of(rules) {
        let action = match denial.answer {
            Answer::Violation => violation(rules),
            Answer::Fail(errno) => ScmpAction::Errno(errno.raw_os_error()),
            Answer::Ignore => ScmpAction::Errno(0),
        };
        for condition in conditions(denial) {
            add_rule(&mut context, denial.call, action, &condition)?;
        }
    }
    program::export(&context)
}

/// Every combination of the comparisons of both arguments.
fn conditions(denial: &Denial) -> Vec<Vec<ScmpArgCompare>> {
    let mut conditions = vec![Vec::new()];
    for comparisons in denial.arguments.into_iter().flatten().map(Argument::comparisons) {
        let extended = conditions.iter().flat_map(|condition| {
            comparisons
                .iter()
                .map(move |&comparison| [condition.as_slice(), &[comparison]].concat())
        });
        conditions = extended.collect();
    }
    conditions
}

/// The allow-list without the calls that are allowed before.
fn allow_program(rules: &Rules, before: &BTreeSet<u32>) -> Result<Vec<u64>, Error> {
    let mut context = new_context(violation(rules))?;
    let is_before = |name: &&String| {
        let number = number(name).and_then(|number| u32::try_from(number).ok());
        number.is_some_and(|number| before.contains(&number))
    };
    for name in rules.allowed.iter().filter(|name| !is_before(name)) {
        for condition in rules::conditions(name, rules) {
            add_rule(&mut context, name, ScmpAction::Allow, &condition)?;
        }
    }
    program::export(&context)
}

fn new_context(default: ScmpAction) -> Result<ScmpFilterContext, Error> {
    let mut context = ScmpFilterContext::new(default)?;
    context.set_act_badarch(ScmpAction::KillProcess)?;
    // A binary tree: a call costs a few comparisons instead of hundreds.
    context.set_ctl_optimize(2)?;
    Ok(context)
}

fn violation(rules: &Rules) -> ScmpAction {
    if rules.notify { ScmpAction::Notify } else { ScmpAction::Errno(Errno::PERM.raw_os_error()) }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{LoggedCalls, syscalls};

    use super::*;

    fn security(syscalls: SyscallRules) -> Security {
        Security {
            syscalls,
            violation_limit: Some(1),
            fork: true,
            exec: true,
            executables: None,
            debug: false,
            asked_reads: Vec::new(),
            logged: LoggedCalls::default(),
        }
    }

    #[test]
    fn filter_is_cached_by_its_rules() {
        let all = security(SyscallRules::Allow(syscalls::allowed(false)));
        let first = filter(&all, false).unwrap();
        assert!(Arc::ptr_eq(&first, &filter(&all, false).unwrap()));
        assert_ne!(first, filter(&all, true).unwrap());
        let other = filter(&Security { fork: false, ..all }, false).unwrap();
        assert_ne!(first, other);
    }

    #[test]
    fn ranges_shorten_the_filter() {
        let rules = Rules::for_plan(&security(SyscallRules::Allow(syscalls::allowed(false))));
        let without = allow_program(&rules, &BTreeSet::new()).unwrap();
        let without = program::chain(&denial_program(&rules).unwrap(), &without).unwrap();
        let with = compile(&rules).unwrap();
        assert!(
            3 * with.len() < 2 * without.len(),
            "{} and {} instructions",
            with.len(),
            without.len()
        );
    }

    #[test]
    fn denying_a_required_call_is_refused() {
        for name in REQUIRED {
            let error =
                filter(&security(SyscallRules::Deny([name.to_owned()].into())), false).unwrap_err();
            assert!(
                matches!(error, Error::Unenforceable { field: "policy.syscalls" }),
                "{name}: {error}"
            );
        }
    }

    #[test]
    fn every_default_call_has_a_number() {
        let without: Vec<_> =
            syscalls::allowed(true).iter().filter(|name| number(name).is_none()).cloned().collect();
        assert_eq!(without, Vec::<String>::new());
    }
}
