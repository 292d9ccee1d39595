//! The filter of `codelia-init` itself, once it has started the command's process: it only
//! supervises then. Any other call kills it, and with it the sandbox.

use std::sync::OnceLock;

use libseccomp::{ScmpAction, ScmpFilterContext};

use super::{
    names::number,
    program::{self, add_rule},
    ranges::{Ranges, checked_architecture},
};
use crate::Error;

/// Calls that supervising takes: messages, events, signals, reaping, and memory for them.
#[rustfmt::skip]
const ALLOWED: [&str; 23] = [
    "sendmsg", "recvmsg", "poll", "ppoll", "read", "pread64", "close", "kill", "wait4", "waitid", "getpid", "getrusage",
    "clock_gettime", "brk", "mmap", "munmap", "mremap", "madvise", "sigaltstack", "rt_sigreturn",
    "restart_syscall", "exit", "exit_group",
];

static FILTER: OnceLock<Vec<u64>> = OnceLock::new();

/// The filter of `codelia-init`, one BPF instruction per word.
///
/// # Errors
/// libseccomp cannot build it.
pub(crate) fn init_filter() -> Result<Vec<u64>, Error> {
    if let Some(filter) = FILTER.get() {
        return Ok(filter.clone());
    }
    let filter = compile()?;
    Ok(FILTER.get_or_init(|| filter).clone())
}

fn compile() -> Result<Vec<u64>, Error> {
    let mut context = ScmpFilterContext::new(ScmpAction::KillProcess)?;
    context.set_act_badarch(ScmpAction::KillProcess)?;
    for name in ALLOWED {
        add_rule(&mut context, name, ScmpAction::Allow, &[])?;
    }
    let program = program::export(&context)?;
    let allowed =
        ALLOWED.into_iter().filter_map(number).filter_map(|number| number.try_into().ok());
    let ranges = Ranges::new(&allowed.collect());
    // A search of ranges, and nothing after it: when a filter is installed, the kernel runs it for
    // every number of a call, and each sandbox installs its own.
    let shorter = checked_architecture(&program)
        .zip(ranges)
        .and_then(|(architecture, ranges)| ranges.before(&program::kill_all(architecture)));
    Ok(shorter.unwrap_or(program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_is_a_search_of_ranges() {
        let filter = compile().unwrap();
        assert!(filter.len() < 2 * ALLOWED.len(), "{} instructions", filter.len());
        let architecture = checked_architecture(&filter).unwrap();
        assert!(filter.ends_with(&program::kill_all(architecture)));
    }
}
