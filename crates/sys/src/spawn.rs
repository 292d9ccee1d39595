//! Starting a program with `CLONE_VFORK` instead of `fork`. A fork copies the page tables, which
//! takes longer the more memory the process uses, and every thread pays for the page faults
//! afterwards.

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
    call::{check, last_errno},
    process::{ExitStatus, PidFd},
    signal::{self, SIGNAL_SET_BYTES},
};

/// The stack of the child before exec: it makes no deep calls.
const STACK_BYTES: usize = 64 * 1024;

/// The exit code of a child that failed before exec. [`Program::start`] reaps it.
const NOT_EXECUTED: c_int = 127;

/// A program to start in `/`, with an empty environment, no blocked or ignored signals, and only
/// the descriptors named here.
#[derive(Debug)]
pub struct Program {
    path: CString,
    argv: Vec<CString>,
    stdio: [OwnedFd; 3],
    inherited: Vec<OwnedFd>,
    namespaces: Vec<OwnedFd>,
    ids: Option<(u32, u32)>,
    cgroups: Vec<OwnedFd>,
    new_process_group: bool,
    dies_with_parent: bool,
}

impl Program {
    /// A program with these arguments and these descriptors as stdin, stdout and stderr.
    ///
    /// # Errors
    /// `EINVAL` for a NUL byte in the path or an argument.
    pub fn new(
        path: &Path,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        stdio: [OwnedFd; 3],
    ) -> Result<Self, Errno> {
        let c_string = |text: &OsStr| CString::new(text.as_bytes()).map_err(|_| Errno::INVAL);
        let path = c_string(path.as_os_str())?;
        let arguments = arguments.into_iter().map(|argument| c_string(argument.as_ref()));
        let argv = std::iter::once(Ok(path.clone())).chain(arguments).collect::<Result<_, _>>()?;
        Ok(Self {
            path,
            argv,
            stdio,
            inherited: Vec::new(),
            namespaces: Vec::new(),
            ids: None,
            cgroups: Vec::new(),
            new_process_group: false,
            dies_with_parent: false,
        })
    }

    /// Starts it in a new process group, so that signals from our terminal do not reach it.
    #[must_use]
    pub fn new_process_group(self) -> Self {
        Self { new_process_group: true, ..self }
    }

    /// Passes these descriptors on, under the numbers that they have here. They stay close-on-exec
    /// in this process, so that a program started concurrently by another thread does not get them.
    #[must_use]
    pub fn inherit_fds(self, descriptors: Vec<OwnedFd>) -> Self {
        Self { inherited: descriptors, ..self }
    }

    /// Starts it in these namespaces, entered in order.
    #[must_use]
    pub fn enter_namespaces(self, namespaces: Vec<OwnedFd>) -> Self {
        Self { namespaces, ..self }
    }

    /// Starts it as this user and group, without supplementary groups.
    #[must_use]
    pub fn as_user(self, uid: u32, gid: u32) -> Self {
        Self { ids: Some((uid, gid)), ..self }
    }

    /// Starts it in a cgroup, by the descriptors of
    /// [`Group::join_fds`](crate::cgroup::Group::join_fds).
    #[must_use]
    pub fn join_cgroups(self, cgroups: Vec<OwnedFd>) -> Self {
        Self { cgroups, ..self }
    }

    /// Has the kernel kill it when the thread that starts it ends.
    #[must_use]
    pub fn die_with_parent(self) -> Self {
        Self { dies_with_parent: true, ..self }
    }

