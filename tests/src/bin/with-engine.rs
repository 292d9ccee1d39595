//! Runs a command with one private container engine for all of it: `with-engine IMAGE TAR COMMAND ARGS…`.
//! The engine has the tree in TAR as IMAGE. The tests find it by `CODELIA_TEST_ENGINE`; it ends with the
//! command. Where there can be none, the command runs without.

use std::{
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result};
use codelia_tests::{ENGINE_SOCKET, Engine, available, is_root};

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let mut next = || arguments.next().context("usage: with-engine IMAGE TAR COMMAND ARGS…");
    let (image, tar, program) = (next()?, next()?, next()?);
    let mut command = Command::new(&program);
    command.args(arguments);

    let engine = if available("container", missing(Path::new(&tar))) {
        let engine = Engine::start().await?;
        engine.import(Path::new(&tar), &image.to_string_lossy())?;
        command.env(ENGINE_SOCKET, engine.socket());
        Some(engine)
    } else {
        None
    };
    let status = command.status().with_context(|| format!("run {}", program.display()));
    if let Some(engine) = engine {
        engine.stop().await?;
    }
    Ok(status?.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn missing(tar: &Path) -> Option<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
    match () {
        () if !is_root() => Some("only root may start a container engine"),
        () if !has("dockerd") || !has("docker") => Some("no dockerd: install docker.io"),
        () if !tar.is_file() => Some("no tree for its image: scripts/rootfs makes one"),
        () => None,
    }
}
