//! Processes: the single-threaded start, fork, exec, children, their end.

use std::{
    ffi::{CStr, CString},
    fs,
    marker::PhantomData,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Duration,
};

use nix::{
    libc,
    sys::resource::{UsageWho, getrusage},
};
use rustix::{
    io::Errno,
    process::{DumpableBehavior, Pid, PidfdFlags, Signal, WaitOptions, WaitStatus},
};
use serde::{Deserialize, Serialize};

use crate::Error;

/// Proof that this process has one thread and that its only descriptors are the three streams and
/// those opened since. Only such a process may run ordinary code between
/// the start of a child and its exec.
#[derive(Debug)]
pub struct SingleThread {
    /// Neither sent to nor shared with another thread.
    here: PhantomData<*const ()>,
}

impl SingleThread {
    /// Closes every descriptor above the three streams. To be called first in `main`, before
    /// anything is opened, in a program that starts no thread.
    ///
    /// # Errors
    /// `EINVAL` if there is another thread; as `close_range(2)`.
    pub fn claim() -> Result<Self, Errno> {
        // SAFETY: takes no pointers. With CLONE_THREAD alone it changes nothing and fails if the
        // process has another thread.
        if unsafe { libc::unshare(libc::CLONE_THREAD) } != 0 {
            return Err(crate::fd::last_errno());
        }
        crate::fd::close_range(3, 0)?;
        Ok(Self { here: PhantomData })
    }

    /// Starts a copy of this process that ends with what `child` answers. Answers its id.
    ///
    /// # Errors
    /// As `fork(2)`.
    pub fn fork(&self, child: impl FnOnce() -> i32) -> Result<Pid, Errno> {
        // SAFETY: there is no other thread that could hold a lock which the copy would wait for.
        match unsafe { libc::fork() } {
            0 => exit_at_once(child()),
            pid if pid > 0 => Pid::from_raw(pid).ok_or(Errno::INVAL),
            _ => Err(crate::fd::last_errno()),
        }
    }
}

/// Replaces the program of this process. Returns only if that failed.
#[must_use]
pub fn execute(program: &CStr, argv: &[CString], env: &[CString]) -> Errno {
    let Err(errno) = nix::unistd::execve(program, argv, env);
    from_nix(errno)
}

/// The processors that this process may use, by the host's numbers.
///
/// # Errors
/// As `sched_getaffinity(2)`.
pub fn allowed_cpus() -> Result<Vec<u32>, Error> {
    let set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0));
    let set = set.map_err(|errno| Error::new("list the processors of", "this process", from_nix(errno)))?;
    let is_set = |number: &u32| set.is_set(*number as usize).unwrap_or(false);
    Ok((0..u32::try_from(nix::sched::CpuSet::count()).unwrap_or_default()).filter(is_set).collect())
}

/// Ends this process at once, without flushing or running anything.
fn exit_at_once(code: i32) -> ! {
    // SAFETY: ends the process; nothing runs after it.
    unsafe { libc::_exit(code) }
}

/// Begins a session of its own, without a terminal. Whoever begins with one, as a container's first
/// process does, keeps it.
///
/// # Errors
/// As `setsid(2)`.
pub fn new_session() -> Result<(), Errno> {
    match rustix::process::setsid() {
        Err(Errno::PERM) if rustix::process::getsid(None)? == own_pid() => Ok(()),
        answer => answer.map(drop),
    }
}

/// Makes a terminal the controlling one of this session.
///
/// # Errors
/// As `ioctl(TIOCSCTTY)`.
pub fn take_terminal(terminal: impl AsFd) -> Result<(), Errno> {
    rustix::process::ioctl_tiocsctty(terminal)
}

/// Changes the working directory.
///
/// # Errors
/// As `fchdir(2)`.
pub fn change_directory(directory: impl AsFd) -> Result<(), Errno> {
    rustix::process::fchdir(directory)
}

/// Keeps other processes of the same user from reading, tracing or dumping this one.
///
/// # Errors
/// As `prctl(PR_SET_DUMPABLE)`.
pub fn hide_memory() -> Result<(), Errno> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
}

