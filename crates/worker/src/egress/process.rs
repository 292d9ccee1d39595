//! The process of the egress proxy: its start, its control group and its end.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread,
};

use codelia_egress::packet;
use codelia_sys::{
    Errno,
    cgroup::{self, CgroupParent, Group, Hierarchy},
    fd,
    process::ExitStatus,
    spawn::{Child, Program},
};
use tokio::sync::oneshot;

use super::control::Control;

/// Memory of the proxy. Its connections share it, so the limits of each sandbox keep it far below.
const MAX_MEMORY_BYTES: u64 = 1 << 30;
/// Threads of the proxy.
const MAX_THREADS: u64 = 128;

/// Why a proxy could not be started.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    /// The thread that starts it ended early.
    #[error("the thread of the egress proxy ended")]
    Thread,
    /// A system call failed.
    #[error("cannot {step}")]
    System {
        step: &'static str,
        #[source]
        source: io::Error,
    },
}

impl StartError {
    fn at<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::System { step, source: error.into() }
    }
}

/// A running proxy. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Process {
    child: Arc<Child>,
    ending: oneshot::Receiver<Result<ExitStatus, Errno>>,
    /// How it ended, once it has.
    ended: Option<String>,
}

impl Process {
    /// Starts this program's own executable as the proxy, and connects to it.
    pub(super) async fn start(
        cgroup: CgroupParent,
        number: u64,
    ) -> Result<(Self, Control), StartError> {
        let (ours, theirs) = packet::pair().map_err(StartError::at("create the control socket"))?;
        let control = Control::new(ours).map_err(StartError::at("use the control socket"))?;
        let program = program(theirs)?;
        let (started, first) = oneshot::channel();
        let (ending, ended) = oneshot::channel();
        // The kernel kills the proxy when the thread that started it ends, so the thread waits for
        // it.
        let run = move || supervise(program, &cgroup, number, started, ending);
        let thread = thread::Builder::new().name("egress proxy".to_owned());
        thread.spawn(run).map_err(StartError::at("start a thread"))?;
        let child = first.await.map_err(|_| StartError::Thread)?;
        let child = child.map_err(StartError::at("execute the egress proxy"))?;
        Ok((Self { child, ending: ended, ended: None }, control))
    }

    /// Waits until it has ended and its control group is removed, and says how. Cancel-safe;
    /// further calls return the same.
    pub(super) async fn ended(&mut self) -> String {
        if let Some(how) = &self.ended {
            return how.clone();
        }
        let how = match (&mut self.ending).await {
            Ok(Ok(ExitStatus::Exited(code))) => format!("exited with {code}"),
            Ok(Ok(ExitStatus::Signaled(signal))) => format!("was killed by signal {signal}"),
            Ok(Err(errno)) => format!("cannot be waited for: {errno}"),
            Err(_) => "lost its thread".to_owned(),
        };
        self.ended.insert(how).clone()
    }

    /// The id of the process, for the log.
    pub(super) fn id(&self) -> i32 {
        self.child.pid().as_raw_nonzero().get()
    }

    /// Kills it, if it has not ended.
    pub(super) fn kill(&self) {
        if let Err(errno) = self.child.kill() {
            tracing::warn!(%errno, "egress proxy not killed");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Has no effect on a process that was reaped: the descriptor names no other one.
        let _ = self.child.kill();
    }
}

/// The path of our own executable also works for a user who may not pass through its directory, and
/// after the file was replaced.
fn program(control: OwnedFd) -> Result<Program, StartError> {
    let executable = std::path::Path::new("/proc/self/exe");
    let null = fd::dev_null().map_err(StartError::at("open /dev/null"))?;
    let log =
        io::stderr().as_fd().try_clone_to_owned().map_err(StartError::at("duplicate the log"))?;
    let program = Program::new(executable, ["egress"], [control, null, log])
        .map_err(StartError::at("name the executable"))?;
    Ok(program.new_process_group().die_with_parent())
}

/// Starts the proxy in a control group of its own, waits for its end and removes the group.
fn supervise(
    program: Program,
    cgroup: &CgroupParent,
    number: u64,
    started: oneshot::Sender<Result<Arc<Child>, Errno>>,
    ending: oneshot::Sender<Result<ExitStatus, Errno>>,
) {
    let group = create_group(cgroup, number);
    let joining = group.as_ref().and_then(|(_, group)| group.join_fds().ok()).unwrap_or_default();
    let program = program.join_cgroups(joining);
    let child = program.start();
    // Closes our copy of the proxy's end of the socket.
    drop(program);
    match child {
        Ok(child) => {
            let child = Arc::new(child);
            if started.send(Ok(child.clone())).is_err() {
                let _ = child.kill();
            }
            let status = child.wait_blocking();
            remove_group(group);
            let _ = ending.send(status);
        }
        Err(errno) => {
            remove_group(group);
            let _ = started.send(Err(errno));
        }
    }
}

/// Next to those of the sandboxes. On a host without delegated control groups the proxy runs
/// without.
fn create_group(parent: &CgroupParent, number: u64) -> Option<(Hierarchy, Group)> {
    let limits = cgroup::Limits {
        memory_bytes: Some(MAX_MEMORY_BYTES),
        pids: Some(MAX_THREADS),
        cpu_millicores: None,
    };
    let hierarchy = Hierarchy::detect(parent);
    let created = hierarchy.and_then(|hierarchy| {
        let group = Group::create(&hierarchy, &format!("egress-{number}"), limits)?;
        Ok((hierarchy, group))
    });
    created.inspect_err(|error| tracing::warn!(%error, "egress proxy has no control group")).ok()
}

fn remove_group(group: Option<(Hierarchy, Group)>) {
    let Some((_hierarchy, mut group)) = group else { return };
    if let Err(error) = group.kill_all().and(group.remove()) {
        tracing::warn!(%error, "control group of the egress proxy not removed, leaving it to the next sweep");
    }
}
