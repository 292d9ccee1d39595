//! A private Postgres from the installed binaries: on a Unix socket alone, in a directory of its
//! own, ended with its owner. For `codelia up` and for tests.

use std::path::{Path, PathBuf};

use sqlx::postgres::PgConnectOptions;

/// A private server cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No installed binaries were found.
    #[error("no PostgreSQL server binaries found (looked in PATH and /usr/lib/postgresql/*/bin); install Debian's `postgresql`")]
    NotInstalled,
}

/// A running private server. Dropping it stops the server.
#[derive(Debug)]
pub struct Server {
    socket_dir: PathBuf,
}

impl Server {
    /// Starts the server in `dir`, creating the cluster there first if it is new. As root it runs
    /// as another user.
    pub async fn start(dir: &Path) -> Result<Self, ServerError> {
        let _ = dir;
        todo!()
    }

    /// How to connect to the database `name`, which is created if it is not there.
    pub async fn database(&self, name: &str) -> Result<PgConnectOptions, ServerError> {
        todo!()
    }

    /// Stops the server and waits for its end.
    pub async fn stop(self) -> Result<(), ServerError> {
        let _ = self.socket_dir;
        todo!()
    }
}
