//! Decides which executable memory a process may map, where a plan lists executables.
//!
//! Landlock checks the files that the kernel executes, not those that a process maps. So a loader
//! that is executed by itself could run any program that it can read. It can map no executable
//! memory here. Every other program can map libraries that no command can change, and memory
//! without a file, as compilers at run time need.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use codelia_policy::Security;
use codelia_sys::{elf, fd};

use crate::seccomp::is_allowed;

/// The calls that map executable memory.
const CALLS: [&str; 3] = ["mmap", "mprotect", "pkey_mprotect"];

/// `MAP_ANONYMOUS`.
const ANONYMOUS: u64 = 0x20;

/// The rules of a plan that lists executables.
#[derive(Debug)]
pub(super) struct ExecutableMemory {
    /// The calls that the plan allows.
    calls: Vec<&'static str>,
    /// The listed executables.
    listed: Vec<PathBuf>,
}

impl ExecutableMemory {
    /// `None` if the plan lists no executables.
    pub(super) fn for_plan(security: &Security) -> Option<Self> {
        let listed = security.executables.clone()?;
        let calls = CALLS.into_iter().filter(|call| is_allowed(security, call)).collect();
        Some(Self { calls, listed })
    }

    /// Whether the kernel may continue the call. Everything that decides is fixed while the caller
    /// waits: its registers, its program, and, unless another thread of it replaces the descriptor,
    /// the file. A program with such threads runs its own code already.
    pub(super) fn permits(&self, name: &str, pid: u32, args: &[u64; 6]) -> bool {
        if !self.calls.contains(&name) {
            return false;
        }
        let process = PathBuf::from(format!("/proc/{pid}"));
        let maps_file = name == "mmap" && args[3] & ANONYMOUS == 0;
        !is_loader(&process) && (!maps_file || self.is_library(&process, args[4]))
    }

    /// Whether no command can write to the file behind a descriptor, or the plan lists it.
    fn is_library(&self, process: &Path, descriptor: u64) -> bool {
        // The kernel reads 32 bits.
        let link = process.join(format!("fd/{}", descriptor as u32));
        let is_listed = || fs::read_link(&link).is_ok_and(|path| self.lists(&path));
        fd::is_on_read_only_mount(&link).unwrap_or(false) || is_listed()
    }

    fn lists(&self, path: &Path) -> bool {
        self.listed.iter().any(|listed| path.starts_with(listed))
    }
}

/// Whether a process executes a loader: a relocatable program without a loader of its own. So do
/// static position-independent programs, which are not told apart. A program that cannot be read
/// counts as a loader.
fn is_loader(process: &Path) -> bool {
    let program = File::open(process.join("exe")).ok().and_then(|file| elf::read(&file));
    program.is_none_or(|program| program.is_relocatable && program.interpreter.is_none())
}

#[cfg(test)]
mod tests {
    use codelia_policy::SyscallRules;

    use super::*;

    fn memory(names: &[&str]) -> ExecutableMemory {
        let security = Security {
            syscalls: SyscallRules::Allow(names.iter().map(|&name| name.to_owned()).collect()),
            violation_limit: Some(1),
            fork: true,
            exec: true,
            executables: Some(vec!["/opt/tool".into()]),
            debug: false,
            asked_reads: Vec::new(),
            logged: Default::default(),
        };
        ExecutableMemory::for_plan(&security).unwrap()
    }

    #[test]
    fn only_allowed_calls_are_permitted() {
        let (pid, anonymous) = (std::process::id(), [0, 4096, 4, ANONYMOUS, u64::MAX, 0]);
        assert!(memory(&["mmap"]).permits("mmap", pid, &anonymous));
        assert!(!memory(&["mprotect"]).permits("mmap", pid, &anonymous));
        assert!(!memory(&["mmap"]).permits("execve", pid, &anonymous));
        assert!(!memory(&["mmap"]).permits("mmap", 0, &anonymous), "a process that is not visible");
    }

    #[test]
    fn listed_directory_covers_files_below() {
        let memory = memory(&["mmap"]);
        assert!(memory.lists(Path::new("/opt/tool/lib/a.so")));
        assert!(!memory.lists(Path::new("/opt/toolbox")));
    }
}
