//! Backends, sessions and commands for the test cases.

use std::{
    fs::{self, File, Permissions},
    io::{BufRead, BufReader, Read, Write},
    ops::RangeInclusive,
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use codelia_backends::{
    Backend, CgroupParent, ContainerOptions, Error, HostOptions, Logical, LogicalOptions,
    NativeOptions, Operations, Prepared, Running, Stdio, ToolOptions, bwrap, container, native,
    nsjail,
};
use codelia_policy::{
    Enforceable, HostInfo, Ids, IsolationLevel, Limits, LimitsRequest, Plan, PlanError, PlanTarget,
    Policy, RunSpec, RunTool,
};
use codelia_sys::{fd, process};
use codelia_types::{CommandSpec, Mode, NearLimit, Outcome, RunId, SessionId, Usage, Violation};
use tempfile::TempDir;

use crate::require::available;

/// Numbers the sessions of this process. As root, each session gets its own user.
static NEXT_USER: AtomicU32 = AtomicU32::new(0);
const FIRST_USER: u32 = 400_000;

/// Users without a session, for orphans of a killed tool.
pub(crate) const ORPHANS: RangeInclusive<u32> = 390_000..=390_009;

/// Each test process gets its own range of users.
const USERS_PER_PROCESS: u32 = 500;

/// What the suite runs against: a mode, and for containers a runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Logical,
    Bwrap,
    Nsjail,
    Native,
    Runc,
    Runsc,
    /// `runc` through Podman instead of Docker.
    Podman,
}

impl Kind {
    pub(crate) fn is_container(self) -> bool {
        matches!(self, Self::Runc | Self::Runsc | Self::Podman)
    }
}

/// A backend on this host, with the directory of its sessions.
pub(crate) struct Fixture {
    pub(crate) kind: Kind,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) host: HostInfo,
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    /// The isolation of its sandboxes, in isolating modes.
    pub(crate) level: IsolationLevel,
    sessions: TempDir,
}

/// A session's directory and user.
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) dir: PathBuf,
    pub(crate) ids: Ids,
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) outcome: Outcome,
    pub(crate) usage: Usage,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) violations: Vec<Violation>,
    pub(crate) near_limits: Vec<NearLimit>,
    /// What was logged, if the plan asks for it.
    pub(crate) operations: Option<Operations>,
}

/// A running command, with the test's ends of its streams.
pub(crate) struct Started {
    pub(crate) running: Box<dyn Running>,
    pub(crate) stdin: File,
    pub(crate) stdout: BufReader<File>,
    pub(crate) stderr: File,
}

impl Fixture {
    /// Returns a fixture for this kind, or `None` if it does not work here and is not required.
    pub(crate) async fn new(kind: Kind) -> Option<Self> {
        Self::with_groups(kind, group_parent()).await
    }

    /// Like [`Fixture::new`], with another parent for control groups.
    pub(crate) async fn with_groups(kind: Kind, groups: CgroupParent) -> Option<Self> {
        Self::create(kind, groups, false).await
    }

    /// Like [`Fixture::with_groups`], with limits that are watched where no group enforces them.
    pub(crate) async fn watching(kind: Kind, groups: CgroupParent) -> Option<Self> {
        Self::create(kind, groups, true).await
    }

    async fn create(kind: Kind, groups: CgroupParent, watch_limits: bool) -> Option<Self> {
        let sessions = tempfile::tempdir().unwrap();
        // Session users may traverse the directory but not list it.
        fs::set_permissions(sessions.path(), Permissions::from_mode(0o711)).unwrap();
        let backend = backend(kind, groups, sessions.path(), watch_limits);
        let probed = probe(kind, &*backend).await;
        let need = match kind {
            Kind::Logical => "cgroup",
            Kind::Podman => "podman",
            _ => backend.mode().as_str(),
        };
        if !available(need, probed.as_ref().err().map(String::as_str)) {
            return None;
        }
        let can = probed.ok()?;
        let runtime = codelia_backends::host_runtime();
        Some(Self {
            kind,
            backend,
            host: HostInfo { enforceable: can, runtime },
            limits: Limits { cpu_millicores: 2000, ..Limits::default() },
            policy: Policy::default(),
            level: IsolationLevel::Full,
            sessions,
        })
    }

