//! A private container engine for a whole test run: Docker's or Podman's, with an image made from a tar.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::{Scratch, eventually, leak};

/// Name the engines of the whole test run by their sockets.
pub const ENGINE_SOCKET: &str = "CODELIA_TEST_ENGINE";
/// The same for Podman's.
pub const PODMAN_SOCKET: &str = "CODELIA_TEST_PODMAN";

/// The stronger runtime, as it must be registered: sandboxes connect to their control socket and have no network.
const RUNTIMES: &str =
    r#"{"runtimes": {"runsc": {"path": "runsc", "runtimeArgs": ["--host-uds=open", "--network=none"]}}}"#;

/// What Podman would do otherwise: ask systemd, keep a journal, make networks.
const PODMAN: &str = r#"[containers]
netns = "none"
log_driver = "none"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"#;

/// Whose engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// `dockerd`.
    Docker,
    /// `podman system service`.
    Podman,
}

/// An engine that runs. Dropped, it is killed.
#[derive(Debug)]
pub struct Engine {
    scratch: Scratch,
    daemon: Child,
    /// The parent of its control groups, if it was not there before.
    group: Option<String>,
}

impl Engine {
    /// Starts one with no image and no network. Its mounts are in a namespace of their own and end with it; it
    /// sees what is mounted later only where the mounts around it are shared.
    pub async fn start(make: EngineKind) -> Result<Self> {
        let scratch = Scratch::new()?;
        let log = fs::File::create(scratch.join("log"))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "unshare", "--mount", "--propagation", "slave"]);
        let group = match make {
            EngineKind::Docker => docker_daemon(&mut command, &scratch)?,
            EngineKind::Podman => podman_service(&mut command, &scratch)?,
        };
        command.current_dir("/").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let group = Some(group).filter(|group| leak::groups(|found| found == group).is_empty());
        let daemon = command.spawn().context("start the engine")?;
        let mut engine = Self { scratch, daemon, group };
        engine.answers().await?;
        Ok(engine)
    }

    async fn answers(&mut self) -> Result<()> {
        let socket = self.socket();
        let up = || async { docker(&socket, &["version"]).is_ok().then_some(()) };
        tokio::select! {
            () = eventually("the engine answers", up) => Ok(()),
            log = self.ended() => bail!("the engine ended: {log}"),
        }
    }

    async fn ended(&mut self) -> String {
        let daemon = &mut self.daemon;
        while matches!(daemon.try_wait(), Ok(None)) {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        fs::read_to_string(self.scratch.join("log")).unwrap_or_default()
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.scratch.join("socket")
    }

    /// Makes an image of a tree.
    pub fn import(&self, tar: &Path, image: &str) -> Result<()> {
        docker(&self.socket(), &["import", &tar.display().to_string(), image]).map(drop)
    }

    /// Ends it. A container that still runs is told, and fails it.
    pub async fn stop(mut self) -> Result<()> {
        let running = docker(&self.socket(), &["ps", "--format", "{{.Names}} {{.Image}} {{.Status}}"]);
        self.terminate();
        self.ended().await;
        let groups = self.group.as_deref().map_or(Ok(()), remove_groups);
        let running = running?;
        ensure!(running.is_empty(), "containers still run:\n{running}");
        groups
    }

    fn terminate(&self) {
        let pid = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw);
        if let Some(Err(error)) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
            eprintln!("the engine was not asked to end: {error}");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if matches!(self.daemon.try_wait(), Ok(None)) {
            self.terminate();
            let _ = self.daemon.wait();
        }
    }
}

fn docker_daemon(command: &mut Command, scratch: &Scratch) -> Result<String> {
    let group = format!("codelia-engine-{}", std::process::id());
    fs::write(scratch.join("daemon.json"), RUNTIMES)?;
    command
        .args([
            "dockerd",
            "--iptables=false",
            "--ip6tables=false",
            "--bridge=none",
            "--cgroup-parent",
            &group,
        ])
        .arg(format!("--host=unix://{}", scratch.join("socket").display()));
    for (option, name) in
        [("config-file", "daemon.json"), ("data-root", "data"), ("exec-root", "exec"), ("pidfile", "pid")]
    {
        command.arg(format!("--{option}={}", scratch.join(name).display()));
    }
    Ok(group)
}

fn podman_service(command: &mut Command, scratch: &Scratch) -> Result<String> {
    fs::write(scratch.join("containers.conf"), PODMAN)?;
    command.env("CONTAINERS_CONF", scratch.join("containers.conf")).arg("podman");
    for (option, name) in [("root", "data"), ("runroot", "run"), ("tmpdir", "tmp")] {
        command.arg(format!("--{option}={}", scratch.join(name).display()));
    }
    let socket = format!("unix://{}", scratch.join("socket").display());
    command.args(["system", "service", "--time=0", &socket]);
    // It cannot be told another.
    Ok("libpod_parent".to_owned())
}

/// The containers that worker processes have in the engine of the test run, whatever their state.
pub fn worker_containers(workers: &[u32]) -> Result<BTreeSet<String>> {
    let Some(socket) = env::var_os(ENGINE_SOCKET) else { return Ok(BTreeSet::new()) };
    let format = r#"{{.Label "codelia.owner"}} {{.ID}}"#;
    let listed = docker(Path::new(&socket), &["ps", "--all", "--format", format])?;
    let owners: Vec<_> = workers.iter().map(|pid| format!("{pid}-")).collect();
    let is_theirs = |line: &&str| owners.iter().any(|owner| line.starts_with(owner));
    Ok(listed.lines().filter(is_theirs).map(str::to_owned).collect())
}

fn docker(socket: &Path, arguments: &[&str]) -> Result<String> {
    let host = format!("unix://{}", socket.display());
    let done = Command::new("docker").args(["--host", &host]).args(arguments).output().context("docker")?;
    ensure!(done.status.success(), "docker {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8(done.stdout)?)
}

/// The engine leaves the parent of its groups in each hierarchy, with what it has below.
fn remove_groups(name: &str) -> Result<()> {
    for group in leak::groups(|found| found == name) {
        for below in fs::read_dir(&group)?.flatten().filter(|entry| entry.path().is_dir()) {
            remove_group(&below.path())?;
        }
        remove_group(&group)?;
    }
    Ok(())
}

fn remove_group(group: &Path) -> Result<()> {
    fs::remove_dir(group).with_context(|| format!("the control group {} is left", group.display()))
}
