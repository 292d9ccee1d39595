//! Profiles: a session with the layout, limits and variables of a kind of work.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{CreateSessionRequest, Run, SandboxMode, StartRunRequest, outcome};
use codelia_tests::{Client, Cluster, Exec, Process, ProcessOutput, available, refusal, shell};
use serde_json::Value;
use tempfile::TempDir;
use tonic::Code;

use crate::{
    isolation::{isolating, isolating_with},
    network::is_installed,
};

async fn codelia(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

/// A directory that the users of sessions may read, and that a policy can show: sandboxes have a
/// `/tmp` of their own.
fn open_directory() -> Result<TempDir> {
    let directory = tempfile::tempdir_in("/srv").or_else(|_| tempfile::tempdir())?;
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
    Ok(directory)
}

/// Copies the toolchain out of a home directory, with hard links if possible. `None` if there is
/// none.
fn stage_toolchain(directory: &Path) -> Result<Option<PathBuf>> {
    let Ok(printed) = Command::new("rustc").args(["--print", "sysroot"]).output() else {
        return Ok(None);
    };
    let sysroot = PathBuf::from(String::from_utf8(printed.stdout)?.trim());
    if !sysroot.join("bin/cargo").exists() || !Path::new("/usr/bin/cc").exists() {
        return Ok(None);
    }
    let target = directory.join("toolchain");
    for how in ["-rl", "-r"] {
        fs::create_dir_all(&target)?;
        let mut copy = Command::new("cp");
        copy.args([how, "--parents", "bin/cargo", "bin/rustc", "lib"])
            .arg(&target)
            .current_dir(&sysroot);
        if copy.stderr(Stdio::null()).status()?.success() {
            return Ok(Some(target));
        }
        fs::remove_dir_all(&target)?;
    }
    Ok(None)
}

const MANIFEST: &str = "[package]
name = \"tiny\"
version = \"0.1.0\"
edition = \"2021\"
build = \"build.rs\"

[[bin]]
name = \"tiny\"
path = \"main.rs\"
";
const LOCK: &str = "version = 3\n\n[[package]]\nname = \"tiny\"\nversion = \"0.1.0\"\n";
const BUILD: &str = "fn main() { println!(\"cargo:rustc-env=BUILT=by a script\"); }";
const MAIN: &str = "fn main() { println!(\"built {}\", env!(\"BUILT\")); }";

async fn cargo_builds_in_its_profile(mode: &'static str) -> Result<()> {
    let staged = open_directory()?;
    let is_hidden = staged.path().starts_with("/tmp");
    let toolchain = if is_hidden { None } else { stage_toolchain(staged.path())? };
    if !available(
        "cargo",
        toolchain.is_none().then_some("no toolchain to copy, no linker, or /srv is not writable"),
    ) {
        return Ok(());
    }
    let toolchain = toolchain.context("a toolchain")?.display().to_string();
    let policy = staged.path().join("policy.yaml");
    fs::write(&policy, format!("filesystem: {{read_only_paths: [{toolchain}]}}"))?;
    let settings = vec![("CODELIA_SANDBOX_POLICY", policy.display().to_string())];
    let Some(cluster) = isolating_with(mode, 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let create = ["session", "create", "--alias", "work", "--profile", "cargo", "--memory", "1g"];
    let done = codelia(&cluster, &client, &[&create[..], &["--ro", &toolchain]].concat()).await?;
    ensure!(done.code == Some(0), "{done:?}");
    for (name, text) in
        [("Cargo.toml", MANIFEST), ("Cargo.lock", LOCK), ("build.rs", BUILD), ("main.rs", MAIN)]
    {
        client.put("sessions/work", name, text).await?;
    }
    let path = format!("PATH={toolchain}/bin:/usr/bin:/bin");
    let build = ["run", "-s", "work", "-e", &path, "--", "cargo", "build", "--offline", "--locked"];
    let done = codelia(&cluster, &client, &build).await?;
    ensure!(done.code == Some(0), "{done:?}");
    let done =
        codelia(&cluster, &client, &["run", "-s", "work", "--", "target/debug/tiny"]).await?;
    ensure!(done.stdout == "built by a script\n", "{done:?}");
    // The source stays as it is, and the program cannot be executed from anywhere else.
    let attack = "echo x >> main.rs; cp target/debug/tiny logs/tiny && logs/tiny; cp target/debug/tiny /tmp && /tmp/tiny";
    let done = codelia(&cluster, &client, &["run", "-s", "work", "--", "sh", "-c", attack]).await?;
    ensure!(done.code == Some(126) && done.stdout.is_empty(), "{done:?}");
    ensure!(client.get("sessions/work", "main.rs").await? == MAIN, "the source was changed");
    let session = client.get_session("sessions/work").await?;
    ensure!(session.profile == "cargo", "{session:?}");
    cluster.end().await
}

#[tokio::test]
async fn cargo_builds_in_its_profile_in_mode_bwrap() -> Result<()> {
    cargo_builds_in_its_profile("bwrap").await
}

#[tokio::test]
async fn cargo_builds_in_its_profile_in_mode_native() -> Result<()> {
    cargo_builds_in_its_profile("native").await
}

/// What a profile promises about its layout.
struct Layout {
    profile: &'static str,
    /// Where programs may be created and executed.
    executable: &'static str,
    /// Where files may be created, and nothing is executed.
    data: [&'static str; 3],
    /// Prints the variables of the profile.
    variables: (&'static str, &'static str),
    /// Needs the tool of the profile, and what it prints.
    tool: (&'static str, &'static str, &'static str),
}

const PYTHON: Layout = Layout {
    profile: "python",
    executable: ".venv",
    data: [".cache", "logs", "out"],
    variables: (
        "echo $PIP_CACHE_DIR $VIRTUAL_ENV $PYTHONDONTWRITEBYTECODE",
        "/workspace/.cache/pip /workspace/.venv 1\n",
    ),
    tool: (
        "python3",
        "/usr/bin/python3 -m venv --without-pip .venv && cd .venv/lib/python3*/site-packages && \
         echo 'word = \"installed\"' > demo.py && /workspace/.venv/bin/python -c \
         'import demo, sys; print(demo.word, sys.prefix, demo.__file__.startswith(sys.prefix))'",
        "installed /workspace/.venv True\n",
    ),
};

const NODE: Layout = Layout {
    profile: "node",
    executable: "node_modules",
    data: [".npm", "logs", "dist"],
    variables: ("echo $npm_config_cache $npm_config_logs_dir", "/workspace/.npm /workspace/logs\n"),
    tool: (
        "node",
        "mkdir node_modules/demo && echo 'module.exports = \"installed\"' > node_modules/demo/index.js && \
         node -e 'console.log(require(\"demo\"))'",
        "installed\n",
    ),
};

/// A program that is created in a directory and executed.
fn create_and_execute(directory: &str) -> String {
    format!(
        "printf '#!/bin/sh\\necho ran\\n' > {directory}/program && chmod 755 {directory}/program && {directory}/program"
    )
}

async fn profile_has_its_layout(mode: &'static str, layout: &Layout) -> Result<()> {
    let Some(cluster) = isolating(mode, 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let create = ["session", "create", "--alias", "work", "--profile", layout.profile];
    let done = codelia(&cluster, &client, &create).await?;
    ensure!(done.code == Some(0), "{done:?}");
    client.put("sessions/work", "source", "as it was").await?;
    let run = async |script: &str| {
        codelia(&cluster, &client, &["run", "-s", "work", "--", "sh", "-c", script]).await
    };

    let (script, printed) = layout.variables;
    let done = run(script).await?;
    ensure!(done.stdout == printed, "{done:?}");
    for script in ["echo x >> source", "rm source", "echo x > new", "mkdir new"] {
        let done = run(script).await?;
        ensure!(
            done.code != Some(0) && done.stderr.contains("Read-only file system"),
            "{script}: {done:?}"
        );
    }
    ensure!(client.get("sessions/work", "source").await? == "as it was");
    // The control: in one directory programs may be created and executed.
    let done = run(&create_and_execute(layout.executable)).await?;
    ensure!((done.code, done.stdout.as_str()) == (Some(0), "ran\n"), "{done:?}");
    for directory in layout.data.iter().chain(&["/tmp"]) {
        let done = run(&create_and_execute(directory)).await?;
        ensure!(done.code == Some(126) && done.stdout.is_empty(), "{directory}: {done:?}");
    }
    let found = client.get_session("sessions/work").await?;
    ensure!(
        found.limits.as_ref().and_then(|limits| limits.disk_bytes) == Some(10 << 30),
        "{found:?}"
    );

    let (tool, script, printed) = layout.tool;
    let missing = (!is_installed(tool)).then_some(tool);
    if available("programs", missing) {
        let done = run(script).await?;
        ensure!((done.code, done.stdout.as_str()) == (Some(0), printed), "{done:?}");
    }
    cluster.end().await
}

#[tokio::test]
async fn python_profile_has_its_layout() -> Result<()> {
    profile_has_its_layout("bwrap", &PYTHON).await
}

#[tokio::test]
async fn node_profile_has_its_layout() -> Result<()> {
    profile_has_its_layout("native", &NODE).await
}

const SMALL: &str = "description: A small log
policy:
  layout:
    read_only_workspace: true
    directories: [{path: logs, max_bytes: 1048576}, {path: out}]
env: {KIND: small, PLACE: /workspace/out}
limits: {pids: 33}
";

fn limit(run: &Run) -> Option<&str> {
    match run.outcome.as_ref()?.kind.as_ref()? {
        outcome::Kind::Limit(limit) => Some(&limit.resource),
        _ => None,
    }
}

async fn run(client: &Client, session: &str, script: &str) -> Result<Run> {
    let done = Exec::start(client, shell(session, script)).await?.finish().await?;
    done.finished.context("the run did not end")
}

async fn directory_limit_ends_run(mode: &'static str) -> Result<()> {
    let directory = open_directory()?;
    fs::write(directory.path().join("small.yaml"), SMALL)?;
    let settings = vec![("CODELIA_SANDBOX_PROFILES_DIR", directory.path().display().to_string())];
    let Some(cluster) = isolating_with(mode, 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let request = CreateSessionRequest { profile: "small".to_owned(), ..Default::default() };
    let session = client.create(request).await?;
    ensure!(session.limits.as_ref().and_then(|limits| limits.pids) == Some(33), "{session:?}");
    let within = "head -c 524288 /dev/zero > logs/a; head -c 4194304 /dev/zero > out/a";
    let ended = run(&client, &session.name, within).await?;
    ensure!(limit(&ended).is_none(), "the control: {ended:?}");
    let fill = "trap '' TERM; while :; do head -c 65536 /dev/zero >> logs/b; sleep 0.01; done";
    let ended = run(&client, &session.name, fill).await?;
    ensure!(limit(&ended) == Some("disk_bytes"), "{ended:?}");
    let again = run(&client, &session.name, fill).await?;
    ensure!(limit(&again) == Some("disk_bytes"), "a full directory cannot grow: {again:?}");
    let done = client.exec(&session.name, "sleep 1; rm logs/b && ls logs").await?;
    ensure!(done.stdout_text() == "a\n", "files can be removed from a full directory: {done:?}");
    cluster.end().await
}

#[tokio::test]
async fn directory_limit_ends_run_in_mode_bwrap() -> Result<()> {
    directory_limit_ends_run("bwrap").await
}

#[tokio::test]
async fn directory_limit_ends_run_in_mode_nsjail() -> Result<()> {
    directory_limit_ends_run("nsjail").await
}

#[tokio::test]
async fn directory_limit_ends_run_in_mode_native() -> Result<()> {
    directory_limit_ends_run("native").await
}

#[tokio::test]
async fn directory_limit_ends_run_in_mode_container() -> Result<()> {
    directory_limit_ends_run("container").await
}

#[tokio::test]
async fn operator_profile_sets_variables_and_layout() -> Result<()> {
    let directory = open_directory()?;
    fs::write(directory.path().join("small.yaml"), SMALL)?;
    let settings = vec![("CODELIA_SANDBOX_PROFILES_DIR", directory.path().display().to_string())];
    let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let listed = codelia(&cluster, &client, &["profiles", "list"]).await?;
    for name in ["cargo", "node", "python", "shell", "small", "A small log", "operator"] {
        ensure!(listed.stdout.contains(name), "{name}: {listed:?}");
    }
    let shown = codelia(&cluster, &client, &["--json", "profiles", "show", "small"]).await?;
    let shown: Value = serde_json::from_str(&shown.stdout)?;
    ensure!(
        shown["policy"]["layout"]["readOnlyWorkspace"] == true && shown["limits"]["pids"] == "33",
        "{shown}"
    );
    let script =
        "echo $KIND $PLACE; touch here || echo read-only; touch $PLACE/there && echo writable";
    let words = ["run", "--profile", "small", "-e", "KIND=own", "--", "sh", "-c", script];
    let done = codelia(&cluster, &client, &words).await?;
    ensure!(done.stdout == "own /workspace/out\nread-only\nwritable\n", "{done:?}");
    // A policy of the session can only tighten the profile.
    let policy = cluster.directory().join("more.yaml");
    fs::write(&policy, "layout: {directories: [{path: src}]}")?;
    let policy = policy.to_str().context("a path")?;
    let done = codelia(
        &cluster,
        &client,
        &["session", "create", "--profile", "small", "--policy", policy],
    )
    .await?;
    ensure!(
        done.code == Some(1) && done.stderr.contains("policy.layout.directories[0].path"),
        "{done:?}"
    );
    cluster.end().await
}

#[tokio::test]
async fn unknown_profile_is_refused_with_the_names() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let request = CreateSessionRequest { profile: "cobol".to_owned(), ..Default::default() };
    let status = client.create(request.clone()).await.unwrap_err();
    ensure!(refusal(&status).fields == ["profile"], "{status:?}");
    ensure!(status.message().contains("cargo, node, python, shell"), "{status:?}");
    let start = StartRunRequest { new_session: Some(request), ..shell("", "true") };
    let status = client.start(start).await.unwrap_err();
    ensure!(status.code() == Code::InvalidArgument, "{status:?}");
    // Mode `logical` cannot have a layout.
    let mode = SandboxMode::Logical.into();
    let request = CreateSessionRequest { profile: "cargo".to_owned(), mode, ..Default::default() };
    let status = client.create(request).await.unwrap_err();
    ensure!(refusal(&status).fields == ["profile.policy.layout"], "{status:?}");
    cluster.end().await
}