    /// Starts the program. Blocks this thread until the exec has succeeded or failed.
    ///
    /// # Errors
    /// The errno of the call that failed in the child, or of `clone(2)`.
    pub fn start(&self) -> Result<Child, Errno> {
        let mut argv: Vec<*const c_char> =
            self.argv.iter().map(|argument| argument.as_ptr()).collect();
        argv.push(ptr::null());
        let mut context = ChildContext { program: self, argv, errno: 0 };
        let mut stack = vec![0_u128; STACK_BYTES / size_of::<u128>()];
        let mut pidfd: RawFd = -1;
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let blocked = SignalsBlocked::block_all();
        // SAFETY: the child runs `child_main` on a separate stack with an aligned end, and gets a
        // pointer to `context`, which no other thread knows. Both live until the call returns,
        // which is when the child has executed or exited. Until then it shares our memory; signals
        // are blocked, so none of our handlers runs in it, and it only makes system calls.
        let pid = unsafe {
            libc::clone(
                child_main,
                stack.as_mut_ptr_range().end.cast(),
                flags,
                (&raw mut context).cast(),
                &raw mut pidfd,
            )
        };
        // Read errno before unblocking signals can change it.
        let result = check(pid);
        drop(blocked);
        result?;
        let pid = Pid::from_raw(pid).ok_or(Errno::INVAL)?;
        // SAFETY: CLONE_PIDFD has just created this descriptor; nothing else owns it.
        let child = Child { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) }.into() };
        match context.errno {
            0 => Ok(child),
            errno => {
                child.wait(WaitIdOptions::empty())?;
                Err(Errno::from_raw_os_error(errno))
            }
        }
    }

    /// Runs in the child: sets it up and executes the program. Returns only on failure.
    fn exec(&self, argv: &[*const c_char]) -> Errno {
        if let Err(errno) = self.prepare_child() {
            return errno;
        }
        let environment: [*const c_char; 1] = [ptr::null()];
        // SAFETY: all strings are NUL-terminated and both lists end with a null pointer.
        unsafe { libc::execve(self.path.as_ptr(), argv.as_ptr(), environment.as_ptr()) };
        last_errno()
    }

    /// The steps between clone and exec. Makes system calls only.
    fn prepare_child(&self) -> Result<(), Errno> {
        if self.new_process_group {
            // SAFETY: takes no pointers.
            check(unsafe { libc::setpgid(0, 0) })?;
        }
        for namespace in &self.namespaces {
            // SAFETY: takes no pointers, and the descriptor is open.
            check(unsafe { libc::setns(namespace.as_raw_fd(), 0) })?;
        }
        // SAFETY: the path is NUL-terminated.
        check(unsafe { libc::chdir(c"/".as_ptr()) })?;
        for (number, stream) in (0..).zip(&self.stdio) {
            // SAFETY: without CLONE_FILES the child has its own descriptor table, so this replaces
            // no descriptor of the parent.
            check(unsafe { libc::dup2(stream.as_raw_fd(), number) })?;
        }
        for descriptor in &self.inherited {
            // SAFETY: takes no pointers, and the descriptor is open.
            check(unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, 0) })?;
        }
        for cgroup in &self.cgroups {
            // SAFETY: the buffer has the length passed, and the descriptor is open.
            check(unsafe { libc::write(cgroup.as_raw_fd(), c"0".as_ptr().cast(), 1) } as i64)?;
        }
        // After the namespaces and cgroups, which may need the privileges that this drops.
        if let Some((uid, gid)) = self.ids {
            become_user(uid, gid)?;
        }
        if self.dies_with_parent {
            // After a change of ids, which clears it. SAFETY: takes no pointers.
            check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
        }
        // Last: a signal that arrives afterwards may end the child.
        reset_signals()
    }
}

/// Shared with the child while it runs in our memory.
struct ChildContext<'a> {
    program: &'a Program,
    argv: Vec<*const c_char>,
    /// Set by the child if it fails.
    errno: c_int,
}

