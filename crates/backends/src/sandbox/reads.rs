//! Reads that wait for a person's decision: opens the files that a command asks for, and answers
//! with the descriptor once somebody has allowed it.
//!
//! The command's own rights (Landlock) end where decisions begin. So a call that is none of our
//! business continues in the kernel, whatever its memory holds by then: it can open nothing that
//! needs a decision. Only descriptors from here can, and each is opened before its decision and
//! decided by the path of the file that was opened.
//!
//! Blocks for as long as file systems do: it runs on a thread of its own.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, mpsc as blocking},
};

use codelia_policy::{Ids, Security};
use codelia_sys::{
    Errno, fs_identity,
    seccomp::{self as listener, Notification, Response},
    task_files,
};
use tokio::sync::mpsc;

use super::wake::Wake;
use crate::seccomp::{self, is_allowed};

/// Requests of one sandbox that are open at the same time. Further calls wait until one is answered.
const MAX_REQUESTS: usize = 8;
/// Calls of one sandbox that wait. Each holds a descriptor. Further ones are denied.
const MAX_WAITING: usize = 256;
/// Decisions that are remembered. More are asked for again.
const MAX_DECISIONS: usize = 4096;
/// Bytes of a path that a person can be asked about.
const MAX_PATH: usize = 1024;

const O_ACCMODE: u64 = 0o3;
const O_EXCL: u64 = 0o200;
const O_TRUNC: u64 = 0o1000;
const O_NONBLOCK: u64 = 0o4000;
const O_DIRECTORY: u64 = 0o200_000;
const O_NOFOLLOW: u64 = 0o400_000;
const O_CLOEXEC: u64 = 0o2_000_000;
const O_PATH: u64 = 0o10_000_000;

/// The reads of one sandbox that wait for decisions.
#[derive(Debug)]
pub struct AskedReads {
    requests: mpsc::Receiver<ReadRequest>,
    decisions: blocking::Sender<ReadDecision>,
    wake: Wake,
}

/// A file that needs a decision, and the process that reads it first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadRequest {
    /// The file, as the command sees it.
    pub path: PathBuf,
    /// The process, which may lie about itself: nothing is decided by this.
    pub reader: Reader,
}

/// The process that reads a file. Unknown parts are 0 or empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reader {
    /// The number of the process in the sandbox.
    pub pid: u32,
    /// The program that it executes, as the command sees it.
    pub exe: String,
    /// The working directory of the process, as the command sees it.
    pub cwd: String,
}

impl Reader {
    fn read(task: u32) -> Self {
        let text = |path: Result<PathBuf, Errno>| path.ok().and_then(|path| readable(&path));
        Self {
            pid: task_files::pid_in_namespace(task).unwrap_or_default(),
            exe: text(task_files::executable(task)).unwrap_or_default(),
            cwd: text(task_files::working_directory(task)).unwrap_or_default(),
        }
    }
}

/// A path that people can read.
fn readable(path: &Path) -> Option<String> {
    let is_readable = |text: &&str| text.len() <= MAX_PATH && !text.chars().any(char::is_control);
    path.to_str().filter(is_readable).map(str::to_owned)
}

/// A decision about a file, or about all files below a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadDecision {
    /// The file or directory, as the command sees it.
    pub path: PathBuf,
    /// Whether it is about all files below.
    pub is_directory: bool,
    /// Whether they may be read.
    pub allow: bool,
}

impl AskedReads {
    /// The next file that needs a decision: the first one of its directory for which a call waits.
    /// `None` when the command can ask for no more. Cancel-safe.
    pub async fn next(&mut self) -> Option<ReadRequest> {
        self.requests.recv().await
    }

    /// Applies a decision to the calls that wait and to later ones. Each file that
    /// [`next`](Self::next) returned needs one.
    pub fn decide(&self, decision: ReadDecision) {
        // Without a receiver the sandbox is gone.
        if self.decisions.send(decision).is_ok() {
            self.wake.wake();
        }
    }
}

