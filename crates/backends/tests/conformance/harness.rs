//! Backends, sessions, and commands that are run to their end.

use std::{
    collections::BTreeMap,
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
    Backend, CgroupParent, ContainerOptions, Error, Logical, LogicalOptions, Running, Stdio, ToolOptions,
    bwrap, container, nsjail,
};
use codelia_policy::{HostInfo, Ids, Limits, LimitsRequest, Plan, PlanError, PlanTarget, Policy, RunSpec};
use codelia_sys::{fd, process};
use codelia_types::{CommandSpec, Mode, Outcome, RunId, SessionId, Usage, Violation};
use tempfile::TempDir;

/// Each session has a user of its own where the tests may choose.
static NEXT_USER: AtomicU32 = AtomicU32::new(0);
const FIRST_USER: u32 = 400_000;

/// Users of no session, for what a killed tool left.
pub(crate) const ORPHANS: RangeInclusive<u32> = 390_000..=390_009;

/// Tests run as processes of their own, and the users of two of them should differ.
const USERS_OF_A_PROCESS: u32 = 500;

/// What the suite is run against: a mode, and for containers a runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Logical,
    Bwrap,
    Nsjail,
    Runc,
    Runsc,
    /// `runc` too, by the other engine.
    Podman,
}

impl Kind {
    pub(crate) fn is_container(self) -> bool {
        matches!(self, Self::Runc | Self::Runsc | Self::Podman)
    }
}

/// A mode on this host, and where its sessions are.
pub(crate) struct Fixture {
    pub(crate) kind: Kind,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) host: HostInfo,
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    sessions: TempDir,
}

/// A session's directory and its user.
pub(crate) struct Session {
    pub(crate) dir: PathBuf,
    pub(crate) ids: Ids,
}

/// What a command did.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) outcome: Outcome,
    pub(crate) usage: Usage,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) violations: Vec<Violation>,
}

/// A command that runs, and the test's ends of its streams.
pub(crate) struct Started {
    pub(crate) running: Box<dyn Running>,
    pub(crate) stdin: File,
    pub(crate) stdout: BufReader<File>,
    pub(crate) stderr: File,
}

impl Fixture {
    /// A mode that works here. If it does not, the caller returns, unless it is required.
    pub(crate) async fn new(kind: Kind) -> Option<Self> {
        Self::with_groups(kind, group_parent()).await
    }

    /// The same with its control groups elsewhere.
    pub(crate) async fn with_groups(kind: Kind, groups: CgroupParent) -> Option<Self> {
        let sessions = tempfile::tempdir().unwrap();
        // Every session's user passes through, and sees nothing.
        fs::set_permissions(sessions.path(), Permissions::from_mode(0o711)).unwrap();
        let backend = backend(kind, groups, sessions.path());
        let (mode, found) = (backend.mode(), backend.probe().await);
        let can = found.enforceable;
        if !found.usable || (mode != Mode::Logical && !(can.memory && can.pids && can.cpu)) {
            let required = if kind == Kind::Podman { "podman" } else { mode.as_str() };
            skip(required, format!("{kind:?} does not work here: {:?}", found.gaps));
            return None;
        }
        let runtime = codelia_backends::host_runtime();
        Some(Self {
            kind,
            backend,
            host: HostInfo { enforceable: can, runtime },
            limits: Limits { cpu_millis: 2000, ..Limits::default() },
            policy: Policy::default(),
            sessions,
        })
    }

    /// A new session.
    pub(crate) fn session(&self) -> Session {
        let number = NEXT_USER.fetch_add(1, Ordering::Relaxed);
        let dir = self.sessions.path().join(format!("session-{number}"));
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o700)).unwrap();
        let own = Ids { uid: process::own_uid(), gid: process::own_gid() };
        let chosen = FIRST_USER + std::process::id() * USERS_OF_A_PROCESS + number % USERS_OF_A_PROCESS;
        let ids = if own.uid == 0 { Ids { uid: chosen, gid: chosen } } else { own };
        let session = Session { dir, ids };
        session.chown(&session.dir);
        session
    }

    /// How many sandboxes have a directory: it goes last.
    pub(crate) fn leftovers(&self) -> usize {
        fs::read_dir(self.control_directory()).map_or(0, Iterator::count)
    }

    /// Where containers have their sockets.
    pub(crate) fn control_directory(&self) -> PathBuf {
        self.sessions.path().join("containers")
    }

    /// Who a command of the session is inside: an engine gives containers no user ids of their own.
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
        let (sandbox, id, root) = (RunId::generate(), SessionId::generate(), session.dir.clone());
        let spec = RunSpec {
            command: command(&["true"]),
            mode: self.backend.mode(),
            network: None,
            limits: self.limits.clone(),
            requested_limits: LimitsRequest::default(),
            policy: self.policy.clone(),
            ends_with_caller: false,
        };
        match spec.mode {
            Mode::Logical => {
                Plan::logical(PlanTarget { sandbox, session: id, root }, &spec, self.host.enforceable)
            }
            _ => Plan::isolated(PlanTarget { sandbox, session: id, root }, &spec, &self.host, session.ids),
        }
    }

    pub(crate) async fn launch(&self, session: &Session, command: &CommandSpec) -> Result<Started, Error> {
        let prepared = self.backend.prepare(&self.plan(session)).await?;
        let ([child_in, stdin], [stdout, child_out], [stderr, child_err]) = (pipe(), pipe(), pipe());
        let stdio = Stdio { stdin: child_in, stdout: child_out, stderr: child_err };
        let running = prepared.launch(command, stdio).await?.running;
        Ok(Started {
            running,
            stdin: stdin.into(),
            stdout: BufReader::new(stdout.into()),
            stderr: stderr.into(),
        })
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

    /// What a script in a new session says, once it succeeded and broke no rule.
    pub(crate) async fn stdout_of(&self, script: &str) -> String {
        let finished = self.sh(&self.session(), script).await;
        assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
        assert!(finished.violations.is_empty(), "{finished:?}");
        finished.stdout
    }
}

