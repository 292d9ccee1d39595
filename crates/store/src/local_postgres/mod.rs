//! A private Postgres server, started from the installed binaries, for `codelia up` and tests. It
//! keeps everything in one directory, listens only on a Unix socket there and stops with its owner.

mod files;
mod settings;

use std::{
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use self::files::{Files, ServerUser, server_user};

/// The role that owns every database of the server.
const ROLE: &str = "codelia";
/// Part of the socket's file name. It cannot collide, because the directory is private.
const PORT: u16 = 5432;
/// Maximum length of a Unix socket's path in bytes.
const MAX_SOCKET_PATH: usize = 107;
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The private server could not be started, stopped or used.
#[derive(Debug, thiserror::Error)]
pub enum LocalPostgresError {
    /// The server binaries are not installed.
    #[error(
        "no PostgreSQL server binaries in PATH or /usr/lib/postgresql/*/bin: \
         install the package `postgresql` or set CODELIA_DATABASE_URL"
    )]
    NotInstalled,
    /// Postgres refuses to run as root, and the user `postgres` does not exist.
    #[error(
        "PostgreSQL cannot run as root, and the user `postgres` does not exist: install the package `postgresql`, \
         run `useradd --system postgres`, or set CODELIA_DATABASE_URL"
    )]
    NoUser,
    /// Another account could access the server's files.
    #[error(
        "user `postgres` shares its id {uid} with other accounts or services: give it its own id, \
         or set CODELIA_DATABASE_URL"
    )]
    SharedUser {
        /// The id that they share.
        uid: u32,
    },
    /// The server could not find out who connects to it.
    #[error("this process's user has no name: add it to /etc/passwd, or set CODELIA_DATABASE_URL")]
    NoUserName,
    /// A directory does not belong to the user that Postgres runs as.
    #[error(
        "{} belongs to user {owner}, but PostgreSQL runs as user {expected}: run `chown -R {expected} {}`",
        .path.display(), .path.display()
    )]
    WrongOwner {
        /// The directory.
        path: PathBuf,
        /// The user id that the directory has.
        owner: u32,
        /// The server's user.
        expected: u32,
    },
    /// Something else is where a file of the server belongs.
    #[error("{} is a link or belongs to another user: remove it", .0.display())]
    ForeignFile(PathBuf),
    /// The socket's path would be too long.
    #[error("path {} is too long for a Unix socket: choose a shorter data directory", .0.display())]
    PathTooLong(PathBuf),
    /// The user that Postgres runs as cannot access its directory.
    #[error("PostgreSQL's user cannot access {}: add the x permission to its parent directories", .0.display())]
    Unreachable(PathBuf),
    /// A file operation failed.
    #[error("cannot {step} {}", .path.display())]
    File {
        /// The operation.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// `initdb` failed.
    #[error("initdb failed: {0}")]
    Init(String),
    /// The server exited or did not answer in time.
    #[error("PostgreSQL did not start: see {}", .log.display())]
    NotStarted {
        /// The file with the output of the server.
        log: PathBuf,
    },
    /// The server did not exit in time.
    #[error("PostgreSQL (pid {pid}) did not stop within {}s", STOP_TIMEOUT.as_secs())]
    NotStopped {
        /// The process that still runs.
        pid: i32,
    },
    /// A database could not be created.
    #[error("cannot create database {name}")]
    Database {
        /// The database that was to exist.
        name: String,
        /// Why.
        source: sqlx::Error,
    },
}

/// Whether committed data survives a crash of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Durability {
    Full,
    None,
}

/// A running private server. Dropping it stops it.
#[derive(Debug)]
pub struct LocalPostgres {
    files: Files,
    process: Child,
}

impl LocalPostgres {
    /// Starts a server in `dir`, and initializes the directory if it is new. Stops a server that an
    /// earlier owner left running there. If this process is root, the server runs as another user.
    ///
    /// # Errors
    /// If the server cannot be started. Nothing is left running then.
    pub async fn start(dir: &Path) -> Result<Self, LocalPostgresError> {
        Self::start_with(dir, Durability::Full).await
    }

