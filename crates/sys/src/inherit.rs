//! Descriptors that one started program inherits, and no other.

use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::Command,
};

use rustix::{
    fs::{MemfdFlags, SeekFrom},
    io::{Errno, FdFlags},
};

use crate::{overlay, process};

/// A file in memory with this content, to be read from its start, closed on exec.
///
/// # Errors
/// As `memfd_create(2)`, `write(2)` and `lseek(2)`.
pub fn memory_file(name: &str, content: &[u8]) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
    let mut rest = content;
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    rustix::fs::seek(&file, SeekFrom::Start(0))?;
    Ok(file)
}

/// Has the program inherit these descriptors under the numbers they have here. They stay closed on
/// exec in this process, so that a program started beside it by another thread gets none.
pub fn inherit(command: &mut Command, descriptors: Vec<OwnedFd>) {
    let keep_open = move || {
        for descriptor in &descriptors {
            rustix::io::fcntl_setfd(descriptor.as_fd(), FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls alone: it neither allocates nor locks.
    unsafe { command.pre_exec(keep_open) };
}

/// Has the program start in these namespaces, and be this user and group from there on if it may choose.
/// To be called instead of setting them on the command, which would come first.
pub fn start_in(command: &mut Command, spaces: Vec<OwnedFd>, ids: Option<(u32, u32)>) {
    let enter = move || {
        overlay::enter(&spaces)?;
        if let Some((uid, gid)) = ids {
            process::become_user(uid, gid)?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls alone: it neither allocates nor locks.
    unsafe { command.pre_exec(enter) };
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_program_reads_what_it_inherits_and_another_does_not_have_it() {
        let file = memory_file("test", b"content").unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut other = Command::new("cat");
        assert!(!other.arg(&path).output().unwrap().status.success());
        let mut command = Command::new("cat");
        inherit(command.arg(&path), vec![file]);
        assert_eq!(command.output().unwrap().stdout, b"content");
    }
}
