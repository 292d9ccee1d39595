//! The filter of `codelia-init` itself, once it has started the command's process: it only
//! supervises then. Any other call kills it, and with it the sandbox.

use std::sync::OnceLock;

use libseccomp::{ScmpAction, ScmpFilterContext};

use super::{add_rule, program};
use crate::Error;

/// What supervising takes: messages, events, signals, reaping, and memory for them.
#[rustfmt::skip]
const ALLOWED: [&str; 22] = [
    "sendmsg", "recvmsg", "poll", "ppoll", "read", "close", "kill", "wait4", "waitid", "getpid", "getrusage",
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
    program::export(&context)
}