/// Makes every orphan among the descendants a child of this process.
///
/// # Errors
/// As `prctl(PR_SET_CHILD_SUBREAPER)`.
pub fn adopt_orphans() -> Result<(), Errno> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
}

/// Has this process killed when its parent ends.
///
/// # Errors
/// As `prctl(PR_SET_PDEATHSIG)`.
pub fn die_with_parent() -> Result<(), Errno> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
}

/// The id of this process.
#[must_use]
pub fn own_pid() -> Pid {
    rustix::process::getpid()
}

/// The user of this process, by number.
#[must_use]
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The group of this process, by number.
#[must_use]
pub fn own_gid() -> u32 {
    rustix::process::getegid().as_raw()
}

/// Kills a process. One that has ended already is fine.
///
/// # Errors
/// As `kill(2)`.
pub fn kill(pid: Pid) -> Result<(), Errno> {
    match rustix::process::kill_process(pid, Signal::KILL) {
        Err(Errno::SRCH) => Ok(()),
        answer => answer,
    }
}

/// A process for as long as this lives, whatever becomes of its id.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl From<OwnedFd> for PidFd {
    /// Of a descriptor that stands for a process.
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl PidFd {
    /// Takes hold of the process that has this id now.
    ///
    /// # Errors
    /// As `pidfd_open(2)`.
    pub fn open(pid: Pid) -> Result<Self, Errno> {
        rustix::process::pidfd_open(pid, PidfdFlags::empty()).map(Self)
    }

    /// Kills it. One that has ended already is fine.
    ///
    /// # Errors
    /// As `pidfd_send_signal(2)`.
    pub fn kill(&self) -> Result<(), Errno> {
        match rustix::process::pidfd_send_signal(&self.0, Signal::KILL) {
            Err(Errno::SRCH) => Ok(()),
            answer => answer,
        }
    }
}

/// Kills every process of the namespace but this one, which must be process 1 of it. None is fine.
///
/// # Errors
/// `EINVAL` for another process, else as `kill(2)`.
pub fn kill_all_others() -> Result<(), Errno> {
    // Elsewhere it would mean every process of the host.
    if own_pid() != Pid::INIT {
        return Err(Errno::INVAL);
    }
    // SAFETY: takes no pointers.
    let answer = unsafe { libc::kill(-1, libc::SIGKILL) };
    match if answer == 0 { Ok(()) } else { Err(crate::fd::last_errno()) } {
        Err(Errno::SRCH) => Ok(()),
        answer => answer,
    }
}

/// Sends a signal to a process group. One without processes is fine.
///
/// # Errors
/// `EINVAL` for no signal, else as `kill(2)`.
pub fn signal_group(group: Pid, signal: i32) -> Result<(), Errno> {
    // SAFETY: takes no pointers. The group's id is positive, so the call means that group alone.
    let answer = unsafe { libc::kill(-group.as_raw_nonzero().get(), signal) };
    match if answer == 0 { Ok(()) } else { Err(crate::fd::last_errno()) } {
        Err(Errno::SRCH) => Ok(()),
        answer => answer,
    }
}

/// All living descendants of a process, parents first.
///
/// # Errors
/// The kernel does not tell children (it needs `CONFIG_PROC_CHILDREN`).
pub fn descendants(pid: Pid) -> Result<Vec<Pid>, Error> {
    let mut found = children(pid)?;
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        // One that ended in between has handed its children on.
        match children(parent) {
            Ok(more) => found.extend(more),
            Err(error) if matches!(error.errno, Errno::NOENT | Errno::SRCH) => {}
            Err(error) => return Err(error),
        }
        next += 1;
    }
    Ok(found)
}

fn children(pid: Pid) -> Result<Vec<Pid>, Error> {
    let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
    let mut found = Vec::new();
    for task in fs::read_dir(&tasks).map_err(Error::io("list threads", &tasks))? {
        let path = task.map_err(Error::io("list threads", &tasks))?.path().join("children");
        let text = fs::read_to_string(&path).map_err(Error::io("list children", &path))?;
        found.extend(pids(&text));
    }
    Ok(found)
}

