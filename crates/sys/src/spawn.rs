//! Starting a program without a copy of this process in between: a copy takes the longer the more memory we have, and
//! every thread pays for it afterwards.

use std::{
    ffi::{CString, OsStr, c_char, c_int, c_void},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    ptr,
};

use nix::libc;
use rustix::{
    io::Errno,
    process::{Pid, WaitId, WaitIdOptions},
};

use crate::{
    fd::last_errno,
    process::{ExitStatus, PidFd},
};

/// What the new process needs before it executes: it calls nothing that is deep.
const STACK: usize = 64 * 1024;

/// The kernel has so many.
const SIGNALS: c_int = 64;

/// What a process that could not execute ends with. Nobody sees it.
const NOT_EXECUTED: c_int = 127;

/// A program to start, in `/`, with an empty environment, with no signal blocked or ignored, and with the descriptors that
/// are named here alone.
#[derive(Debug)]
pub struct Program {
    path: CString,
    argv: Vec<CString>,
    streams: [OwnedFd; 3],
    inherited: Vec<OwnedFd>,
    spaces: Vec<OwnedFd>,
    ids: Option<(u32, u32)>,
    leads_group: bool,
}

impl Program {
    /// The program at this path with these arguments; the descriptors are its standard streams.
    ///
    /// # Errors
    /// `EINVAL` for a NUL byte in one of them.
    pub fn new(
        path: &Path,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        streams: [OwnedFd; 3],
    ) -> Result<Self, Errno> {
        let text = |text: &OsStr| CString::new(text.as_bytes()).map_err(|_| Errno::INVAL);
        let path = text(path.as_os_str())?;
        let arguments = arguments.into_iter().map(|argument| text(argument.as_ref()));
        let argv = std::iter::once(Ok(path.clone())).chain(arguments).collect::<Result<_, _>>()?;
        Ok(Self {
            path,
            argv,
            streams,
            inherited: Vec::new(),
            spaces: Vec::new(),
            ids: None,
            leads_group: false,
        })
    }

    /// It has a process group of its own: signals of our terminal do not reach it.
    #[must_use]
    pub fn new_process_group(self) -> Self {
        Self { leads_group: true, ..self }
    }

    /// It inherits these too, under the numbers that they have here. They stay closed on exec in this process, so that
    /// a program started beside it by another thread gets none.
    #[must_use]
    pub fn inherit_fds(self, descriptors: Vec<OwnedFd>) -> Self {
        Self { inherited: descriptors, ..self }
    }

    /// It starts in these namespaces.
    #[must_use]
    pub fn enter_namespaces(self, spaces: Vec<OwnedFd>) -> Self {
        Self { spaces, ..self }
    }

    /// It is this user with this group, and no others, from its first instruction.
    #[must_use]
    pub fn as_user(self, uid: u32, gid: u32) -> Self {
        Self { ids: Some((uid, gid)), ..self }
    }

    /// Starts it. This thread waits until it is executed.
    ///
    /// # Errors
    /// What it could not become or execute, as the call that failed.
    pub fn start(&self) -> Result<Child, Errno> {
        let mut argv: Vec<*const c_char> = self.argv.iter().map(|argument| argument.as_ptr()).collect();
        argv.push(ptr::null());
        let mut inside = Inside { program: self, argv, failure: 0 };
        let mut stack = vec![0_u128; STACK / size_of::<u128>()];
        let mut pidfd: RawFd = -1;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let masked = Masked::all();
        // SAFETY: the child runs `inside` on a stack of its own, whose end is aligned, with a pointer to what only this
        // thread knows of; all of it lives until the call returns, which is when the child has executed or ended. Until
        // then it shares our memory: no handler of ours runs there, and it makes system calls alone.
        let pid = unsafe {
            libc::clone(
                in_the_child,
                stack.as_mut_ptr_range().end.cast(),
                flags,
                (&raw mut inside).cast(),
                &raw mut pidfd,
            )
        };
        let answer = if pid < 0 { Err(last_errno()) } else { Ok(()) };
        drop(masked);
        answer?;
        let pid = Pid::from_raw(pid).ok_or(Errno::INVAL)?;
        // SAFETY: the call made it for us.
        let child = Child { pid, handle: unsafe { OwnedFd::from_raw_fd(pidfd) }.into() };
        match inside.failure {
            0 => Ok(child),
            errno => {
                child.reap(WaitIdOptions::empty())?;
                Err(Errno::from_raw_os_error(errno))
            }
        }
    }