    /// Creates a session.
    pub(crate) fn session(&self) -> Session {
        let number = NEXT_USER.fetch_add(1, Ordering::Relaxed);
        let dir = self.sessions.path().join(format!("session-{number}"));
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o700)).unwrap();
        let own = Ids { uid: process::own_uid(), gid: process::own_gid() };
        let chosen =
            FIRST_USER + std::process::id() * USERS_PER_PROCESS + number % USERS_PER_PROCESS;
        let ids = if own.uid == 0 { Ids { uid: chosen, gid: chosen } } else { own };
        let session = Session { id: SessionId::generate(), dir, ids };
        session.chown(&session.dir);
        session
    }

    /// Counts control directories of sandboxes. They are removed last.
    pub(crate) fn leftovers(&self) -> usize {
        fs::read_dir(self.control_directory()).map_or(0, Iterator::count)
    }

    /// Returns the directory of the containers' control sockets.
    pub(crate) fn control_directory(&self) -> PathBuf {
        self.sessions.path().join("containers")
    }

    /// Returns the path that the tools know as the socket of an engine.
    pub(crate) fn configured_engine_socket(&self) -> PathBuf {
        engine_socket_in(self.sessions.path())
    }

    /// Returns the ids that a command sees inside. Containers share the host's user namespace.
    pub(crate) fn ids_inside(&self, session: &Session) -> Ids {
        match self.kind {
            kind if kind.is_container() => session.ids,
            _ => codelia_policy::SANDBOX_IDS,
        }
    }

    pub(crate) fn plan(&self, session: &Session) -> Plan {
        self.try_plan(session).unwrap()
    }

    pub(crate) fn try_plan(&self, session: &Session) -> Result<Plan, PlanError> {
        let (sandbox, id, root) = (RunId::generate(), session.id, session.dir.clone());
        let spec = RunSpec {
            command: command(&["true"]),
            mode: self.backend.mode(),
            network: self.policy.network.mode,
            limits: self.limits.clone(),
            requested_limits: LimitsRequest::default(),
            policy: self.policy.clone(),
            ends_with_caller: false,
            tool: Some(RunTool { id: "tool".parse().unwrap(), version: 1, level: self.level }),
            transaction: None,
        };
        match spec.mode {
            Mode::Logical => Plan::logical(
                PlanTarget { sandbox, session: id, root },
                &spec,
                self.host.enforceable,
            ),
            _ => Plan::isolated(
                PlanTarget { sandbox, session: id, root },
                &spec,
                &self.host,
                session.ids,
            ),
        }
    }

    pub(crate) async fn launch(
        &self,
        session: &Session,
        command: &CommandSpec,
    ) -> Result<Started, Error> {
        launch_in(self.backend.prepare(&self.plan(session)).await?, command).await
    }

    pub(crate) async fn start(&self, session: &Session, script: &str) -> Started {
        self.launch(session, &command(&["sh", "-c", script])).await.unwrap()
    }

    pub(crate) async fn run(&self, session: &Session, argv: &[&str]) -> Finished {
        self.launch(session, &command(argv)).await.unwrap().finish().await
    }

    pub(crate) async fn sh(&self, session: &Session, script: &str) -> Finished {
        self.run(session, &["sh", "-c", script]).await
    }

    /// Runs a script in a new session, requires success without violations, returns its stdout.
    pub(crate) async fn stdout_of(&self, script: &str) -> String {
        let finished = self.sh(&self.session(), script).await;
        assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
        assert!(finished.violations.is_empty(), "{finished:?}");
        finished.stdout
    }
}

impl Session {
    /// Gives a path to the session's user.
    pub(crate) fn chown(&self, path: &Path) {
        std::os::unix::fs::chown(path, Some(self.ids.uid), Some(self.ids.gid)).unwrap();
    }

    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.dir.join(name);
        fs::write(&path, content).unwrap();
        self.chown(&path);
        path
    }
}