extern "C" fn child_main(argument: *mut c_void) -> c_int {
    // SAFETY: the pointer comes from `start`, whose thread is suspended while the child uses it.
    let context = unsafe { &mut *argument.cast::<ChildContext<'_>>() };
    context.errno = context.program.exec(&context.argv).raw_os_error();
    NOT_EXECUTED
}

/// Drops supplementary groups and switches ids. Calls the kernel directly: libc's functions would
/// change every thread of the parent, whose memory this is. Not dumpable, since the new user may
/// trace its own processes and must not see that memory.
fn become_user(uid: u32, gid: u32) -> Result<(), Errno> {
    // SAFETY: `setgroups` with length 0 reads no list; the others take no pointers.
    unsafe {
        check(libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()))?;
        check(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        check(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
        check(libc::prctl(libc::PR_SET_DUMPABLE, 0))
    }
}

/// Resets every disposition and unblocks every signal. Calls the kernel directly: libc reserves two
/// signals.
fn reset_signals() -> Result<(), Errno> {
    signal::reset_dispositions();
    let empty_mask = [0_u64; 1];
    let previous = ptr::null_mut::<u64>();
    // SAFETY: the mask has the size passed; the pointer for the previous one is null, so nothing is
    // written.
    check(unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            empty_mask.as_ptr(),
            previous,
            SIGNAL_SET_BYTES,
        )
    })
}

/// Blocks all signals of this thread until dropped.
struct SignalsBlocked {
    previous: libc::sigset_t,
}

impl SignalsBlocked {
    fn block_all() -> Self {
        let mut all = MaybeUninit::uninit();
        let mut previous = MaybeUninit::uninit();
        // SAFETY: both sets are ours; one is filled before it is read, the call fills the other.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), previous.as_mut_ptr());
            Self { previous: previous.assume_init() }
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set is valid, and the pointer for the previous one is null.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.previous, ptr::null_mut())
        };
    }
}

/// A started process. The owner must reap it: dropping does nothing.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    /// Readable when the process has ended.
    pidfd: PidFd,
}

impl Child {
    /// The pid of the process, not reused until it is reaped.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Kills it. Succeeds if it has ended.
    ///
    /// # Errors
    /// As `pidfd_send_signal(2)`.
    pub fn kill(&self) -> Result<(), Errno> {
        self.pidfd.kill()
    }

    /// Reaps it if it has ended, without blocking.
    ///
    /// # Errors
    /// As `waitid(2)`: `ECHILD` if it was reaped before.
    pub fn try_wait(&self) -> Result<Option<ExitStatus>, Errno> {
        self.wait(WaitIdOptions::NOHANG)
    }

    /// Kills it, waits for its end and reaps it.
    ///
    /// # Errors
    /// The process was reaped before.
    pub fn kill_and_wait(&self) -> Result<(), Errno> {
        self.kill()?;
        self.wait(WaitIdOptions::empty()).map(drop)
    }

