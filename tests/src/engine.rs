//! A private container engine for a test run, Docker or Podman, with an image from a tar file.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    Scratch, eventually,
    leak::{self, LeakGuard},
};

/// Environment variable with the socket of the test run's Docker engine.
pub const ENGINE_SOCKET: &str = "CODELIA_TEST_ENGINE";
/// Environment variable with the socket of the test run's Podman engine.
pub const PODMAN_SOCKET: &str = "CODELIA_TEST_PODMAN";

/// How the names of containers begin that tests make themselves, without a worker.
pub const TEST_CONTAINER: &str = "codelia-test-";

/// Registers gVisor: its sandboxes connect to their control socket and have no network.
const DOCKER_CONFIG: &str = r#"{"runtimes": {"runsc": {"path": "runsc", "runtimeArgs": ["--host-uds=open", "--network=none"]}}}"#;

/// Keeps Podman from using systemd, the journal and networks.
const PODMAN_CONFIG: &str = r#"[containers]
netns = "none"
log_driver = "none"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"#;

/// The kind of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// `dockerd`.
    Docker,
    /// `podman system service`.
    Podman,
}

/// A running engine. Dropping it stops it.
#[derive(Debug)]
pub struct Engine {
    daemon: Child,
    /// The parent of its control groups, if the engine created it.
    group: Option<String>,
    /// Kills what the daemon leaves: a shim may outlive it.
    _processes: LeakGuard,
    scratch: Scratch,
}

impl Engine {
    /// Starts an engine without images and networks. It has a private mount namespace, which
    /// receives later mounts of the host only where they are shared.
    pub async fn start(kind: EngineKind) -> Result<Self> {
        let scratch = Scratch::new()?;
        let log = fs::File::create(scratch.join("log"))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "unshare", "--mount", "--propagation", "slave"]);
        let group = match kind {
            EngineKind::Docker => docker_daemon(&mut command, &scratch)?,
            EngineKind::Podman => podman_service(&mut command, &scratch)?,
        };
        command.current_dir("/").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let group = Some(group).filter(|group| leak::groups(|found| found == group).is_empty());
        let daemon = command.spawn().context("start the engine")?;
        let processes = LeakGuard::of(scratch.path());
        let mut engine = Self { daemon, group, _processes: processes, scratch };
        engine.wait_until_ready().await?;
        Ok(engine)
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let socket = self.socket();
        let up = || async { docker(&socket, &["version"]).is_ok().then_some(()) };
        tokio::select! {
            () = eventually("the engine answers", up) => Ok(()),
            log = self.exited() => bail!("the engine exited: {log}"),
        }
    }

    async fn exited(&mut self) -> String {
        let daemon = &mut self.daemon;
        while matches!(daemon.try_wait(), Ok(None)) {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        fs::read_to_string(self.scratch.join("log")).unwrap_or_default()
    }

    /// The path of its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.scratch.join("socket")
    }

    /// Creates an image from a tar file.
    pub fn import(&self, tar: &Path, image: &str) -> Result<()> {
        docker(&self.socket(), &["import", &tar.display().to_string(), image]).map(drop)
    }

    /// Stops the engine. Fails if a container of a worker is still running.
    pub async fn stop(mut self) -> Result<()> {
        let running = self.remove_test_containers().and_then(|()| {
            docker(&self.socket(), &["ps", "--format", "{{.Names}} {{.Image}} {{.Status}}"])
        });
        self.terminate();
        self.exited().await;
        let groups = self.group.as_deref().map_or(Ok(()), remove_groups);
        let running = running?;
        ensure!(running.is_empty(), "containers are still running:\n{running}");
        groups
    }

    /// Removes the containers that tests made themselves and left: a test that misses its deadline
    /// is killed, and reported as such.
    fn remove_test_containers(&self) -> Result<()> {
        let filter = format!("--filter=name=^{TEST_CONTAINER}");
        for name in docker(&self.socket(), &["ps", &filter, "--format={{.Names}}"])?.lines() {
            eprintln!("removing {name}, the container of a test that was killed");
            docker(&self.socket(), &["rm", "--force", "--volumes", name])?;
        }
        Ok(())
    }

    fn terminate(&self) {
        let pid = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw);
        if let Some(Err(error)) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
            eprintln!("cannot stop the engine: {error}");
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
    fs::write(scratch.join("daemon.json"), DOCKER_CONFIG)?;
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
    for (option, name) in [
        ("config-file", "daemon.json"),
        ("data-root", "data"),
        ("exec-root", "exec"),
        ("pidfile", "pid"),
    ] {
        command.arg(format!("--{option}={}", scratch.join(name).display()));
    }
    Ok(group)
}

fn podman_service(command: &mut Command, scratch: &Scratch) -> Result<String> {
    fs::write(scratch.join("containers.conf"), PODMAN_CONFIG)?;
    // Podman leaves the image that it imported in its temporary directory.
    command
        .env("CONTAINERS_CONF", scratch.join("containers.conf"))
        .env("TMPDIR", scratch.path())
        .arg("podman");
    for (option, name) in [("root", "data"), ("runroot", "run"), ("tmpdir", "tmp")] {
        command.arg(format!("--{option}={}", scratch.join(name).display()));
    }
    let socket = format!("unix://{}", scratch.join("socket").display());
    command.args(["system", "service", "--time=0", &socket]);
    // Podman has no option to change it.
    Ok("libpod_parent".to_owned())
}

/// Returns the containers of these worker processes in the test run's engine, in any state.
pub fn worker_containers(workers: &[u32]) -> Result<BTreeSet<String>> {
    let Some(socket) = env::var_os(ENGINE_SOCKET) else { return Ok(BTreeSet::new()) };
    let format = r#"{{.Label "codelia.owner"}} {{.ID}}"#;
    let listed = docker(Path::new(&socket), &["ps", "--all", "--format", format])?;
    let owners: Vec<_> = workers.iter().map(|pid| format!("{pid}-")).collect();
    let is_theirs = |line: &&str| owners.iter().any(|owner| line.starts_with(owner));
    Ok(listed.lines().filter(is_theirs).map(str::to_owned).collect())
}

/// Runs a `docker` command against the test run's engine, which may fail.
pub fn engine_docker(arguments: &[&str]) -> Result<Output> {
    let socket = env::var(ENGINE_SOCKET).context(ENGINE_SOCKET)?;
    let host = format!("unix://{socket}");
    Command::new("docker").args(["--host", &host]).args(arguments).output().context("docker")
}

/// Runs a `docker` command against the test run's engine and returns its output.
pub fn engine_command(arguments: &[&str]) -> Result<String> {
    let socket =
        env::var_os(ENGINE_SOCKET).with_context(|| format!("{ENGINE_SOCKET} is not set"))?;
    docker(Path::new(&socket), arguments)
}

fn docker(socket: &Path, arguments: &[&str]) -> Result<String> {
    let host = format!("unix://{}", socket.display());
    // The builder that needs no plugin of the client.
    let mut command = Command::new("docker");
    command.env("DOCKER_BUILDKIT", "0").args(["--host", &host]).args(arguments);
    let done = command.output().context("docker")?;
    ensure!(
        done.status.success(),
        "docker {arguments:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(String::from_utf8(done.stdout)?)
}

/// Removes the parent of the engine's control groups, which the engine leaves in each hierarchy.
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
    fs::remove_dir(group).with_context(|| format!("remove the control group {}", group.display()))
}
