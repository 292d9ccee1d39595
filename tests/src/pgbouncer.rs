//! PgBouncer in front of a private Postgres server.

use std::{
    fs,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_store::{Options, Pooler, Store};

use crate::{Process, Proxy, ProxyTarget, TIMEOUT, is_root, require::available};

/// Part of the socket's file name. It cannot collide, because the directory is private.
const PORT: u16 = 6432;
/// Connections to the server for each name of a database. Fewer than the clients, so that they
/// change hands.
const SERVER_CONNECTIONS: u32 = 4;

/// A running PgBouncer with `pool_mode = transaction`. Dropping it stops it.
#[derive(Debug)]
pub struct PgBouncer {
    process: Process,
    directory: PathBuf,
    /// Connects as this process's user: PgBouncer does not run as root.
    server: Proxy,
}

/// A name under which PgBouncer offers a database, with a setting of the connections to the server.
#[derive(Debug)]
pub(crate) struct Alias<'a> {
    pub(crate) name: String,
    pub(crate) database: &'a str,
    /// The name and the value.
    pub(crate) setting: (&'a str, &'a str),
}

impl PgBouncer {
    /// How long it refuses clients after the server refused its login.
    pub(crate) const LOGIN_RETRY_SECONDS: u32 = 1;

    /// Whether it is installed.
    #[must_use]
    pub fn is_available() -> bool {
        available("pgbouncer", program().is_none().then_some("pgbouncer is not installed"))
    }

    /// Starts it for the private server in `server`, with its files in the new directory
    /// `directory`.
    pub fn start(server: &Path, directory: &Path) -> Result<Self> {
        Self::start_with(ProxyTarget::postgres(server), directory, &[])
    }

    /// As [`PgBouncer::start`], with further names of databases.
    pub(crate) fn start_with(
        target: ProxyTarget,
        directory: &Path,
        aliases: &[Alias<'_>],
    ) -> Result<Self> {
        fs::create_dir(directory)?;
        let server = Proxy::to(target, &[])?;
        let address = format!("host=127.0.0.1 port={} user=codelia", server.port());
        let alias = |Alias { name, database, setting: (setting, value) }: &Alias<'_>| {
            let set = format!("SELECT set_config(''{setting}'', ''{value}'', false)");
            format!("{name} = {address} dbname={database} connect_query='{set}'\n")
        };
        let aliases: String = aliases.iter().map(alias).collect();
        let config = directory.join("pgbouncer.ini");
        let text = format!(
            "[databases]\n{aliases}* = {address}\n\
             [pgbouncer]\npool_mode = transaction\nauth_type = any\nlisten_addr =\nlisten_port = {PORT}\n\
             unix_socket_dir = {}\ndefault_pool_size = {SERVER_CONNECTIONS}\nmax_client_conn = 200\n\
             server_login_retry = {}\n",
            directory.display(),
            Self::LOGIN_RETRY_SECONDS
        );
        fs::write(&config, text)?;
        let mut command = Command::new(program().context("pgbouncer is not installed")?);
        command.arg(&config).stdin(Stdio::null());
        if is_root() {
            let passwd = fs::read_to_string("/etc/passwd")?;
            let user = passwd
                .lines()
                .find(|line| line.starts_with("postgres:"))
                .context("no user postgres")?;
            let mut ids = user.split(':').skip(2).map_while(|id| id.parse().ok());
            let (uid, gid) = ids.next().zip(ids.next()).context("ids of postgres")?;
            chown(directory, Some(uid), Some(gid))?;
            command.uid(uid).gid(gid);
        }
        let process =
            Process::start("pgbouncer", command, directory.parent().unwrap_or(directory))?;
        let started = Self { process, directory: directory.to_owned(), server };
        let deadline = Instant::now() + TIMEOUT;
        while !started.socket().exists() {
            ensure!(Instant::now() < deadline, "pgbouncer does not listen");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(started)
    }

    /// The address of its socket.
    pub(crate) fn target(&self) -> ProxyTarget {
        ProxyTarget::Unix(self.socket())
    }

    fn socket(&self) -> PathBuf {
        self.directory.join(format!(".s.PGSQL.{PORT}"))
    }

    /// Breaks its connections to the server and lets it connect to another one.
    pub(crate) fn redirect(&self, target: ProxyTarget) {
        self.server.redirect(target);
    }

    /// The URL of a database through it.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        let host: String =
            self.directory.to_string_lossy().bytes().map(|byte| format!("%{byte:02X}")).collect();
        format!("postgres://codelia@{host}:{PORT}/{database}")
    }

    /// Opens a database through it as a store.
    pub async fn store(
        &self,
        database: &str,
        pooler: Pooler,
    ) -> Result<Store, codelia_store::Error> {
        let options = Options::from_url(&self.url(database))?;
        Store::connect(Options { pooler, ..options }).await
    }

    /// Stops it.
    pub async fn stop(mut self) -> Result<()> {
        self.process.terminate().await.map(drop)
    }
}

fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    directories.map(|directory| directory.join("pgbouncer")).find(|program| program.is_file())
}
