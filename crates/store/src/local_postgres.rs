//! A private Postgres from the installed binaries: on a Unix socket alone, in a directory of its
//! own, ended with its owner. For `codelia up` and for tests.

use std::{
    fs, io,
    os::unix::{fs::DirBuilderExt, fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

/// The role that owns everything in a private server.
const ROLE: &str = "codelia";
/// The server is in a directory of its own, so the port only names its socket.
const PORT: u16 = 5432;
/// A Unix socket's path has at most this many bytes.
const SOCKET_PATH_MAX: usize = 107;
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A private server cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LocalPostgresError {
    /// No installed binaries were found.
    #[error(
        "no PostgreSQL server binaries found (looked in PATH and /usr/lib/postgresql/*/bin); \
         install Debian's `postgresql`, or set CODELIA_DATABASE_URL"
    )]
    NotInstalled,
    /// Postgres refuses to run as root, and there is nobody else to run it as.
    #[error("running as root, and there is no user `postgres` or `nobody` to run PostgreSQL as")]
    NoUser,
    /// The path of the socket would be too long.
    #[error("the directory {} is too long a path for a Unix socket", .0.display())]
    PathTooLong(PathBuf),
    /// The user that Postgres runs as cannot get to its directory.
    #[error("the user that PostgreSQL runs as cannot reach {}: give its parent directories the x permission", .0.display())]
    Unreachable(PathBuf),
    /// A step on a file failed.
    #[error("cannot {step} {}: {source}", .path.display())]
    File {
        /// What was tried.
        step: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// `initdb` failed.
    #[error("initdb failed: {0}")]
    Init(String),
    /// The server ended, or did not answer in time.
    #[error("PostgreSQL did not start; see {}", .log.display())]
    NotStarted {
        /// Its log.
        log: PathBuf,
    },
    /// The server did not end in time.
    #[error("PostgreSQL (pid {pid}) did not stop")]
    NotStopped {
        /// Its process id.
        pid: i32,
    },
    /// A database could not be made.
    #[error("cannot create a database")]
    Database(#[source] sqlx::Error),
}

/// Whether what the server says is stored survives a power loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Durability {
    Full,
    None,
}

/// User and group ids.
type Owner = Option<(u32, u32)>;

/// A running private server. Dropping it stops the server.
#[derive(Debug)]
pub struct LocalPostgres {
    dir: PathBuf,
    process: Child,
}

impl LocalPostgres {
    /// Starts the server in `dir`, creating the cluster there first if it is new. A server that
    /// an earlier owner left running there is stopped first. As root it runs as another user.
    ///
    /// # Errors
    /// If it cannot be started; nothing is left running then.
    pub async fn start(dir: &Path) -> Result<Self, LocalPostgresError> {
        Self::start_with(dir, Durability::Full).await
    }

    /// As [`LocalPostgres::start`], but what it stores need not survive a crash of the machine. For tests.
    ///
    /// # Errors
    /// As [`LocalPostgres::start`].
    pub async fn start_throwaway(dir: &Path) -> Result<Self, LocalPostgresError> {
        Self::start_with(dir, Durability::None).await
    }

    async fn start_with(dir: &Path, durability: Durability) -> Result<Self, LocalPostgresError> {
        let binaries = find_binaries().ok_or(LocalPostgresError::NotInstalled)?;
        let owner = owner()?;
        make_directory(dir, owner)?;
        check_socket_path(dir)?;
        let data = dir.join("data");
        if data.join("PG_VERSION").exists() {
            stop_leftover(&data).await?;
        } else {
            init_cluster(&binaries, dir, &data, owner)?;
        }
        let process = spawn_server(&binaries, dir, &data, owner, durability)?;
        let mut server = Self { dir: dir.to_owned(), process };
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// How to connect to the database `name`, which is created if it is not there.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn database(&self, name: &str) -> Result<PgConnectOptions, LocalPostgresError> {
        self.create_database(name).await.map_err(LocalPostgresError::Database)?;
        Ok(self.options(name))
    }

    async fn create_database(&self, name: &str) -> Result<(), sqlx::Error> {
        let mut admin = PgConnection::connect_with(&self.options("postgres")).await?;
        let known: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM pg_database WHERE datname = $1)")
            .bind(name)
            .fetch_one(&mut admin)
            .await?;
        if !known {
            let quoted = name.replace('"', "\"\"");
            let statement = sqlx::AssertSqlSafe(format!("CREATE DATABASE \"{quoted}\""));
            sqlx::query(statement).execute(&mut admin).await?;
        }
        admin.close().await
    }

    /// The address of the database `name`, for programs that take a `postgres://` one.
    #[must_use]
    pub fn url(&self, name: &str) -> String {
        let host: String = self.dir.to_string_lossy().bytes().map(|byte| format!("%{byte:02X}")).collect();
        format!("postgres://{ROLE}@{host}:{PORT}/{name}")
    }

    /// Stops the server and waits for its end.
    ///
    /// # Errors
    /// If it does not end in time.
    pub async fn stop(mut self) -> Result<(), LocalPostgresError> {
        let pid = self.pid();
        signal(pid, Signal::INT);
        let deadline = Instant::now() + STOP_TIMEOUT;
        while matches!(self.process.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                return Err(LocalPostgresError::NotStopped { pid });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    fn options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass().socket(&self.dir).port(PORT).username(ROLE).database(database)
    }

    async fn wait_until_ready(&mut self) -> Result<(), LocalPostgresError> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Ok(connection) = PgConnection::connect_with(&self.options("postgres")).await {
                let _ = connection.close().await;
                return Ok(());
            }
            if !matches!(self.process.try_wait(), Ok(None)) || Instant::now() > deadline {
                return Err(LocalPostgresError::NotStarted { log: self.dir.join("log") });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    fn pid(&self) -> i32 {
        self.process.id().cast_signed()
    }
}

impl Drop for LocalPostgres {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            // Immediate: its children end too, and the next start recovers from the log.
            signal(self.pid(), Signal::QUIT);
            let _ = self.process.wait();
        }
    }
}

