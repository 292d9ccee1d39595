//! The log of a command's signals and file operations, where the plan asks for it.
//!
//! The log only observes: each call continues, and the kernel reads the caller's memory again. So a
//! second thread of the command can have the log show another name than the one that is used. The
//! log is for people; nothing is decided by it. What it keeps is bounded in number, size and rate,
//! and the rest is counted.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use codelia_policy::Security;
use codelia_sys::{
    Errno,
    seccomp::{self as listener, Notification},
    task_files,
};

use crate::seccomp::{self, CHANGES, Form, Name, ObservedCall, Rules};

/// Operations that are kept of a run.
const MAX_KEPT: usize = 1000;
/// Operations that are kept in a second, so that a burst leaves room for what follows.
const MAX_PER_SECOND: u32 = 200;
/// Bytes of all names that are kept, and of each.
const MAX_TEXT: usize = 64 * 1024;
const MAX_NAME: usize = 512;

/// This many deletions within this time are suspicious.
const MANY_DELETIONS: u64 = 500;
const DELETION_WINDOW: Duration = Duration::from_secs(10);
/// Signals to this many different processes are suspicious.
const MANY_TARGETS: usize = 50;

/// A request of a command, in one call or several equal ones in a row. Whether the call succeeded
/// is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// When the first call was made.
    pub at: Instant,
    /// The process, by its number in the sandbox. `None` if it could not be read.
    pub pid: Option<u32>,
    /// The name of the system call.
    pub call: &'static str,
    /// The file.
    pub path: Option<String>,
    /// Where it was moved or linked.
    pub to: Option<String>,
    /// The new permissions.
    pub mode: Option<u32>,
    /// The process or group that the signal is for, as the call names it.
    pub target: Option<i32>,
    /// The number of the signal.
    pub signal: Option<i32>,
    /// The number of equal calls.
    pub count: u64,
}

impl Operation {
    fn is_same(&self, other: &Self) -> bool {
        let Self { at: _, pid, call, path, to, mode, target, signal, count: _ } = self;
        (pid, call, path, to) == (&other.pid, &other.call, &other.path, &other.to)
            && (mode, target, signal) == (&other.mode, &other.target, &other.signal)
    }

    fn text(&self) -> usize {
        [&self.path, &self.to].into_iter().flatten().map(String::len).sum()
    }
}

/// The log of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Operations {
    /// The operations that were kept, in their order.
    pub kept: Vec<Operation>,
    /// The number of operations that were only counted.
    pub dropped: u64,
    /// The number of all operations, by system call.
    pub totals: BTreeMap<&'static str, u64>,
    /// The suspicious patterns that were seen, with the number of operations at the end.
    pub suspicious: BTreeMap<&'static str, u64>,
}

impl Operations {
    /// Keeps an operation, and returns the bytes of its names if it is not like the last one.
    fn keep(&mut self, operation: Operation) -> usize {
        match self.kept.last_mut() {
            Some(last) if last.is_same(&operation) => {
                last.count += 1;
                0
            }
            _ => {
                let text = operation.text();
                self.kept.push(operation);
                text
            }
        }
    }
}

/// Logs the calls of one sandbox.
#[derive(Debug)]
pub(super) struct OperationLog {
    /// By number.
    calls: HashMap<i32, &'static ObservedCall>,
    operations: Arc<Mutex<Operations>>,
    /// Bytes of the names that are kept.
    text: usize,
    rate: Window,
    patterns: Patterns,
}

impl OperationLog {
    /// The log for a plan. A call that the plan denies is none of its business.
    pub(super) fn new(security: &Security) -> Self {
        let calls = || {
            let rules = Rules::for_plan(security);
            rules.observed().filter_map(|call| Some((seccomp::number(call.name)?, call))).collect()
        };
        Self {
            calls: if security.logged.any() { calls() } else { HashMap::new() },
            operations: Arc::default(),
            text: 0,
            rate: Window::default(),
            patterns: Patterns::default(),
        }
    }

    pub(super) fn operations(&self) -> Arc<Mutex<Operations>> {
        self.operations.clone()
    }

    /// Whether the call is one that is logged and allowed.
    pub(super) fn observes(&self, call: Notification) -> bool {
        self.calls.get(&call.nr).is_some_and(|observed| match observed.form {
            Form::Open { flags, .. } => call.args[flags] & CHANGES != 0,
            _ => true,
        })
    }

