//! Recognizes programs that a command may not execute, where a plan lists executables.
//!
//! Landlock denies them, whatever is found here: a command that changes the name after it was read,
//! or that names the program in a way that is not understood, only avoids the report.

use std::{os::fd::OwnedFd, path::PathBuf};

use codelia_policy::Security;
use codelia_sys::{
    Errno,
    seccomp::{self as listener, Notification},
    task_files,
};

use crate::seccomp::{is_allowed, number};

const AT_EMPTY_PATH: u64 = 0x1000;
/// Bytes of a path that are reported.
const MAX_PATH: usize = 256;

/// The programs that a command may execute.
#[derive(Debug)]
pub(super) struct Executions {
    /// The calls that the plan allows.
    calls: Vec<&'static str>,
    listed: Vec<PathBuf>,
    /// The root of the sandbox and where the listed paths lead to in it, once a call has shown it.
    resolved: Option<(OwnedFd, Vec<PathBuf>)>,
}

impl Executions {
    /// `None` unless the plan allows to execute listed programs only.
    pub(super) fn for_plan(security: &Security) -> Option<Self> {
        let listed = security.executables.clone().filter(|_| security.exec)?;
        let mut calls = vec!["execve", "execveat"];
        calls.retain(|call| is_allowed(security, call));
        Some(Self { calls, listed, resolved: None })
    }

    /// Whether this is an allowed call that executes a program.
    pub(super) fn handles(&self, name: &str) -> bool {
        self.calls.contains(&name)
    }

    /// The program that the call names, if it exists and is not listed.
    pub(super) fn denied(&mut self, waiting: &OwnedFd, call: Notification) -> Option<String> {
        let found = self.find(call);
        // Only now is it certain that memory and directories were those of the caller.
        if !listener::is_waiting(waiting, call).unwrap_or(false) {
            return None;
        }
        let path = found.ok().flatten()?.to_string_lossy().into_owned();
        Some(path[..path.floor_char_boundary(MAX_PATH)].to_owned())
    }

    fn find(&mut self, call: Notification) -> Result<Option<PathBuf>, Errno> {
        let program = match self.program(call)? {
            Program::File(file) => file,
            // Landlock does not know it.
            Program::Named(name) => task_files::resolve(self.root(call.pid)?, &name, true)?,
        };
        if !task_files::is_executable_file(&program)? {
            return Ok(None);
        }
        let Some(path) = task_files::path_of_regular_file(&program)? else {
            return Ok(Some(PathBuf::from("(a file without a name)")));
        };
        self.root(call.pid)?;
        let mut listed = self.resolved.iter().flat_map(|(_, listed)| listed);
        let is_listed = listed.any(|listed| path.starts_with(listed));
        Ok((!is_listed).then_some(path))
    }

    /// The program that the arguments of the call name.
    fn program(&self, call: Notification) -> Result<Program, Errno> {
        let [first, second, _, _, flags, _] = call.args;
        // Of both calls, only `execveat` has a descriptor.
        let is_relative = number("execveat") == Some(call.nr);
        // The kernel reads 32 bits.
        let (directory, address) =
            if is_relative { (first as u32 as i32, second) } else { (task_files::AT_FDCWD, first) };
        let name = task_files::read_name(call.pid, address)?;
        if is_relative && name.is_empty() && flags & AT_EMPTY_PATH != 0 {
            return task_files::open_descriptor(call.pid, directory).map(Program::File);
        }
        task_files::absolute(call.pid, directory, &name).map(Program::Named)
    }

    /// The root of the sandbox. The listed paths are resolved with it.
    fn root(&mut self, task: u32) -> Result<&OwnedFd, Errno> {
        if self.resolved.is_none() {
            let root = task_files::open_root(task)?;
            let target = |path: &PathBuf| {
                let found = task_files::resolve(&root, path, true).ok()?;
                task_files::path_of(found).ok()
            };
            let listed = self.listed.iter().filter_map(target).collect();
            self.resolved = Some((root, listed));
        }
        self.resolved.as_ref().map(|(root, _)| root).ok_or(Errno::NOENT)
    }
}

enum Program {
    /// A path in the root of the sandbox.
    Named(PathBuf),
    /// The file that a descriptor refers to.
    File(OwnedFd),
}
