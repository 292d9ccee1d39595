//! A Postgres server that can be killed and moved to a standby, and whose clock can jump.
//! Everything is in one directory; it listens only on a Unix socket there.

use std::{
    fs,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tokio::time::sleep;

use crate::{ProxyTarget, is_root};

const ROLE: &str = "codelia";
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// A small WAL, so that a small disk suffices.
const SETTINGS: [&str; 6] = [
    "listen_addresses=",
    "max_connections=200",
    "unix_socket_permissions=0777",
    "max_wal_size=96MB",
    "min_wal_size=32MB",
    "shared_buffers=32MB",
];

/// A server. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Server {
    directory: PathBuf,
    environment: Vec<(&'static str, PathBuf)>,
    process: Option<Child>,
}

impl Server {
    /// Initializes a server in `directory` without starting it.
    pub(crate) fn create(directory: &Path) -> Result<Self> {
        let server = Self::empty(directory)?;
        let mut initdb = server.program("initdb")?;
        initdb.args([
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
            "--no-sync",
            "--username",
            ROLE,
        ]);
        run(initdb.arg("-D").arg(server.data()))?;
        Ok(server)
    }

    /// Makes a copy of a running server in `directory` that follows it, without starting it.
    pub(crate) fn create_standby(directory: &Path, port: u16) -> Result<Self> {
        let server = Self::empty(directory)?;
        let mut backup = server.program("pg_basebackup")?;
        backup.args(["--host=127.0.0.1", "--username", ROLE, "--checkpoint=fast", "--no-sync"]);
        backup.args(["--write-recovery-conf", "--wal-method=stream", "--port", &port.to_string()]);
        run(backup.arg("-D").arg(server.data()))?;
        Ok(server)
    }

    fn empty(directory: &Path) -> Result<Self> {
        let server =
            Self { directory: directory.to_owned(), environment: Vec::new(), process: None };
        for part in [directory.to_owned(), server.data(), server.sockets()] {
            fs::create_dir_all(&part)?;
            if let Some((uid, gid)) = user()? {
                chown(&part, Some(uid), Some(gid))?;
            }
        }
        run(Command::new("chmod").arg("0700").arg(server.data()))?;
        Ok(server)
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn sockets(&self) -> PathBuf {
        self.directory.join("run")
    }

    /// Adds an environment variable for the next start.
    pub(crate) fn set_environment(&mut self, name: &'static str, value: &Path) {
        self.environment.push((name, value.to_owned()));
    }

    /// Starts it and waits until it answers.
    pub(crate) async fn start(&mut self) -> Result<()> {
        let log = fs::File::options().create(true).append(true).open(self.directory.join("log"))?;
        let mut command = self.program("postgres")?;
        command.arg("-D").arg(self.data()).arg("-k").arg(self.sockets());
        command.args(SETTINGS.iter().flat_map(|setting| ["-c", setting]));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let process = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        self.process = Some(process);
        let deadline = Instant::now() + TIMEOUT;
        while self.connect("postgres").await.is_err() {
            ensure!(self.is_running()?, "Postgres exited:\n{}", self.read_log());
            ensure!(Instant::now() < deadline, "Postgres does not answer:\n{}", self.read_log());
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Starts it unless it runs.
    pub(crate) async fn ensure_running(&mut self) -> Result<()> {
        if self.is_running()? && self.connect("postgres").await.is_ok() {
            return Ok(());
        }
        self.stop_with(Signal::QUIT).await?;
        self.start().await
    }

    pub(crate) fn is_running(&mut self) -> Result<bool> {
        Ok(match &mut self.process {
            Some(process) => process.try_wait()?.is_none(),
            None => false,
        })
    }

    /// Fast shutdown.
    pub(crate) async fn stop(&mut self) -> Result<()> {
        self.stop_with(Signal::INT).await
    }

    /// Immediate shutdown, like a crash.
    pub(crate) async fn crash(&mut self) -> Result<()> {
        self.stop_with(Signal::QUIT).await
    }

    async fn stop_with(&mut self, signal: Signal) -> Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        let deadline = Instant::now() + TIMEOUT;
        if process.try_wait()?.is_none() {
            kill_process(pid(process.id())?, signal)?;
        }
        while process.try_wait()?.is_none() {
            ensure!(Instant::now() < deadline, "Postgres does not stop:\n{}", self.read_log());
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Kills all its processes at once, as a power failure does.
    pub(crate) async fn kill(&mut self) -> Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        let children = children_of(process.id())?;
        process.kill()?;
        process.wait()?;
        for child in &children {
            // One that saw the end of its parent has exited.
            let _ = kill_process(pid(*child)?, Signal::KILL);
        }
        let deadline = Instant::now() + TIMEOUT;
        while children.iter().any(|child| Path::new(&format!("/proc/{child}")).exists()) {
            ensure!(Instant::now() < deadline, "killed processes of Postgres do not exit");
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Kills a backend that serves a client. Postgres ends all others and recovers. Returns whether
    /// there was one.
    pub(crate) async fn kill_backend(&self, choice: usize) -> Result<bool> {
        let mut connection = self.connect("postgres").await?;
        let query =
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'codelia%' ORDER BY pid";
        let backends: Vec<i32> = sqlx::query_scalar(query).fetch_all(&mut connection).await?;
        drop(connection);
        let Some(backend) = backends.get(choice % backends.len().max(1)) else { return Ok(false) };
        kill_process(pid(backend.unsigned_abs())?, Signal::KILL)?;
        Ok(true)
    }

    /// Makes a standby the primary.
    pub(crate) async fn promote(&self) -> Result<()> {
        let mut connection = self.connect("postgres").await?;
        let promoted: bool =
            sqlx::query_scalar("SELECT pg_promote(true, 60)").fetch_one(&mut connection).await?;
        ensure!(promoted, "the standby was not promoted:\n{}", self.read_log());
        connection.close().await?;
        Ok(())
    }

    pub(crate) async fn connect(&self, database: &str) -> Result<PgConnection> {
        let options = PgConnectOptions::new_without_pgpass().socket(self.sockets()).username(ROLE);
        Ok(PgConnection::connect_with(&options.database(database)).await?)
    }

    /// The address for a proxy.
    pub(crate) fn target(&self) -> ProxyTarget {
        ProxyTarget::postgres(&self.directory)
    }

    fn read_log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    /// A command of Postgres as the server's user.
    fn program(&self, name: &str) -> Result<Command> {
        let mut command = Command::new(binaries()?.join(name));
        command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C.UTF-8").env("TZ", "UTC");
        command.stdin(Stdio::null()).process_group(0).current_dir(self.data());
        if let Some((uid, gid)) = user()? {
            command.uid(uid).gid(gid);
        }
        Ok(command)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        if matches!(process.try_wait(), Ok(None)) {
            if let Ok(pid) = pid(process.id()) {
                let _ = kill_process(pid, Signal::QUIT);
            }
            let _ = process.wait();
        }
    }
}

fn pid(raw: u32) -> Result<Pid> {
    Pid::from_raw(raw.cast_signed()).context("invalid process id")
}

fn children_of(parent: u32) -> Result<Vec<u32>> {
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // The name of the command may contain spaces; the state and the parent follow it.
        let fields = stat.rsplit(')').next().unwrap_or_default();
        if fields.split_whitespace().nth(1).and_then(|field| field.parse().ok()) == Some(parent) {
            children.push(pid);
        }
    }
    Ok(children)
}

/// Postgres refuses to run as root.
fn user() -> Result<Option<(u32, u32)>> {
    if !is_root() {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd")?;
    let line =
        users.lines().find(|line| line.starts_with("postgres:")).context("no user `postgres`")?;
    let field = |number| line.split(':').nth(number).and_then(|field| field.parse().ok());
    Ok(Some((field(2).context("invalid user id")?, field(3).context("invalid group id")?)))
}

/// The directory of the server's programs: the newest version.
fn binaries() -> Result<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").context("PostgreSQL is not installed")?;
    let version = |path: &PathBuf| path.parent()?.file_name()?.to_str()?.parse::<u32>().ok();
    let found =
        versions.flatten().map(|entry| entry.path().join("bin")).filter(|path| path.exists());
    found.max_by_key(version).context("PostgreSQL is not installed")
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
