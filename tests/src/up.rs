//! `codelia up` on a test's own data directory.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{LeakGuard, Process, Program, Scratch};

/// An environment for `codelia up`: a copy of the programs and an empty data directory.
#[derive(Debug)]
pub struct Up {
    program: Program,
    leak_guard: LeakGuard,
    user: Option<u32>,
    scratch: Scratch,
}

impl Up {
    /// Creates an environment for the user that runs the test.
    pub fn new() -> Result<Self> {
        Self::create(None)
    }

    /// Creates an environment for another user. Needs root.
    pub fn for_user(uid: u32) -> Result<Self> {
        Self::create(Some(uid))
    }

    fn create(user: Option<u32>) -> Result<Self> {
        let scratch = Scratch::new()?;
        let program = Program::find()?.copied_into(scratch.path())?;
        let data = scratch.join("data");
        std::fs::create_dir(&data)?;
        std::os::unix::fs::chown(&data, user, user).context("chown the data directory")?;
        Ok(Self { program, leak_guard: LeakGuard::of(scratch.path()), user, scratch })
    }

    /// The data directory.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.scratch.join("data")
    }

    /// The URL of its private database.
    fn database_url(&self) -> String {
        let socket = self.data().join("postgres/run").to_string_lossy().replace('/', "%2F");
        format!("postgres://codelia@{socket}:5432/codelia")
    }

    /// The directory of the test.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.scratch.path()
    }

    /// Finds its processes.
    #[must_use]
    pub fn leak_guard(&self) -> &LeakGuard {
        &self.leak_guard
    }

    /// Builds the command of a further service (`api` or `worker`) on its database and store of
    /// output.
    #[must_use]
    pub fn service(&self, name: &str) -> Command {
        let mut command = self.command(&[name]);
        command
            .env("CODELIA_DATABASE_URL", self.database_url())
            .env("CODELIA_OUTPUT_STORE", format!("file://{}", self.data().join("output").display()))
            .env("CODELIA_METRICS_LISTEN", "");
        command
    }

    /// Builds a `codelia` command for its user and data directory.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = match self.user {
            Some(uid) => self.program.command_as(uid, &self.data()),
            None => self.program.command(),
        };
        command
            .args(arguments)
            .env("CODELIA_DATA_DIR", self.data())
            .env("CODELIA_INSTANCES_DIR", self.data().join("instances"))
            .env("CODELIA_SANDBOX_UID_REGISTRY", self.scratch.join("uids"));
        command
    }

    /// Builds a `codelia up` command that listens on free ports.
    #[must_use]
    pub fn up_command(&self) -> Command {
        self.command(&["up", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"])
    }

    /// Starts `codelia up` in the foreground and waits until it is ready.
    pub async fn start(&self) -> Result<Process> {
        self.start_with(&[]).await
    }

    /// Like [`Up::start`], with more arguments.
    pub async fn start_with(&self, arguments: &[&str]) -> Result<Process> {
        let mut command = self.up_command();
        command.args(arguments);
        let mut process = Process::start("up", command, self.scratch.path())?;
        process.ready().await?;
        Ok(process)
    }
}