    /// Logs a call that waits.
    pub(super) fn add(&mut self, listener: &OwnedFd, call: Notification) -> Result<(), Errno> {
        let Some(&observed) = self.calls.get(&call.nr) else { return Ok(()) };
        let now = Instant::now();
        let target = target(observed.form, call);
        let is_kept = self.rate.add(now, Duration::from_secs(1)) <= u64::from(MAX_PER_SECOND)
            && self.lock().kept.len() < MAX_KEPT
            && self.text < MAX_TEXT;
        let operation = is_kept.then(|| describe(observed, call, target, now));
        // Only now is it certain that memory and links were those of the caller.
        let is_waiting = listener::is_waiting(listener, call)?;
        let pattern = self.patterns.check(observed.form, call, target.filter(|_| is_waiting), now);
        let mut operations = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        *operations.totals.entry(observed.name).or_default() += 1;
        if let Some(pattern) = pattern {
            let count = operations.suspicious.entry(pattern).or_default();
            *count += 1;
            if *count == 1 {
                tracing::warn!(pattern, "suspicious operations of a command");
            }
        }
        match operation.filter(|_| is_waiting) {
            Some(operation) => self.text += operations.keep(operation),
            None => operations.dropped += 1,
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Operations> {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The process that a signal is for. Where a descriptor names it, its number in its own namespace.
fn target(form: Form, call: Notification) -> Option<i32> {
    match form {
        // The kernel reads 32 bits.
        Form::Signal { target, .. } => Some(call.args[target] as u32 as i32),
        Form::PidfdSignal => {
            let pid = task_files::pid_of_descriptor(call.pid, call.args[0] as u32 as i32);
            pid.ok().and_then(|pid| pid.try_into().ok())
        }
        Form::Open { .. } | Form::File { .. } | Form::Delete { .. } => None,
    }
}

fn signal(form: Form, call: Notification) -> Option<i32> {
    match form {
        Form::Signal { signal, .. } => Some(call.args[signal] as u32 as i32),
        Form::PidfdSignal => Some(call.args[1] as u32 as i32),
        Form::Open { .. } | Form::File { .. } | Form::Delete { .. } => None,
    }
}

fn describe(
    observed: &ObservedCall,
    call: Notification,
    target: Option<i32>,
    at: Instant,
) -> Operation {
    let (path, to, mode) = match observed.form {
        Form::Open { name, .. } | Form::Delete { name } => (Some(name), None, None),
        Form::File { name, to, mode } => (Some(name), to, mode),
        Form::Signal { .. } | Form::PidfdSignal => (None, None, None),
    };
    let read = |name: Option<Name>| name.and_then(|name| read_name(name, call).ok()).map(shortened);
    Operation {
        at,
        pid: task_files::pid_in_namespace(call.pid).ok(),
        call: observed.name,
        path: read(path),
        to: read(to),
        mode: mode.map(|index| call.args[index] as u32 & 0o7777),
        target,
        signal: signal(observed.form, call),
        count: 1,
    }
}

/// The name as the command sees it. Links are not followed.
fn read_name(name: Name, call: Notification) -> Result<PathBuf, Errno> {
    let descriptor = |index: usize| call.args[index] as u32 as i32;
    let (directory, address) = match name {
        Name::Cwd(address) => (task_files::AT_FDCWD, address),
        Name::At(directory, address) => (descriptor(directory), address),
        Name::Open(file) => return task_files::path_of_descriptor(call.pid, descriptor(file)),
        Name::Text(address) => {
            let text = task_files::read_name(call.pid, call.args[address])?;
            return Ok(PathBuf::from(text.to_string_lossy().into_owned()));
        }
    };
    let name = task_files::read_name(call.pid, call.args[address])?;
    // Without `.` and double slashes.
    task_files::absolute(call.pid, directory, &name).map(|path| path.components().collect())
}

fn shortened(path: PathBuf) -> String {
    let mut text = path.to_string_lossy().into_owned();
    text.truncate(text.floor_char_boundary(MAX_NAME));
    text
}

/// Counts what happens within a time.
#[derive(Debug, Default)]
struct Window {
    began: Option<Instant>,
    count: u64,
}

impl Window {
    /// Counts one, and returns the number in the present window.
    fn add(&mut self, now: Instant, length: Duration) -> u64 {
        if self.began.is_none_or(|began| now.duration_since(began) >= length) {
            *self = Self { began: Some(now), count: 0 };
        }
        self.count += 1;
        self.count
    }
}

/// Looks for suspicious patterns in all calls, also in those that are only counted.
#[derive(Debug, Default)]
struct Patterns {
    deletions: Window,
    targets: HashSet<i32>,
}

impl Patterns {
    /// The pattern that the call is a part of.
    fn check(
        &mut self,
        form: Form,
        call: Notification,
        target: Option<i32>,
        now: Instant,
    ) -> Option<&'static str> {
        if let Form::Delete { .. } = form {
            let count = self.deletions.add(now, DELETION_WINDOW);
            return (count >= MANY_DELETIONS).then_some("many_deletions");
        }
        match (target?, signal(form, call)?) {
            // Signal 0 only asks whether the process exists.
            (1, 1..) => Some("signal_to_init"),
            (-1, 1..) => Some("signal_to_all_processes"),
            (target, _) => {
                if self.targets.len() < MANY_TARGETS {
                    self.targets.insert(target);
                }
                (self.targets.len() >= MANY_TARGETS).then_some("signals_to_many_processes")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_begins_again_after_its_length() {
        let (mut window, begin, length) =
            (Window::default(), Instant::now(), Duration::from_secs(10));
        assert_eq!((window.add(begin, length), window.add(begin, length)), (1, 2));
        assert_eq!(window.add(begin + length / 2, length), 3);
        assert_eq!(window.add(begin + length, length), 1);
    }

    #[test]
    fn long_names_are_shortened() {
        assert_eq!(shortened("/é".repeat(MAX_NAME).into()).len(), MAX_NAME - 1);
    }
}