    /// Like [`LocalPostgres::start`], but data may be lost in a crash of the machine. For tests.
    ///
    /// # Errors
    /// As [`LocalPostgres::start`].
    pub async fn start_throwaway(dir: &Path) -> Result<Self, LocalPostgresError> {
        Self::start_with(dir, Durability::None).await
    }

    async fn start_with(dir: &Path, durability: Durability) -> Result<Self, LocalPostgresError> {
        let binaries = find_binaries().ok_or(LocalPostgresError::NotInstalled)?;
        let user = server_user()?;
        let files = Files::create(dir, user)?;
        check_access(&files.run(), user)?;
        let data = files.data();
        if data.join("PG_VERSION").exists() {
            stop_leftover(&data).await?;
        } else {
            init_cluster(&binaries, &data, user)?;
        }
        let process = spawn_server(&binaries, &files, user, durability)?;
        let mut server = Self { files, process };
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// Creates the database `name` if it does not exist, and returns how to connect to it.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn database(&self, name: &str) -> Result<PgConnectOptions, LocalPostgresError> {
        let failed = |source| LocalPostgresError::Database { name: name.to_owned(), source };
        self.create_database(name).await.map_err(failed)?;
        Ok(self.options(name))
    }

    async fn create_database(&self, name: &str) -> Result<(), sqlx::Error> {
        let mut admin = PgConnection::connect_with(&self.options("postgres")).await?;
        let exists: bool =
            sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM pg_database WHERE datname = $1)")
                .bind(name)
                .fetch_one(&mut admin)
                .await?;
        if !exists {
            let quoted = name.replace('"', "\"\"");
            let statement = sqlx::AssertSqlSafe(format!("CREATE DATABASE \"{quoted}\""));
            sqlx::query(statement).execute(&mut admin).await?;
        }
        admin.close().await
    }

    /// Returns the `postgres://` URL of the database `name`.
    #[must_use]
    pub fn url(&self, name: &str) -> String {
        let host: String =
            self.files.run().to_string_lossy().bytes().map(|byte| format!("%{byte:02X}")).collect();
        format!("postgres://{ROLE}@{host}:{PORT}/{name}")
    }

    /// Stops the server and waits until it exits.
    ///
    /// # Errors
    /// [`LocalPostgresError::NotStopped`] if it does not exit in time.
    pub async fn stop(mut self) -> Result<(), LocalPostgresError> {
        let pid = self.pid();
        signal(pid, Signal::INT);
        let deadline = Instant::now() + STOP_TIMEOUT;
        while matches!(self.process.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                return Err(LocalPostgresError::NotStopped { pid });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    fn options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(self.files.run())
            .port(PORT)
            .username(ROLE)
            .database(database)
    }

    async fn wait_until_ready(&mut self) -> Result<(), LocalPostgresError> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Ok(connection) = PgConnection::connect_with(&self.options("postgres")).await {
                let _ = connection.close().await;
                return Ok(());
            }
            if !matches!(self.process.try_wait(), Ok(None)) || Instant::now() > deadline {
                return Err(LocalPostgresError::NotStarted { log: self.files.log() });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn pid(&self) -> i32 {
        self.process.id().cast_signed()
    }
}

impl Drop for LocalPostgres {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            // Immediate shutdown: its children exit too, and the next start recovers from the WAL.
            signal(self.pid(), Signal::QUIT);
            let _ = self.process.wait();
        }
    }
}

/// Returns the directory of the server binaries: the first in `PATH`, else the newest version.
fn find_binaries() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let complete = |dir: &PathBuf| dir.join("postgres").is_file() && dir.join("initdb").is_file();
    std::env::split_paths(&path).find(complete).or_else(|| {
        let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
        versions
            .filter_map(|entry| Some(entry.ok()?.path().join("bin")))
            .filter(complete)
            .max_by_key(|dir| version_of(dir))
    })
}