impl Session {
    /// Makes something in it the session's own.
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

    /// Closes stdin, reads both streams to their end, waits, destroys.
    pub(crate) async fn finish(mut self) -> Finished {
        drop(self.stdin);
        let violations = self.running.violations();
        let stdout = tokio::task::spawn_blocking(move || read_all(self.stdout));
        let stderr = tokio::task::spawn_blocking(move || read_all(self.stderr));
        let (outcome, usage) = self.running.wait().await;
        let (stdout, stderr) = (stdout.await.unwrap(), stderr.await.unwrap());
        let receipt = self.running.destroy().await;
        assert!(receipt.is_clean(), "{receipt:?}");
        let mut seen = Vec::new();
        if let Some(mut violations) = violations {
            while let Some(violation) = violations.recv().await {
                seen.push(violation);
            }
        }
        Finished { outcome, usage, stdout, stderr, violations: seen }
    }

    pub(crate) async fn finish_with(mut self, input: &str) -> Finished {
        self.stdin.write_all(input.as_bytes()).unwrap();
        self.finish().await
    }
}

pub(crate) fn command(argv: &[&str]) -> CommandSpec {
    CommandSpec {
        argv: argv.iter().map(|&word| word.to_owned()).collect(),
        env: BTreeMap::new(),
        working_directory: String::new(),
        terminal: None,
        stdin: true,
    }
}

fn backend(kind: Kind, groups: CgroupParent, fixture: &Path) -> Arc<dyn Backend> {
    let init = init_path();
    match kind {
        Kind::Logical => Arc::new(Logical::new(LogicalOptions { init, cgroup_parent: groups }).unwrap()),
        Kind::Bwrap => Arc::new(
            bwrap(ToolOptions {
                init,
                program: "bwrap".into(),
                cgroup_parent: groups,
                sandbox_uids: Some(ORPHANS),
            })
            .unwrap(),
        ),
        Kind::Nsjail => {
            let program = std::env::var_os("CODELIA_NSJAIL").map_or("nsjail".into(), PathBuf::from);
            Arc::new(
                nsjail(ToolOptions { init, program, cgroup_parent: groups, sandbox_uids: None }).unwrap(),
            )
        }
        Kind::Runc | Kind::Runsc | Kind::Podman => {
            Arc::new(container(container_options(kind, fixture)).unwrap())
        }
    }
}

/// Where the control groups of the tests are made.
pub(crate) fn group_parent() -> CgroupParent {
    CgroupParent { name: std::env::var("CODELIA_TEST_CGROUP_PARENT").ok(), cpu_idle: false }
}

/// The engines that `with-engine` started.
pub(crate) fn container_options(kind: Kind, fixture: &Path) -> ContainerOptions {
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
        control_dir: fixture.join("containers"),
        worker: "conformance".to_owned(),
    }
}

pub(crate) fn engine_socket(kind: Kind) -> PathBuf {
    let name = if kind == Kind::Podman { "CODELIA_TEST_PODMAN" } else { "CODELIA_TEST_ENGINE" };
    std::env::var_os(name).unwrap_or_default().into()
}

/// `codelia-init` as `make build` makes it.
pub(crate) fn init_path() -> PathBuf {
    let built =
        Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("x86_64-unknown-linux-gnu/init/codelia-init");
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

/// Says why a case cannot run here; fails it if `CODELIA_TEST_REQUIRE` names what it lacks.
pub(crate) fn skip(what: &str, reason: impl std::fmt::Display) {
    let required = std::env::var("CODELIA_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word == what), "{what} is required: {reason}");
    println!("skipped: {reason}");
}

/// Writes one test for each isolating mode: `async fn name(fixture)` becomes `bwrap::name`, `nsjail::name`,
/// `runc::name` and `runsc::name`.
macro_rules! in_every_mode {
    ($($name:ident),+ $(,)?) => {
        $crate::harness::in_mode!(bwrap = Bwrap: $($name),+);
        $crate::harness::in_mode!(nsjail = Nsjail: $($name),+);
        $crate::harness::in_mode!(runc = Runc: $($name),+);
        $crate::harness::in_mode!(runsc = Runsc: $($name),+);
        $crate::harness::in_mode!(podman = Podman: $($name),+);
    };
}

/// The same for one mode, with what is declared of it.
macro_rules! in_mode {
    ($module:ident = $kind:ident: $($name:ident),+ $(,)?) => {
        mod $module {
            $(#[tokio::test]
            async fn $name() {
                let kind = $crate::harness::Kind::$kind;
                if let Some(reason) = $crate::exceptions::reason(kind, stringify!($name)) {
                    println!("declared: {reason}");
                } else if let Some(fixture) = $crate::harness::Fixture::new(kind).await {
                    super::$name(fixture).await;
                }
            })+
        }
    };
}
pub(crate) use {in_every_mode, in_mode};