    /// Makes this process the program. Returns only if that failed.
    fn execute(&self, argv: &[*const c_char]) -> Errno {
        let become_it = || -> Result<(), Errno> {
            if self.leads_group {
                // SAFETY: takes no pointers.
                called(unsafe { libc::setpgid(0, 0) })?;
            }
            for space in &self.spaces {
                // SAFETY: the descriptor is open.
                called(unsafe { libc::setns(space.as_raw_fd(), 0) })?;
            }
            // SAFETY: the path ends.
            called(unsafe { libc::chdir(c"/".as_ptr()) })?;
            for (number, stream) in (0..).zip(&self.streams) {
                // SAFETY: both are descriptors of this process alone: it has a table of its own.
                called(unsafe { libc::dup2(stream.as_raw_fd(), number) })?;
            }
            for descriptor in &self.inherited {
                // SAFETY: the descriptor is open.
                called(unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, 0) })?;
            }
            if let Some((uid, gid)) = self.ids {
                become_user(uid, gid)?;
            }
            forget_signals()
        };
        if let Err(errno) = become_it() {
            return errno;
        }
        let environment: [*const c_char; 1] = [ptr::null()];
        // SAFETY: all strings end, and so do both lists.
        unsafe { libc::execve(self.path.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
        last_errno()
    }
}

/// What the child is told, and where it tells why it failed.
struct Inside<'a> {
    program: &'a Program,
    argv: Vec<*const c_char>,
    failure: c_int,
}

extern "C" fn in_the_child(argument: *mut c_void) -> c_int {
    // SAFETY: it is the pointer of `start`, which stands still.
    let inside = unsafe { &mut *argument.cast::<Inside<'_>>() };
    inside.failure = inside.program.execute(&inside.argv).raw_os_error();
    NOT_EXECUTED
}

/// The calls themselves: the library's would change every thread of the process whose memory this is. That memory is none
/// of the user's business, who could trace a process of its own.
fn become_user(uid: u32, gid: u32) -> Result<(), Errno> {
    // SAFETY: the first takes no list, the others no pointers.
    unsafe {
        called(libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()))?;
        called(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        called(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
        called(libc::prctl(libc::PR_SET_DUMPABLE, 0))
    }
}

/// No handler, nothing ignored, nothing blocked. The calls themselves: the library keeps two signals to itself.
fn forget_signals() -> Result<(), Errno> {
    // As the kernel has it, all zero is the default action with an empty mask.
    let (default, mask) = ([0_u64; 4], [0_u64; 1]);
    let unasked = ptr::null_mut::<u64>();
    for signal in 1..=SIGNALS {
        // SAFETY: the action lives, the old one is not asked for. Those that cannot be set answer an error, and the
        // handlers are of this process alone.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), unasked, size_of_val(&mask))
        };
    }
    // SAFETY: the mask lives, the old one is not asked for.
    called(unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, mask.as_ptr(), unasked, size_of_val(&mask))
    })
}

fn called(answer: impl Into<i64>) -> Result<(), Errno> {
    if answer.into() < 0 { Err(last_errno()) } else { Ok(()) }
}

/// All signals are blocked for this thread as long as this lives.
struct Masked(libc::sigset_t);

impl Masked {
    fn all() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: both sets are ours; the first is filled before it is read, and the call fills the other.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self(before.assume_init())
        }
    }
}

impl Drop for Masked {
    fn drop(&mut self) {
        // SAFETY: the set lives, the old one is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// A process that was started. It must be collected: nothing happens when it is dropped.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    /// Readable when it has ended.
    handle: PidFd,
}

impl Child {
    /// Its id, its own until it is collected.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Kills it. One that has ended already is fine.
    ///
    /// # Errors
    /// As `pidfd_send_signal(2)`.
    pub fn kill(&self) -> Result<(), Errno> {
        self.handle.kill()
    }

    /// Collects it if it has ended.
    ///
    /// # Errors
    /// As `waitid(2)`: `ECHILD` if it was collected before.
    pub fn try_wait(&self) -> Result<Option<ExitStatus>, Errno> {
        self.reap(WaitIdOptions::NOHANG)
    }

    /// Kills it and collects it.
    ///
    /// # Errors
    /// It was collected before.
    pub fn kill_and_wait(&self) -> Result<(), Errno> {
        self.kill()?;
        self.reap(WaitIdOptions::empty()).map(drop)
    }