impl Drop for AskedReads {
    /// Denies the calls that wait, also one whose request nobody received.
    fn drop(&mut self) {
        self.requests.close();
        self.wake.wake();
    }
}

/// Opens files for the calls of one sandbox.
#[derive(Debug)]
pub(super) struct ReadGate {
    listener: Arc<OwnedFd>,
    /// The command's user on the host. Files are opened with its rights.
    ids: Ids,
    /// Paths below which reads need a decision.
    asked: Vec<PathBuf>,
    calls: OpenCalls,
    /// The root of the sandbox, once a call has shown it.
    root: Option<OwnedFd>,
    decisions: Decisions,
    waiting: Vec<WaitingCall>,
    /// The file that was asked for in each directory.
    open: HashMap<PathBuf, PathBuf>,
    requests: mpsc::Sender<ReadRequest>,
    decided: blocking::Receiver<ReadDecision>,
}

impl ReadGate {
    /// The gate for a plan's paths, and the other side of it.
    pub(super) fn new(
        listener: Arc<OwnedFd>,
        security: &Security,
        ids: Ids,
        wake: Wake,
    ) -> (Self, AskedReads) {
        let (requests, received) = mpsc::channel(MAX_REQUESTS);
        let (sent, decided) = blocking::channel();
        let gate = Self {
            listener,
            ids,
            asked: security.asked_reads.clone(),
            calls: OpenCalls::for_plan(security),
            root: None,
            decisions: Decisions::default(),
            waiting: Vec::new(),
            open: HashMap::new(),
            requests,
            decided,
        };
        (gate, AskedReads { requests: received, decisions: sent, wake })
    }

    /// Applies the decisions that have arrived.
    pub(super) fn apply_decisions(&mut self) -> Result<(), Errno> {
        while let Ok(decision) = self.decided.try_recv() {
            let ReadDecision { path, .. } = &decision;
            self.open.retain(|directory, file| file != path && !directory.starts_with(path));
            self.decisions.add(decision);
        }
        self.settle()
    }

    /// Whether the call opens a file, which the plan allows.
    pub(super) fn handles(&self, call: Notification) -> bool {
        self.calls.parse(call).is_some()
    }

    /// Answers a call, or keeps it until there is a decision.
    pub(super) fn handle(&mut self, call: Notification) -> Result<(), Errno> {
        match self.find(call)? {
            Found::Gone => Ok(()),
            Found::Free => self.respond(call, Response::Continue),
            Found::Failed(errno) => self.respond(call, Response::Fail(errno)),
            Found::Asked(waiting) => match self.decisions.get(&waiting.path) {
                Some(allow) => self.answer(&waiting, allow),
                None => {
                    // While it waits, it is the caller.
                    let reader = Reader::read(call.pid);
                    match listener::is_waiting(&self.listener, call)? {
                        true => self.wait(WaitingCall { reader, ..waiting }),
                        false => Ok(()),
                    }
                }
            },
        }
    }

    /// Opens what the call names, if that needs a decision.
    fn find(&mut self, call: Notification) -> Result<Found, Errno> {
        let Some(open) = self.calls.parse(call).filter(|open| open.reads_a_file()) else {
            return Ok(Found::Free);
        };
        let name = task_files::read_name(call.pid, open.name)
            .and_then(|name| task_files::absolute(call.pid, open.directory, &name));
        let root = match self.root.take() {
            Some(root) => Ok(root),
            None => task_files::open_root(call.pid),
        };
        // Only now is it certain that memory, directories and root were those of the caller.
        if !listener::is_waiting(&self.listener, call)? {
            return Ok(Found::Gone);
        }
        let (Ok(name), Ok(root)) = (name, root) else { return Ok(Found::Free) };
        let opened = fs_identity::as_user(self.ids.uid, self.ids.gid, || {
            self.open_asked(&root, &name, open)
        });
        self.root = Some(root);
        Ok(match opened.flatten() {
            Ok(Some((path, file))) => Found::new(call, path, file, open),
            Ok(None) => Found::Free,
            Err(errno) => Found::Failed(errno),
        })
    }