impl Started {
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Closes stdin, reads both streams to the end, waits, destroys the sandbox.
    pub(crate) async fn finish(mut self) -> Finished {
        drop(self.stdin);
        let violations = self.running.violations();
        let near_limits = self.running.near_limits();
        let stdout = tokio::task::spawn_blocking(move || read_all(self.stdout));
        let stderr = tokio::task::spawn_blocking(move || read_all(self.stderr));
        let (outcome, usage) = self.running.wait().await;
        let (stdout, stderr) = (stdout.await.unwrap(), stderr.await.unwrap());
        let operations = self.running.take_operations();
        let receipt = self.running.destroy().await;
        assert!(receipt.is_clean(), "{receipt:?}");
        let mut reported = Vec::new();
        if let Some(mut violations) = violations {
            while let Some(violation) = violations.recv().await {
                reported.push(violation);
            }
        }
        let mut near = Vec::new();
        if let Some(mut near_limits) = near_limits {
            while let Some(limit) = near_limits.recv().await {
                near.push(limit);
            }
        }
        Finished {
            outcome,
            usage,
            stdout,
            stderr,
            violations: reported,
            near_limits: near,
            operations,
        }
    }

    /// Waits while stdin stays open, so that the command cannot end by itself.
    pub(crate) async fn finish_open(mut self) -> Finished {
        let (outcome, usage) = self.running.wait().await;
        let finished = self.finish().await;
        Finished { outcome, usage, ..finished }
    }

    pub(crate) async fn finish_with(mut self, input: &str) -> Finished {
        self.stdin.write_all(input.as_bytes()).unwrap();
        self.finish().await
    }
}

/// Launches a command in a prepared sandbox.
pub(crate) async fn launch_in(
    prepared: Box<dyn Prepared>,
    command: &CommandSpec,
) -> Result<Started, Error> {
    let ([child_in, stdin], [stdout, child_out], [stderr, child_err]) = (pipe(), pipe(), pipe());
    let stdio = Stdio::Files { stdin: child_in, stdout: child_out, stderr: child_err };
    let running = prepared.launch(command, stdio).await?.running;
    Ok(Started {
        running,
        stdin: stdin.into(),
        stdout: BufReader::new(stdout.into()),
        stderr: stderr.into(),
    })
}

pub(crate) fn command(argv: &[&str]) -> CommandSpec {
    CommandSpec { stdin: true, ..CommandSpec::new(argv.iter().copied()) }
}

/// What a backend can enforce, or why it does not work here. An engine is probed by one test
/// process for all: that starts three containers.
async fn probe(kind: Kind, backend: &dyn Backend) -> Result<Enforceable, String> {
    let socket = kind.is_container().then(|| engine_socket(kind));
    let stored = socket.map(|socket| socket.with_extension(format!("{kind:?}.probe")));
    if let Some(found) = stored.as_ref().and_then(|path| fs::read(path).ok()) {
        return Ok(serde_json::from_slice(&found).unwrap());
    }
    let found = backend.probe().await;
    if !found.usable {
        return Err(format!("{kind:?} does not work here: {:?}", found.gaps));
    }
    if let Some(path) = stored {
        // Others read it whole or not at all.
        let written = path.with_extension(std::process::id().to_string());
        fs::write(&written, serde_json::to_vec(&found.enforceable).unwrap()).unwrap();
        fs::rename(written, path).unwrap();
    }
    Ok(found.enforceable)
}

pub(crate) fn backend(
    kind: Kind,
    groups: CgroupParent,
    dir: &Path,
    watch_limits: bool,
) -> Arc<dyn Backend> {
    let host = HostOptions {
        init: init_path(),
        cgroup_parent: groups,
        engine_sockets: vec![engine_socket_in(dir)],
        watch_limits,
    };
    match kind {
        Kind::Logical => {
            let HostOptions { init, cgroup_parent, .. } = host;
            Arc::new(Logical::new(LogicalOptions { init, cgroup_parent }).unwrap())
        }
        Kind::Bwrap => {
            let sandbox_uids = Some(ORPHANS);
            Arc::new(bwrap(ToolOptions { host, program: "bwrap".into(), sandbox_uids }).unwrap())
        }
        Kind::Nsjail => {
            let program = std::env::var_os("CODELIA_NSJAIL").map_or("nsjail".into(), PathBuf::from);
            Arc::new(nsjail(ToolOptions { host, program, sandbox_uids: None }).unwrap())
        }
        Kind::Native => Arc::new(native(NativeOptions { host, max_zygotes: 8 }).unwrap()),
        Kind::Runc | Kind::Runsc | Kind::Podman => {
            Arc::new(container(container_options(kind, dir)).unwrap())
        }
    }
}

