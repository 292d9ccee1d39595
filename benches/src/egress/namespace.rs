//! Network namespaces for programs that are compared.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result, ensure};

/// A network namespace with its loopback device. Dropping it removes it.
#[derive(Debug)]
pub(super) struct Namespace(String);

impl Namespace {
    pub(super) fn create() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let namespace = Self(format!("codelia-bench-{}-{number}", std::process::id()));
        run(Command::new("ip").args(["netns", "add", &namespace.0]))?;
        run(Command::new("ip").args(["-n", &namespace.0, "link", "set", "lo", "up"]))?;
        Ok(namespace)
    }

    pub(super) fn name(&self) -> &str {
        &self.0
    }

    pub(super) fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.0)
    }

    /// A program that will run in this namespace.
    pub(super) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, program]);
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = run(Command::new("ip").args(["netns", "del", &self.0])) {
            eprintln!("cannot remove a network namespace: {error:#}");
        }
    }
}

/// Runs a command that must succeed.
pub(super) fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
