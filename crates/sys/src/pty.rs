//! Pseudo-terminals.

use std::{
    os::fd::{AsFd, OwnedFd},
    thread,
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
};
use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
    process::Pid,
    pty::OpenptFlags,
    termios::Winsize,
};
use serde::{Deserialize, Serialize};

use crate::call::from_nix;

/// Both sides of a pseudo-terminal, close-on-exec.
#[derive(Debug)]
pub struct Pty {
    /// The side of the terminal emulator.
    pub controller: OwnedFd,
    /// The side of the command.
    pub terminal: OwnedFd,
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

/// Limits how many pseudo-terminals can be open in the mount namespace of a process, which must
/// have its own `/dev/pts`. Needs root. Blocks for less than a millisecond.
///
/// # Errors
/// As `open(2)`, `setns(2)` and `mount(2)`.
pub fn limit(process: Pid, max: u32) -> Result<(), Errno> {
    let path = format!("/proc/{process}/ns/mnt");
    let namespace = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // On a thread of its own, which does not return from the namespace.
    let remount = move || {
        unshare(CloneFlags::CLONE_FS).map_err(from_nix)?;
        setns(namespace, CloneFlags::CLONE_NEWNS).map_err(from_nix)?;
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        let options = format!("mode=620,ptmxmode=666,max={max}");
        mount(None::<&str>, "/dev/pts", None::<&str>, flags, Some(options.as_str()))
            .map_err(from_nix)
    };
    thread::spawn(remount).join().unwrap_or(Err(Errno::CANCELED))
}

impl Pty {
    /// Opens a pseudo-terminal of this size in the `/dev/pts` of this mount namespace. Takes only
    /// the system calls `openat` and `ioctl`.
    ///
    /// # Errors
    /// As `open(2)`, `unlockpt(3)` and `ioctl(TIOCGPTPEER)`.
    pub fn open(size: WindowSize) -> Result<Self, Errno> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let open_flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let controller = rustix::fs::openat(CWD, "/dev/ptmx", open_flags, Mode::empty())?;
        rustix::pty::unlockpt(&controller)?;
        // By descriptor: in another mount namespace the name may refer to another terminal.
        let terminal = rustix::pty::ioctl_tiocgptpeer(&controller, flags)?;
        set_window_size(&controller, size)?;
        Ok(Self { controller, terminal })
    }
}

/// Whether a descriptor is the side of the terminal emulator.
#[must_use]
pub fn is_controller(fd: impl AsFd) -> bool {
    rustix::pty::ptsname(fd, Vec::new()).is_ok()
}

/// Sets the size of a terminal. Its foreground processes get SIGWINCH.
///
/// # Errors
/// As `ioctl(TIOCSWINSZ)`.
pub fn set_window_size(terminal: impl AsFd, size: WindowSize) -> Result<(), Errno> {
    let winsize = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, winsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_have_the_size_that_was_set() {
        let pty = Pty::open(WindowSize { columns: 100, rows: 30 }).unwrap();
        assert!(is_controller(&pty.controller) && !is_controller(&pty.terminal));
        let size = rustix::termios::tcgetwinsize(&pty.terminal).unwrap();
        assert_eq!((size.ws_col, size.ws_row), (100, 30));
        set_window_size(&pty.controller, WindowSize { columns: 7, rows: 5 }).unwrap();
        let size = rustix::termios::tcgetwinsize(&pty.terminal).unwrap();
        assert_eq!((size.ws_col, size.ws_row), (7, 5));
    }
}
