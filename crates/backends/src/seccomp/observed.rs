//! The calls that the supervisor observes where the plan logs them: the filter sends them to it,
//! and they continue. None of them may be a violation for its arguments, or it would continue too.

use codelia_policy::LoggedCalls;

/// `O_ACCMODE`, `O_CREAT` and `O_TRUNC`: an `open` without any of these changes nothing.
pub(crate) const CHANGES: u64 = 0o1103;

/// A call and where its arguments are.
#[derive(Debug)]
pub(crate) struct ObservedCall {
    pub(crate) name: &'static str,
    pub(crate) form: Form,
}

/// The meaning of the arguments of a call, by their index.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Form {
    /// Sends a signal to a process.
    Signal { target: usize, signal: usize },
    /// Sends a signal to a process that a descriptor names.
    PidfdSignal,
    /// Opens a file; observed if that can change something.
    Open { name: Name, flags: usize },
    /// Changes a file; the second name is where it is moved or linked.
    File { name: Name, to: Option<Name>, mode: Option<usize> },
    /// Removes a file or directory.
    Delete { name: Name },
}

/// Where the name of a file is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Name {
    /// Relative to the working directory.
    Cwd(usize),
    /// Relative to the directory of a descriptor.
    At(usize, usize),
    /// The file of a descriptor.
    Open(usize),
    /// Text that is not resolved.
    Text(usize),
}

use Name::{At, Cwd, Open, Text};

const fn signal(name: &'static str, target: usize, signal: usize) -> ObservedCall {
    ObservedCall { name, form: Form::Signal { target, signal } }
}

const fn file(
    name: &'static str,
    path: Name,
    to: Option<Name>,
    mode: Option<usize>,
) -> ObservedCall {
    ObservedCall { name, form: Form::File { name: path, to, mode } }
}

const fn delete(name: &'static str, path: Name) -> ObservedCall {
    ObservedCall { name, form: Form::Delete { name: path } }
}

const fn open(name: &'static str, path: Name, flags: usize) -> ObservedCall {
    ObservedCall { name, form: Form::Open { name: path, flags } }
}

/// Calls that send signals. `tgkill` and its like name the process first.
const SIGNALS: &[ObservedCall] = &[
    signal("kill", 0, 1),
    signal("tkill", 0, 1),
    signal("tgkill", 0, 2),
    signal("rt_sigqueueinfo", 0, 1),
    signal("rt_tgsigqueueinfo", 0, 2),
    ObservedCall { name: "pidfd_send_signal", form: Form::PidfdSignal },
];

/// Calls that change files, or open them so that they can be changed.
const FILES: &[ObservedCall] = &[
    open("open", Cwd(0), 1),
    open("openat", At(0, 1), 2),
    file("creat", Cwd(0), None, None),
    file("truncate", Cwd(0), None, None),
    file("mkdir", Cwd(0), None, None),
    file("mkdirat", At(0, 1), None, None),
    file("mknod", Cwd(0), None, None),
    file("mknodat", At(0, 1), None, None),
    file("rename", Cwd(0), Some(Cwd(1)), None),
    file("renameat", At(0, 1), Some(At(2, 3)), None),
    file("renameat2", At(0, 1), Some(At(2, 3)), None),
    file("link", Cwd(0), Some(Cwd(1)), None),
    file("linkat", At(0, 1), Some(At(2, 3)), None),
    file("symlink", Cwd(1), Some(Text(0)), None),
    file("symlinkat", At(1, 2), Some(Text(0)), None),
    file("chmod", Cwd(0), None, Some(1)),
    file("fchmod", Open(0), None, Some(1)),
    file("fchmodat", At(0, 1), None, Some(2)),
    file("fchmodat2", At(0, 1), None, Some(2)),
    file("chown", Cwd(0), None, None),
    file("lchown", Cwd(0), None, None),
    file("fchown", Open(0), None, None),
    file("fchownat", At(0, 1), None, None),
    delete("unlink", Cwd(0)),
    delete("unlinkat", At(0, 1)),
    delete("rmdir", Cwd(0)),
];

/// The calls that are observed.
pub(crate) fn observed(logged: LoggedCalls) -> impl Iterator<Item = &'static ObservedCall> {
    let signals = if logged.signals { SIGNALS } else { &[] };
    let files = if logged.files { FILES } else { &[] };
    signals.iter().chain(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::{
        denials::{Answer, DENIALS, EXECUTABLE_MEMORY},
        number,
    };

    #[test]
    fn no_observed_call_can_be_a_violation() {
        let denials = DENIALS.iter().flat_map(|group| group.denials).chain(EXECUTABLE_MEMORY);
        let violations: Vec<_> = denials
            .filter(|denial| matches!(denial.answer, Answer::Violation))
            .map(|it| it.call)
            .collect();
        assert!(violations.contains(&"ioctl"), "{violations:?}");
        for ObservedCall { name, .. } in observed(LoggedCalls { signals: true, files: true }) {
            assert!(!violations.contains(name), "{name}");
            assert!(number(name).is_some(), "{name}");
        }
    }
}