    /// Waits for its end, which blocks this thread, and reaps it.
    ///
    /// # Errors
    /// As `waitid(2)`: `ECHILD` if it was reaped before.
    pub fn wait_blocking(&self) -> Result<ExitStatus, Errno> {
        loop {
            match self.wait(WaitIdOptions::empty()) {
                Ok(Some(status)) => return Ok(status),
                Ok(None) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn wait(&self, options: WaitIdOptions) -> Result<Option<ExitStatus>, Errno> {
        let status = rustix::process::waitid(
            WaitId::PidFd(self.pidfd.as_fd()),
            WaitIdOptions::EXITED | options,
        )?;
        Ok(status.map(|status| match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => ExitStatus::Exited(code),
            (None, signal) => ExitStatus::Signaled(signal.unwrap_or_default()),
        }))
    }
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl AsRawFd for Child {
    fn as_raw_fd(&self) -> RawFd {
        self.pidfd.as_fd().as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read};

    use super::*;
    use crate::fd::{self, memfd};
    use crate::require::available;

    /// Runs a shell script and returns its output and exit status.
    fn run(script: &str, change: impl FnOnce(Program) -> Program) -> (String, ExitStatus) {
        let (output, input) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let null = || fd::dev_null().unwrap();
        let shell =
            Program::new(Path::new("/bin/sh"), ["-c", script], [null(), input, null()]).unwrap();
        let shell = change(shell);
        let child = shell.start().unwrap();
        drop(shell);
        let mut text = String::new();
        File::from(output).read_to_string(&mut text).unwrap();
        (text, child.wait(WaitIdOptions::empty()).unwrap().unwrap())
    }

    #[test]
    fn program_gets_arguments_stdio_and_empty_environment() {
        let (output, status) = run(
            "echo $0 $#; pwd; cat; /usr/bin/env | grep -v -e ^PWD= -e ^_= -e ^SHLVL=; exit 7",
            |it| it,
        );
        assert_eq!((output.as_str(), status), ("/bin/sh 0\n/\n", ExitStatus::Exited(7)));
        assert_eq!(run("kill -9 $$", |it| it).1, ExitStatus::Signaled(9));
    }

    #[test]
    fn kill_and_wait_reaps_the_child() {
        let null = || fd::dev_null().unwrap();
        let program =
            Program::new(Path::new("/bin/sleep"), ["1000"], [null(), null(), null()]).unwrap();
        let child = program.start().unwrap();
        child.kill_and_wait().unwrap();
        assert_eq!(child.try_wait(), Err(Errno::CHILD));
        assert!(!Path::new(&format!("/proc/{}", child.pid())).exists());
    }

    #[test]
    fn only_named_descriptors_are_inherited() {
        let file = memfd("test", b"content").unwrap();
        let script = format!("cat <&{}", file.as_raw_fd());
        assert_eq!(run(&script, |it| it).0, "");
        assert_eq!(run(&script, |it| it.inherit_fds(vec![file])).0, "content");
    }

    #[test]
    fn program_gets_new_group_and_default_signals() {
        // Rust programs ignore SIGPIPE.
        assert_eq!(run("kill -PIPE $$", |it| it).1, ExitStatus::Signaled(libc::SIGPIPE));
        let script = "cut -d' ' -f5 /proc/$$/stat | grep -qx $$ && exec grep -e SigBlk -e SigIgn /proc/self/status";
        let no_signals = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n";
        assert_eq!(
            run(script, Program::new_process_group),
            (no_signals.to_owned(), ExitStatus::Exited(0))
        );
        assert_eq!(run(script, |it| it), (String::new(), ExitStatus::Exited(1)), "control");
    }

    #[test]
    fn program_joins_cgroup_and_dies_with_its_thread() {
        // A pipe stands for the list of processes: the child writes "0" for itself.
        let (list, joining) = fd::pipe().unwrap();
        assert_eq!(run("exit 4", |it| it.join_cgroups(vec![joining])).1, ExitStatus::Exited(4));
        let mut joined = String::new();
        File::from(list).read_to_string(&mut joined).unwrap();
        assert_eq!(joined, "0");

        let null = || fd::dev_null().unwrap();
        let sleep =
            || Program::new(Path::new("/bin/sleep"), ["1000"], [null(), null(), null()]).unwrap();
        let start =
            |program: Program| std::thread::spawn(move || program.start().unwrap()).join().unwrap();
        assert_eq!(
            start(sleep().die_with_parent()).wait_blocking(),
            Ok(ExitStatus::Signaled(libc::SIGKILL))
        );
        let control = start(sleep());
        assert_eq!(control.try_wait(), Ok(None), "control: it outlives its thread");
        control.kill_and_wait().unwrap();
    }

    #[test]
    fn program_runs_as_the_given_user() {
        let is_root = rustix::process::geteuid().is_root();
        if !available("root", (!is_root).then_some("only root can change the user")) {
            return;
        }
        let (ids, _) =
            run("id -u; id -G; grep CapEff /proc/self/status", |it| it.as_user(300_123, 300_124));
        assert_eq!(ids, "300123\n300124\nCapEff:\t0000000000000000\n");
        assert!(rustix::process::geteuid().is_root(), "the parent keeps its user");
        let dumpable = rustix::process::dumpable_behavior().unwrap();
        assert_eq!(
            dumpable,
            rustix::process::DumpableBehavior::NotDumpable,
            "the child shared our memory"
        );
    }

    #[test]
    fn failed_exec_returns_errno_and_leaves_no_process() {
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