    /// Opens a regular file for reading; `None` for what needs no decision, or does not exist.
    fn open_asked(
        &self,
        root: &OwnedFd,
        name: &Path,
        open: OpenCall,
    ) -> Result<Option<(PathBuf, OwnedFd)>, Errno> {
        let Ok(found) = task_files::resolve(root, name, open.flags & O_NOFOLLOW == 0) else {
            return Ok(None);
        };
        let path = task_files::path_of_regular_file(&found)?;
        let Some(path) = path.filter(|path| self.asked.iter().any(|asked| path.starts_with(asked)))
        else {
            return Ok(None);
        };
        let file = task_files::open_to_read(&found)?;
        task_files::set_nonblocking(&file, open.flags & O_NONBLOCK != 0)?;
        Ok(Some((path, file)))
    }

    fn wait(&mut self, waiting: WaitingCall) -> Result<(), Errno> {
        if self.waiting.len() >= MAX_WAITING {
            let listener = &self.listener;
            self.waiting.retain(|it| listener::is_waiting(listener, it.call).unwrap_or(false));
        }
        if self.waiting.len() >= MAX_WAITING {
            return self.answer(&waiting, false);
        }
        self.waiting.push(waiting);
        self.ask()
    }

    /// Answers the calls that are decided, and asks for others.
    fn settle(&mut self) -> Result<(), Errno> {
        for waiting in std::mem::take(&mut self.waiting) {
            match self.decisions.get(&waiting.path) {
                Some(allow) => self.answer(&waiting, allow)?,
                None => self.waiting.push(waiting),
            }
        }
        self.ask()
    }

    /// Asks for the first file of each directory in which calls wait.
    fn ask(&mut self) -> Result<(), Errno> {
        for waiting in std::mem::take(&mut self.waiting) {
            if self.is_asked_for(&waiting) {
                self.waiting.push(waiting);
            } else {
                // Nobody can be asked.
                self.answer(&waiting, false)?;
            }
        }
        Ok(())
    }

    /// Whether somebody was asked, or will be.
    fn is_asked_for(&mut self, waiting: &WaitingCall) -> bool {
        if self.requests.is_closed() {
            return false;
        }
        let path = &waiting.path;
        let directory = path.parent().unwrap_or(path.as_path());
        if self.open.contains_key(directory) || self.open.len() >= MAX_REQUESTS {
            return true;
        }
        let request = ReadRequest { path: path.clone(), reader: waiting.reader.clone() };
        let is_sent = self.requests.try_send(request).is_ok();
        if is_sent {
            self.open.insert(directory.to_owned(), path.to_owned());
        }
        is_sent
    }

    fn answer(&self, waiting: &WaitingCall, allow: bool) -> Result<(), Errno> {
        if !allow {
            return self.respond(waiting.call, Response::Fail(Errno::ACCESS));
        }
        listener::respond_with(
            &self.listener,
            waiting.call,
            waiting.file.as_fd(),
            waiting.close_on_exec,
        )
    }

    fn respond(&self, call: Notification, response: Response) -> Result<(), Errno> {
        listener::respond(&self.listener, call, response)
    }
}

/// The result of looking for the file that a call opens.
enum Found {
    /// The caller is gone.
    Gone,
    /// Nothing that needs a decision.
    Free,
    /// The file cannot be opened.
    Failed(Errno),
    /// A file that needs a decision.
    Asked(WaitingCall),
}

impl Found {
    fn new(call: Notification, path: PathBuf, file: OwnedFd, open: OpenCall) -> Self {
        if readable(&path).is_none() {
            // Nobody could read what they decide about.
            return Self::Failed(Errno::ACCESS);
        }
        let close_on_exec = open.flags & O_CLOEXEC != 0;
        Self::Asked(WaitingCall { call, path, file, close_on_exec, reader: Reader::default() })
    }
}

