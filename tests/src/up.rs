//! `codelia up` on a data directory of one test.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{LeakGuard, Process, Program, Scratch};

/// A place for `codelia up`: its own copy of the programs, its own data directory.
#[derive(Debug)]
pub struct Up {
    program: Program,
    leak_guard: LeakGuard,
    user: Option<u32>,
    scratch: Scratch,
}

impl Up {
    /// A place for the user who runs the test.
    pub fn new() -> Result<Self> {
        Self::create(None)
    }

    /// A place for another user; only root can make one.
    pub fn for_user(uid: u32) -> Result<Self> {
        Self::create(Some(uid))
    }

    fn create(user: Option<u32>) -> Result<Self> {
        let scratch = Scratch::new()?;
        let program = Program::find()?.copied_into(scratch.path())?;
        let data = scratch.join("data");
        std::fs::create_dir(&data)?;
        std::os::unix::fs::chown(&data, user, user).context("give the data directory to its user")?;
        Ok(Self { program, leak_guard: LeakGuard::of(scratch.path()), user, scratch })
    }

    /// Where it keeps its data.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.scratch.join("data")
    }

    /// The test's own directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.scratch.path()
    }

    /// How to recognise its processes.
    #[must_use]
    pub fn leak_guard(&self) -> &LeakGuard {
        &self.leak_guard
    }

    /// A call of `codelia` as its user and on its data.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = match self.user {
            Some(uid) => self.program.command_as(uid, &self.data()),
            None => self.program.command(),
        };
        command.args(arguments).env("CODELIA_DATA_DIR", self.data());
        command
    }

    /// A call of `codelia up` on ports that are free.
    #[must_use]
    pub fn up_command(&self) -> Command {
        self.command(&["up", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"])
    }

    /// Starts `codelia up` in the foreground; it is ready when this returns.
    pub async fn start(&self) -> Result<Process> {
        let mut process = Process::start("up", self.up_command(), self.scratch.path())?;
        process.ready().await?;
        Ok(process)
    }
}