pub(crate) fn pids(text: &str) -> impl Iterator<Item = Pid> {
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok().and_then(Pid::from_raw))
}

/// Whether a process exists and has not ended.
#[must_use]
pub fn is_alive(pid: Pid) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    // The state follows the name, which stands in brackets and may hold anything.
    stat.is_ok_and(|text| !text.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X'])))
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
}

/// What became of the children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaped {
    /// This one ended.
    Ended(Pid, ExitStatus),
    /// There are some; none ended.
    StillRunning,
    /// There are none.
    NoChildren,
}

/// Collects a child that ended, without waiting for one.
///
/// # Errors
/// As `waitpid(2)`.
pub fn reap() -> Result<Reaped, Errno> {
    reap_with(WaitOptions::NOHANG)
}

/// Waits until a child ends and collects it.
///
/// # Errors
/// As `waitpid(2)`.
pub fn reap_next() -> Result<Reaped, Errno> {
    reap_with(WaitOptions::empty())
}

fn reap_with(options: WaitOptions) -> Result<Reaped, Errno> {
    loop {
        match rustix::process::wait(options) {
            Ok(Some((pid, status))) => return Ok(Reaped::Ended(pid, ended(status))),
            Ok(None) => return Ok(Reaped::StillRunning),
            Err(Errno::CHILD) => return Ok(Reaped::NoChildren),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Stops are never asked for, so a status is an exit code or a signal.
fn ended(status: WaitStatus) -> ExitStatus {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => ExitStatus::Exited(code),
        (None, signal) => ExitStatus::Signaled(signal.unwrap_or_default()),
    }
}

/// What the children that were collected used, with those they had collected themselves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChildrenUsage {
    /// User and system time.
    pub cpu_time: Duration,
    /// The largest resident memory of one of them.
    pub peak_memory_bytes: u64,
    /// Bytes read from devices.
    pub read_bytes: u64,
    /// Bytes written to files.
    pub written_bytes: u64,
}

/// The kernel counts what is read and written in blocks of this size.
const BLOCK: u64 = 512;

/// Reads what the collected children used.
///
/// # Errors
/// As `getrusage(2)`.
pub fn children_usage() -> Result<ChildrenUsage, Errno> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).map_err(from_nix)?;
    let micros = |time: nix::sys::time::TimeVal| {
        u64::try_from(time.tv_sec() * 1_000_000 + time.tv_usec()).unwrap_or_default()
    };
    Ok(ChildrenUsage {
        cpu_time: Duration::from_micros(micros(usage.user_time()) + micros(usage.system_time())),
        peak_memory_bytes: u64::try_from(usage.max_rss()).unwrap_or_default() * 1024,
        read_bytes: u64::try_from(usage.block_reads()).unwrap_or_default() * BLOCK,
        written_bytes: u64::try_from(usage.block_writes()).unwrap_or_default() * BLOCK,
    })
}

pub(crate) fn from_nix(errno: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(errno as i32)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn descendants_are_found_at_any_depth() {
        let script = "sh -c 'sleep 1000 & echo $!; wait' & wait";
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(shell.stdout.as_mut().unwrap()), &mut line)
            .unwrap();
        let sleeper = pids(&line).next().unwrap();
        let top = Pid::from_child(&shell);

        let found = descendants(top).unwrap();
        assert!(found.contains(&sleeper), "{found:?}");
        assert!(is_alive(sleeper));

        for pid in found.into_iter().chain([top]) {
            kill(pid).unwrap();
        }
        shell.wait().unwrap();
        assert!(!is_alive(top));
    }

    #[test]
    fn a_process_with_other_threads_cannot_claim_to_be_alone() {
        // The test harness has threads, and the refusal comes before anything is closed.
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || receiver.recv());
            assert_eq!(SingleThread::claim().unwrap_err(), Errno::INVAL);
            drop(sender);
        });
    }
}
