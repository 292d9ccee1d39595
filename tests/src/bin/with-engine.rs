//! Runs a command with private container engines: `with-engine IMAGE TAR COMMAND ARGS…`. Docker
//! and, if installed, Podman get the file tree in TAR as IMAGE. The tests find the engines by
//! `CODELIA_TEST_ENGINE` and `CODELIA_TEST_PODMAN`. An engine that cannot run here is left out.

use std::{
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result};
use codelia_tests::{
    ENGINE_SOCKET, Engine, EngineKind, PODMAN_SOCKET, available, is_root, run_wrapped,
};

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let mut next = || arguments.next().context("usage: with-engine IMAGE TAR COMMAND ARGS…");
    let (image, tar, program) = (next()?, next()?, next()?);
    let mut command = Command::new(&program);
    command.args(arguments);

    let mut engines = Vec::new();
    for (kind, need, variable) in [
        (EngineKind::Docker, "container", ENGINE_SOCKET),
        (EngineKind::Podman, "podman", PODMAN_SOCKET),
    ] {
        if available(need, missing(kind, Path::new(&tar))) {
            let engine = Engine::start(kind).await?;
            engine.import(Path::new(&tar), &image.to_string_lossy())?;
            command.env(variable, engine.socket());
            engines.push(engine);
        }
    }
    let status = run_wrapped(command).await;
    let mut stopped = Ok(());
    for engine in engines {
        stopped = stopped.and(engine.stop().await);
    }
    stopped?;
    Ok(status?
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}

fn missing(kind: EngineKind, tar: &Path) -> Option<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| std::env::split_paths(&path).any(|dir| dir.join(name).is_file());
    match kind {
        _ if !is_root() => Some("only root can start a container engine"),
        _ if !has("docker") => Some("no docker: install docker.io"),
        _ if !tar.is_file() => Some("no file tree for the image: run scripts/rootfs"),
        EngineKind::Docker if !has("dockerd") => Some("no dockerd: install docker.io"),
        EngineKind::Podman if !has("podman") || !has("runc") => {
            Some("no podman with runc: install podman and runc")
        }
        EngineKind::Docker | EngineKind::Podman => None,
    }
}