/// Returns a path for the socket of an engine, below the directory of containers.
fn engine_socket_in(dir: &Path) -> PathBuf {
    dir.join("containers/engine.sock")
}

/// Returns the parent of the tests' control groups.
pub(crate) fn group_parent() -> CgroupParent {
    CgroupParent { name: std::env::var("CODELIA_TEST_CGROUP_PARENT").ok(), cpu_idle: false }
}

/// Returns options for the engines that `with-engine` started.
pub(crate) fn container_options(kind: Kind, dir: &Path) -> ContainerOptions {
    ContainerOptions {
        init: init_path(),
        socket: engine_socket(kind),
        runtime: Some(if kind == Kind::Runsc { "runsc" } else { "runc" }.to_owned()),
        image: "codelia-base".to_owned(),
        profile_images: [
            ("again".to_owned(), "codelia-base".to_owned()),
            ("gone".to_owned(), "codelia-gone".to_owned()),
        ]
        .into(),
        control_dir: dir.join("containers"),
        worker: "conformance".to_owned(),
    }
}

pub(crate) fn engine_socket(kind: Kind) -> PathBuf {
    let name = if kind == Kind::Podman { "CODELIA_TEST_PODMAN" } else { "CODELIA_TEST_ENGINE" };
    std::env::var_os(name).unwrap_or_default().into()
}

/// Returns the path of `codelia-init`, which `make build` builds.
pub(crate) fn init_path() -> PathBuf {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .with_file_name("x86_64-unknown-linux-gnu/init/codelia-init");
    let path = std::env::var_os("CODELIA_INIT").map_or(built, PathBuf::from);
    assert!(path.is_file(), "{} is missing: run `make build`", path.display());
    path
}

fn pipe() -> [OwnedFd; 2] {
    fd::pipe().unwrap().into()
}

fn read_all(mut stream: impl Read) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Skips a case that lacks `need`, or fails it if `need` is required.
pub(crate) fn skip(need: &str, reason: impl std::fmt::Display) {
    available(need, Some(&reason.to_string()));
}

/// Returns whether a case that needs root can run here.
pub(crate) fn is_root(reason: &str) -> bool {
    available("root", (process::own_uid() != 0).then_some(reason))
}

/// Returns whether the fixture can bind commands to CPUs, for a case that needs it.
pub(crate) fn has_cpusets(fixture: &Fixture) -> bool {
    let missing =
        (!fixture.host.enforceable.cpus).then_some("this host cannot bind commands to CPUs");
    available("processors", missing)
}

/// Generates one test per isolating mode: `async fn name(fixture)` becomes `bwrap::name`,
/// `nsjail::name`, `native::name`, `runc::name`, `runsc::name` and `podman::name`.
macro_rules! in_every_mode {
    ($($name:ident),+ $(,)?) => {
        $crate::harness::in_mode!(bwrap = Bwrap: $($name),+);
        $crate::harness::in_mode!(nsjail = Nsjail: $($name),+);
        $crate::harness::in_mode!(native = Native: $($name),+);
        $crate::harness::in_mode!(runc = Runc: $($name),+);
        $crate::harness::in_mode!(runsc = Runsc: $($name),+);
        $crate::harness::in_mode!(podman = Podman: $($name),+);
    };
}

/// Generates the tests of one mode, except its declared exceptions.
macro_rules! in_mode {
    ($module:ident = $kind:ident: $($name:ident),+ $(,)?) => {
        mod $module {
            $(#[tokio::test]
            async fn $name() {
                let kind = $crate::harness::Kind::$kind;
                if let Some(reason) = $crate::exceptions::reason(kind, stringify!($name)) {
                    println!("declared exception: {reason}");
                } else if let Some(fixture) = $crate::harness::Fixture::new(kind).await {
                    super::$name(fixture).await;
                }
            })+
        }
    };
}
pub(crate) use {in_every_mode, in_mode};