/// A call that waits for a decision.
#[derive(Debug)]
struct WaitingCall {
    call: Notification,
    path: PathBuf,
    /// The file that the caller gets if that is allowed.
    file: OwnedFd,
    close_on_exec: bool,
    reader: Reader,
}

/// The calls that open files, by number. `None` if the plan denies one.
#[derive(Debug, Clone, Copy)]
struct OpenCalls {
    open: Option<i32>,
    openat: Option<i32>,
}

/// The arguments of a call that opens a file.
#[derive(Debug, Clone, Copy)]
struct OpenCall {
    directory: i32,
    /// The address of the name.
    name: u64,
    flags: u64,
}

impl OpenCalls {
    fn for_plan(security: &Security) -> Self {
        let number = |name| is_allowed(security, name).then(|| seccomp::number(name)).flatten();
        Self { open: number("open"), openat: number("openat") }
    }

    fn parse(self, call: Notification) -> Option<OpenCall> {
        let [first, second, third, ..] = call.args;
        if Some(call.nr) == self.openat {
            // The kernel reads 32 bits.
            Some(OpenCall {
                directory: first as u32 as i32,
                name: second,
                flags: third & 0xffff_ffff,
            })
        } else if Some(call.nr) == self.open {
            Some(OpenCall {
                directory: task_files::AT_FDCWD,
                name: first,
                flags: second & 0xffff_ffff,
            })
        } else {
            None
        }
    }
}

impl OpenCall {
    /// Whether it can read the content of a regular file. What is asked for is mounted read-only,
    /// so that others fail or create nothing there.
    fn reads_a_file(self) -> bool {
        self.flags & O_ACCMODE == 0 && self.flags & (O_PATH | O_DIRECTORY | O_TRUNC | O_EXCL) == 0
    }
}

/// Decisions that were made for a sandbox.
#[derive(Debug, Default)]
struct Decisions {
    files: HashMap<PathBuf, bool>,
    directories: HashMap<PathBuf, bool>,
}

impl Decisions {
    fn add(&mut self, decision: ReadDecision) {
        let ReadDecision { path, is_directory, allow } = decision;
        let map = if is_directory { &mut self.directories } else { &mut self.files };
        if map.len() >= MAX_DECISIONS {
            map.clear();
        }
        map.insert(path, allow);
    }

    /// The decision about a file: its own, else that of the nearest directory.
    fn get(&self, path: &Path) -> Option<bool> {
        let of_directory =
            || path.ancestors().skip(1).find_map(|above| self.directories.get(above).copied());
        self.files.get(path).copied().or_else(of_directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(path: &str, is_directory: bool, allow: bool) -> ReadDecision {
        ReadDecision { path: path.into(), is_directory, allow }
    }

    #[test]
    fn nearest_decision_counts() {
        let mut decisions = Decisions::default();
        decisions.add(decision("/opt", true, true));
        decisions.add(decision("/opt/a", true, false));
        decisions.add(decision("/opt/a/file", false, true));
        for (path, expected) in [
            ("/opt/x", Some(true)),
            ("/opt/a/x", Some(false)),
            ("/opt/a/b/x", Some(false)),
            ("/opt/a/file", Some(true)),
            ("/opt/ab", Some(true)),
            ("/opt", None),
            ("/optional", None),
        ] {
            assert_eq!(decisions.get(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn remembered_decisions_are_bounded() {
        let mut decisions = Decisions::default();
        for number in 0..=MAX_DECISIONS {
            decisions.add(decision(&format!("/opt/{number}"), false, true));
        }
        assert_eq!(decisions.files.len(), 1);
        assert_eq!(decisions.get(Path::new("/opt/0")), None, "asked for again");
    }

    #[test]
    fn only_plain_reads_are_asked_for() {
        let reads = |flags| OpenCall { directory: 0, name: 0, flags }.reads_a_file();
        assert!(reads(0) && reads(O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
        for flags in [1, 2, 3, O_PATH, O_DIRECTORY, O_TRUNC, O_EXCL] {
            assert!(!reads(flags), "{flags:o}");
        }
    }
}