fn version_of(bin: &Path) -> u32 {
    let name = bin.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    name.and_then(|name| name.parse().ok()).unwrap_or(0)
}

/// Checks that the server can create its socket in `run`.
fn check_access(run: &Path, user: ServerUser) -> Result<(), LocalPostgresError> {
    if run.join(format!(".s.PGSQL.{PORT}")).as_os_str().len() > MAX_SOCKET_PATH {
        return Err(LocalPostgresError::PathTooLong(run.to_owned()));
    }
    let status =
        command_as(Path::new("/bin/sh"), user).args(["-c", "test -x \"$0\""]).arg(run).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        _ => Err(LocalPostgresError::Unreachable(run.to_owned())),
    }
}

/// Builds a command that runs as the server's user with a clean environment.
fn command_as(program: &Path, user: ServerUser) -> Command {
    let mut command = Command::new(program);
    // A separate process group: Ctrl-C on our terminal must not reach it.
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .process_group(0);
    if let Some((uid, gid)) = user {
        command.uid(uid).gid(gid);
    }
    command
}

fn init_cluster(binaries: &Path, data: &Path, user: ServerUser) -> Result<(), LocalPostgresError> {
    let initdb = binaries.join("initdb");
    let output = command_as(&initdb, user)
        .current_dir(data)
        .args([
            "--auth-local=peer",
            "--auth-host=reject",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
            "--no-instructions",
            "--username",
            ROLE,
            "-D",
        ])
        .arg(data)
        .output()
        .map_err(file("run", &initdb))?;
    if !output.status.success() {
        let _ = fs::remove_dir_all(data);
        return Err(LocalPostgresError::Init(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ));
    }
    Ok(())
}

fn spawn_server(
    binaries: &Path,
    files: &Files,
    user: ServerUser,
    durability: Durability,
) -> Result<Child, LocalPostgresError> {
    let log = files.open_log()?;
    let errors = log.try_clone().map_err(file("open", &files.log()))?;
    let [hba, ident] = files.write_authentication()?;
    let program = binaries.join("postgres");
    let mut command = command_as(&program, user);
    command.current_dir(files.data()).arg("-D").arg(files.data()).arg("-k").arg(files.run());
    command.args(["-p", &PORT.to_string(), "-c", "listen_addresses="]);
    for setting in settings::all(durability) {
        command.arg("-c").arg(setting);
    }
    // Not the files in the data directory, which the server's user may change.
    command.arg("-c").arg(format!("hba_file={}", hba.display()));
    command.arg("-c").arg(format!("ident_file={}", ident.display()));
    command.stdout(log).stderr(errors).spawn().map_err(file("run", &program))
}

/// Stops a server that a killed owner left running on this data directory.
async fn stop_leftover(data: &Path) -> Result<(), LocalPostgresError> {
    let Some(pid) = leftover_pid(data) else { return Ok(()) };
    signal(pid, Signal::INT);
    let deadline = Instant::now() + STOP_TIMEOUT;
    while leftover_pid(data) == Some(pid) {
        if Instant::now() > deadline {
            return Err(LocalPostgresError::NotStopped { pid });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Returns the server process of this data directory: its pid file names it and it works there.
fn leftover_pid(data: &Path) -> Option<i32> {
    let pid: i32 = fs::read_to_string(data.join("postmaster.pid"))
        .ok()?
        .lines()
        .next()?
        .trim()
        .parse()
        .ok()?;
    let working_dir = fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
    (working_dir == fs::canonicalize(data).ok()?).then_some(pid)
}

/// Sends a signal. Ignores a process that is already gone.
fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

fn file<'a>(
    step: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> LocalPostgresError + 'a {
    move |source| LocalPostgresError::File { step, path: path.to_owned(), source }
}