    fn reap(&self, options: WaitIdOptions) -> Result<Option<ExitStatus>, Errno> {
        let ended =
            rustix::process::waitid(WaitId::PidFd(self.handle.as_fd()), WaitIdOptions::EXITED | options)?;
        Ok(ended.map(|ended| match (ended.exit_status(), ended.terminating_signal()) {
            (Some(code), _) => ExitStatus::Exited(code),
            (None, signal) => ExitStatus::Signaled(signal.unwrap_or_default()),
        }))
    }
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

impl AsRawFd for Child {
    fn as_raw_fd(&self) -> RawFd {
        self.handle.as_fd().as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read};

    use super::*;
    use crate::fd::{self, memfd};

    /// What a shell says, and how it ends.
    fn run(script: &str, change: impl FnOnce(Program) -> Program) -> (String, ExitStatus) {
        let (output, input) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let null = || fd::dev_null().unwrap();
        let shell = Program::new(Path::new("/bin/sh"), ["-c", script], [null(), input, null()]).unwrap();
        let shell = change(shell);
        let child = shell.start().unwrap();
        drop(shell);
        let mut text = String::new();
        File::from(output).read_to_string(&mut text).unwrap();
        (text, child.reap(WaitIdOptions::empty()).unwrap().unwrap())
    }

    #[test]
    fn a_program_has_its_arguments_streams_and_end_and_an_empty_environment() {
        let (said, status) =
            run("echo $0 $#; pwd; cat; /usr/bin/env | grep -v -e ^PWD= -e ^_= -e ^SHLVL=; exit 7", |it| it);
        assert_eq!((said.as_str(), status), ("/bin/sh 0\n/\n", ExitStatus::Exited(7)));
        assert_eq!(run("kill -9 $$", |it| it).1, ExitStatus::Signaled(9));
    }

    #[test]
    fn a_program_that_is_ended_is_collected() {
        let null = || fd::dev_null().unwrap();
        let program = Program::new(Path::new("/bin/sleep"), ["1000"], [null(), null(), null()]).unwrap();
        let child = program.start().unwrap();
        child.kill_and_wait().unwrap();
        assert_eq!(child.try_wait(), Err(Errno::CHILD));
        assert!(!Path::new(&format!("/proc/{}", child.pid())).exists());
    }

    #[test]
    fn a_program_reads_what_it_inherits_and_another_does_not_have_it() {
        let file = memfd("test", b"content").unwrap();
        let script = format!("cat <&{}", file.as_raw_fd());
        assert_eq!(run(&script, |it| it).0, "");
        assert_eq!(run(&script, |it| it.inherit_fds(vec![file])).0, "content");
    }

    #[test]
    fn a_program_leads_a_group_if_it_is_to_and_has_no_signal_of_ours() {
        // Programs of Rust ignore this one.
        assert_eq!(run("kill -PIPE $$", |it| it).1, ExitStatus::Signaled(libc::SIGPIPE));
        let script =
            "cut -d' ' -f5 /proc/$$/stat | grep -qx $$ && exec grep -e SigBlk -e SigIgn /proc/self/status";
        let nothing = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n";
        assert_eq!(run(script, Program::new_process_group), (nothing.to_owned(), ExitStatus::Exited(0)));
        assert_eq!(run(script, |it| it), (String::new(), ExitStatus::Exited(1)), "the control");
    }

    #[test]
    fn a_program_is_the_user_it_is_to_be_with_no_other_groups_and_we_are_not() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root becomes another user");
        }
        let (ids, _) = run("id -u; id -G; grep CapEff /proc/self/status", |it| it.as_user(300_123, 300_124));
        assert_eq!(ids, "300123\n300124\nCapEff:\t0000000000000000\n");
        assert!(rustix::process::geteuid().is_root());
        let dumpable = rustix::process::dumpable_behavior().unwrap();
        assert_eq!(
            dumpable,
            rustix::process::DumpableBehavior::NotDumpable,
            "it had our memory for a moment"
        );
    }

    #[test]
    fn what_cannot_be_executed_says_why_and_leaves_no_process() {
        let null = || fd::dev_null().unwrap();
        let start = |path: &str| {
            let program = Program::new(Path::new(path), [""; 0], [null(), null(), null()]).unwrap();
            program.start().map(drop)
        };
        assert_eq!(start("/nowhere"), Err(Errno::NOENT));
        assert_eq!(start("/etc/passwd"), Err(Errno::ACCESS));
        let nul = Program::new(Path::new("/bin/true"), ["a\0b"], [null(), null(), null()]);
        assert_eq!(nul.map(drop).unwrap_err(), Errno::INVAL);
    }
}