/// The newest installed server's directory of binaries.
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

/// Whom the server runs as: `None` for ourselves, somebody else if we are root.
fn owner() -> Result<Owner, LocalPostgresError> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let path = Path::new("/etc/passwd");
    let users = fs::read_to_string(path).map_err(file("read", path))?;
    let find = |name: &str| {
        let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut ids = line.split(':').skip(2);
        Some((ids.next()?.parse().ok()?, ids.next()?.parse().ok()?))
    };
    find("postgres").or_else(|| find("nobody")).map(Some).ok_or(LocalPostgresError::NoUser)
}

fn make_directory(dir: &Path, owner: Owner) -> Result<(), LocalPostgresError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(file("create", dir))?;
    if let Some((uid, gid)) = owner {
        chown(dir, Some(uid), Some(gid)).map_err(file("give away", dir))?;
    }
    let reaches = as_owner(Path::new("/bin/sh"), owner).args(["-c", "test -x \"$0\""]).arg(dir).status();
    match reaches {
        Ok(status) if status.success() => Ok(()),
        _ => Err(LocalPostgresError::Unreachable(dir.to_owned())),
    }
}

fn check_socket_path(dir: &Path) -> Result<(), LocalPostgresError> {
    let socket = dir.join(format!(".s.PGSQL.{PORT}.lock"));
    if socket.as_os_str().len() > SOCKET_PATH_MAX {
        Err(LocalPostgresError::PathTooLong(dir.to_owned()))
    } else {
        Ok(())
    }
}

/// A command that runs as the server's owner, with nothing of our surroundings.
fn as_owner(program: &Path, owner: Owner) -> Command {
    let mut command = Command::new(program);
    // Its own process group: a Ctrl-C on our terminal is not for it.
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .process_group(0);
    if let Some((uid, gid)) = owner {
        command.uid(uid).gid(gid);
    }
    command
}

fn init_cluster(binaries: &Path, dir: &Path, data: &Path, owner: Owner) -> Result<(), LocalPostgresError> {
    let initdb = binaries.join("initdb");
    // Only the owner and root can reach the socket, so who gets there is trusted.
    let output = as_owner(&initdb, owner)
        .current_dir(dir)
        .args([
            "--auth=trust",
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
        return Err(LocalPostgresError::Init(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(())
}

fn spawn_server(
    binaries: &Path,
    dir: &Path,
    data: &Path,
    owner: Owner,
    durability: Durability,
) -> Result<Child, LocalPostgresError> {
    let log_path = dir.join("log");
    let log =
        fs::OpenOptions::new().create(true).append(true).open(&log_path).map_err(file("open", &log_path))?;
    let errors = log.try_clone().map_err(file("open", &log_path))?;
    let program = binaries.join("postgres");
    let mut command = as_owner(&program, owner);
    command.current_dir(dir).arg("-D").arg(data).arg("-k").arg(dir).arg("-p").arg(PORT.to_string());
    command.args([
        "-c",
        "listen_addresses=",
        "-c",
        "unix_socket_permissions=0700",
        "-c",
        "max_connections=200",
    ]);
    if durability == Durability::None {
        command.args(["-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off"]);
    }
    command.stdout(log).stderr(errors).spawn().map_err(file("run", &program))
}

/// Stops a server that an owner which was killed left running on this data.
async fn stop_leftover(data: &Path) -> Result<(), LocalPostgresError> {
    let Some(pid) = leftover_pid(data) else { return Ok(()) };
    signal(pid, Signal::INT);
    let deadline = Instant::now() + STOP_TIMEOUT;
    while leftover_pid(data) == Some(pid) {
        if Instant::now() > deadline {
            return Err(LocalPostgresError::NotStopped { pid });
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

/// The process that serves this data, if one does: its pid file names it and it works there.
fn leftover_pid(data: &Path) -> Option<i32> {
    let pid: i32 =
        fs::read_to_string(data.join("postmaster.pid")).ok()?.lines().next()?.trim().parse().ok()?;
    let works_in = fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
    (works_in == fs::canonicalize(data).ok()?).then_some(pid)
}

/// That it is gone already is as good.
fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

fn file<'a>(step: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> LocalPostgresError + 'a {
    move |source| LocalPostgresError::File { step, path: path.to_owned(), source }
}
