//! The system calls: `quotactl_fd(2)`, and `quotactl(2)` with the device where the kernel is older
//! than 5.14.

use std::{
    ffi::{CString, OsStr},
    fs,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::PathBuf,
};

use nix::libc;
use rustix::{
    fs::{major, minor},
    io::Errno,
};

use super::{Amounts, QuotaKind};
use crate::{call::check, proc_self::MountLine};

/// Values of the kernel's interface that `libc` lacks.
const USRQUOTA: u32 = 0;
const PRJQUOTA: u32 = 2;
const Q_GETQUOTA: u32 = 0x80_0007;
const Q_SETQUOTA: u32 = 0x80_0008;
/// Reads the state of all kinds, of ext4 as of XFS.
const Q_XGETQSTATV: u32 = 0x5808;
/// Sets the limits of blocks and inodes, and nothing else.
const QIF_LIMITS: u32 = 1 | 4;
/// The unit of block limits.
const BLOCK: u64 = 1024;

const STATE_VERSION: i8 = 1;
const USER_ENFORCED: u16 = 1 | 1 << 1;
const PROJECT_ENFORCED: u16 = 1 << 4 | 1 << 5;

/// `struct if_dqblk`.
#[repr(C)]
#[derive(Default)]
struct Block {
    hard_blocks: u64,
    soft_blocks: u64,
    bytes: u64,
    hard_inodes: u64,
    soft_inodes: u64,
    inodes: u64,
    block_time: u64,
    inode_time: u64,
    valid: u32,
}

/// `struct fs_quota_statv`: the flags, and 152 bytes that nobody needs here.
#[repr(C)]
pub(super) struct State {
    version: i8,
    pad: u8,
    flags: u16,
    in_core: u32,
    rest: [u64; 19],
}

impl State {
    pub(super) fn is_enforced(&self, kind: QuotaKind) -> bool {
        let needed = match kind {
            QuotaKind::User => USER_ENFORCED,
            QuotaKind::Project => PROJECT_ENFORCED,
        };
        self.flags & needed == needed
    }
}

/// The state of all kinds. `ENOSYS` if every kind is off.
pub(super) fn state(directory: &OwnedFd) -> Result<State, Errno> {
    let mut state = State { version: STATE_VERSION, pad: 0, flags: 0, in_core: 0, rest: [0; 19] };
    // SAFETY: the kernel writes a `struct fs_quota_statv` of version 1, which is not larger.
    unsafe { quotactl(directory, Q_XGETQSTATV, QuotaKind::User, 0, (&raw mut state).cast()) }?;
    Ok(state)
}

pub(super) fn set(
    directory: &OwnedFd,
    kind: QuotaKind,
    id: u32,
    limits: Amounts,
) -> Result<(), Errno> {
    // A limit that is not a whole block is rounded down, but never to zero, which is unlimited.
    let hard_blocks = if limits.bytes == 0 { 0 } else { (limits.bytes / BLOCK).max(1) };
    let mut block =
        Block { hard_blocks, hard_inodes: limits.inodes, valid: QIF_LIMITS, ..Block::default() };
    // SAFETY: the kernel reads a `struct if_dqblk`.
    unsafe { quotactl(directory, Q_SETQUOTA, kind, id, (&raw mut block).cast()) }
}

/// The amounts that are used, and the limits.
pub(super) fn get(
    directory: &OwnedFd,
    kind: QuotaKind,
    id: u32,
) -> Result<(Amounts, Amounts), Errno> {
    let mut block = Block::default();
    // SAFETY: the kernel writes a `struct if_dqblk`.
    unsafe { quotactl(directory, Q_GETQUOTA, kind, id, (&raw mut block).cast()) }?;
    let used = Amounts { bytes: block.bytes, inodes: block.inodes };
    Ok((
        used,
        Amounts { bytes: block.hard_blocks.saturating_mul(BLOCK), inodes: block.hard_inodes },
    ))
}

/// # Safety
/// `address` points to what the command reads or writes.
unsafe fn quotactl(
    directory: &OwnedFd,
    command: u32,
    kind: QuotaKind,
    id: u32,
    address: *mut libc::c_char,
) -> Result<(), Errno> {
    let kind = match kind {
        QuotaKind::User => USRQUOTA,
        QuotaKind::Project => PRJQUOTA,
    };
    let command = (command << 8 | kind).cast_signed();
    // SAFETY: the descriptor is open, and the caller vouches for the address.
    let result = unsafe {
        libc::syscall(libc::SYS_quotactl_fd, directory.as_raw_fd(), command, id, address)
    };
    match check(result) {
        // The kernel is too old, or this command has nothing to say: then the other call agrees.
        Err(Errno::NOSYS) => {}
        answer => return answer,
    }
    let device =
        CString::new(device(directory)?.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the path is NUL-terminated, and the caller vouches for the address.
    check(unsafe { libc::quotactl(command, device.as_ptr(), id.cast_signed(), address) })
}

/// The block device that a directory is on.
fn device(directory: &OwnedFd) -> Result<PathBuf, Errno> {
    let number = rustix::fs::fstat(directory)?.st_dev;
    let number = format!("{}:{}", major(number), minor(number));
    let table = fs::read("/proc/self/mountinfo").map_err(|_| Errno::NODEV)?;
    let mount = MountLine::parse_all(&table).find(|mount| mount.device == number.as_bytes());
    let source = mount.map(|mount| PathBuf::from(OsStr::from_bytes(mount.source)));
    source.filter(|path| path.is_absolute()).ok_or(Errno::NODEV)
}
