//! Isolation through the whole service, from `codelia run` to what is left on the host.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{LimitExceeded, Limits, Lost, outcome};
use codelia_store::EventKind;
use codelia_sys::process_id::ProcessId;
use codelia_tests::{
    Client, Cluster, ClusterOptions, ENGINE_SOCKET, Process, ProcessOutput, Scratch,
    abandoned_cgroups, available, command, eventually, is_root, recorded_events, worker_containers,
};
use rustix::process::Signal;
use serde_json::Value;

use crate::kills::started;

/// Starts an installation with this mode, or returns `None` if the mode does not work here.
pub(crate) async fn isolating(mode: &'static str, workers: usize) -> Result<Option<Cluster>> {
    isolating_with(mode, workers, Vec::new()).await
}

pub(crate) async fn isolating_with(
    mode: &'static str,
    workers: usize,
    mut settings: Vec<(&'static str, String)>,
) -> Result<Option<Cluster>> {
    settings.push(("CODELIA_SANDBOX_MODE", mode.to_owned()));
    if mode == "container" {
        // Without a socket, workers of other modes skip the container probe.
        settings.push((
            "CODELIA_SANDBOX_CONTAINER_SOCKET",
            std::env::var(ENGINE_SOCKET).unwrap_or_default(),
        ));
    }
    let shape = ClusterOptions { workers: 0, apis: 0, settings, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    if !is_usable(&cluster, mode).await? {
        cluster.end().await?;
        return Ok(None);
    }
    for _ in 0..workers {
        cluster.add_worker().await?;
    }
    cluster.add_api().await?;
    Ok(Some(cluster))
}

/// Returns whether a mode works here. Fails if it does not and is required.
pub(crate) async fn is_usable(cluster: &Cluster, mode: &str) -> Result<bool> {
    let mut doctor = cluster.command("doctor", "doctor")?;
    doctor.arg("--json");
    let found: Value = serde_json::from_str(&Process::finish(doctor, b"").await?.stdout)?;
    let rows = found["modes"].as_array().context("modes")?;
    let row = rows.iter().find(|row| row["mode"] == mode).context("a row for each mode")?;
    let missing = (row["usable"] != true).then(|| row["gaps"].to_string());
    Ok(available(mode, missing.as_deref()))
}

/// Returns the report of `codelia doctor` with these settings.
pub(crate) async fn diagnosis(cluster: &Cluster, settings: &[(&str, &str)]) -> Result<Value> {
    let mut doctor = cluster.command("doctor", "diagnosis")?;
    doctor.arg("--json").envs(settings.iter().copied());
    Ok(serde_json::from_str(&Process::finish(doctor, b"").await?.stdout)?)
}

#[tokio::test]
async fn doctor_reports_gaps_and_remedies() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { workers: 0, apis: 0, ..ClusterOptions::default() })
            .await?;
    let bare = [
        ("CODELIA_BWRAP", "/no/bwrap"),
        ("CODELIA_NSJAIL", "/no/nsjail"),
        ("CODELIA_SANDBOX_CONTAINER_SOCKET", "/no/engine"),
    ];
    let found = diagnosis(&cluster, &bare).await?;
    for (mode, missing, remedy) in [
        ("bwrap", "/no/bwrap not found", "install bubblewrap"),
        ("nsjail", "/no/nsjail not found", "install nsjail"),
        ("container", "/no/engine", "start Docker or Podman"),
    ] {
        let rows = found["modes"].as_array().context("modes")?;
        let row = rows.iter().find(|row| row["mode"] == mode).context("a row for each mode")?;
        ensure!(row["usable"] == false, "{row}");
        let gaps = row["gaps"].as_array().context("gaps")?;
        let has = |gap: &Value, field: &str, text: &str| {
            gap[field].as_str().is_some_and(|it| it.contains(text))
        };
        ensure!(
            gaps.iter().any(|gap| has(gap, "missing", missing) && has(gap, "remedy", remedy)),
            "{row}"
        );
    }
    for (name, value, shown) in [
        ("CODELIA_OUTPUT_STORE", "postgres", "all in the database"),
        ("CODELIA_OUTPUT_STORE", "file:///srv/output", "file:///srv/output for more than 64 KiB"),
        ("CODELIA_OUTPUT_STORE", "s3://bucket/prefix", "s3://bucket/prefix for more than 64 KiB"),
        ("CODELIA_OUTPUT_S3_ACCESS_KEY_ID", "id", "output.s3_secret_access_key: set both"),
    ] {
        let found = diagnosis(&cluster, &[(name, value)]).await?;
        let checks = found["checks"].as_array().context("checks")?;
        let check =
            checks.iter().find(|check| check["check"] == "output store").context("output store")?;
        ensure!(check["found"].as_str().is_some_and(|text| text.contains(shown)), "{check}");
        ensure!(check["good"] == (name == "CODELIA_OUTPUT_STORE"), "{check}");
    }
    // The control: with its tool the mode is usable.
    if is_usable(&cluster, "bwrap").await? {
        let found = diagnosis(&cluster, &bare[1..]).await?;
        let rows = found["modes"].as_array().context("modes")?;
        ensure!(rows.iter().any(|row| row["mode"] == "bwrap" && row["usable"] == true), "{found}");
    }
    cluster.end().await
}

#[tokio::test]
async fn overlay_needs_operator_policy() -> Result<()> {
    const TOOLS: &str = "/usr/local";
    let place = Scratch::new()?;
    fs::write(place.join("policy.yaml"), format!("filesystem: {{overlay_paths: [{TOOLS}]}}"))?;
    let settings =
        vec![("CODELIA_SANDBOX_POLICY", place.join("policy.yaml").display().to_string())];
    let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let name = format!("codelia-test-{}", std::process::id());
    let script = format!(
        "cd {TOOLS} && echo new > {name} && cat {name} && dd if=/dev/zero of=/workspace/x bs=1M count=3 conv=fsync"
    );
    let run = ["run", "--static", "--overlay", TOOLS, "--json", "--", "sh", "-c", &script];
    let done = codelia(&cluster, &client, &run).await?;
    ensure!(done.code == Some(0) && done.stderr.starts_with("new\n"), "{done:?}");
    ensure!(!Path::new(TOOLS).join(name).exists(), "the host was changed");
    let usage = &record(&done)?["usage"];
    let written = usage["writtenBytes"].as_str().context("writtenBytes")?.parse::<u64>()?;
    ensure!(written >= 3 << 20 && usage["peakProcesses"].is_string(), "{usage}");
    let done = codelia(&cluster, &client, &["run", "--overlay", "/opt", "--", "true"]).await?;
    ensure!(
        done.code == Some(125) && done.stderr.contains("policy.filesystem.overlay_paths[0]"),
        "{done:?}"
    );
    cluster.end().await
}

async fn codelia(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

/// Parses the run record, which is all that `--json` prints.
fn record(done: &ProcessOutput) -> Result<Value> {
    serde_json::from_str(&done.stdout).with_context(|| format!("{done:?}"))
}

/// Whether a receipt counts nothing: JSON leaves out what is zero.
fn is_zero(receipt: &Value) -> bool {
    receipt.as_object().is_some_and(serde_json::Map::is_empty)
}

fn has_outcome(record: &Value, name: &str) -> bool {
    !record["outcome"][name].is_null()
}

async fn session(cluster: &Cluster, client: &Client, alias: &str) -> Result<()> {
    let created = codelia(cluster, client, &["session", "create", "--alias", alias]).await?;
    ensure!(created.code == Some(0), "{created:?}");
    Ok(())
}

async fn sessions_are_isolated(mode: &'static str) -> Result<()> {
    let Some(cluster) = isolating(mode, 1).await? else { return Ok(()) };
    let client = cluster.operator().await?;
    session(&cluster, &client, "mine").await?;
    session(&cluster, &client, "theirs").await?;
    let write = [
        "run",
        "--json",
        "-s",
        "theirs",
        "--",
        "sh",
        "-c",
        "echo secret > treasure; chmod -R 777 .",
    ];
    let written = record(&codelia(&cluster, &client, &write).await?)?;
    assert_eq!(
        (&written["isolation"], &written["exitCode"]),
        (&mode.into(), &0.into()),
        "{written}"
    );
    assert!(is_zero(&written["receipt"]), "{written}");

    let root = written["sandboxRoot"].as_str().context("a root")?;
    let attack = format!(
        "cat {root}/treasure ../*/treasure /proc/*/root{root}/treasure; ls /workspace; id -un; pwd"
    );
    let done =
        codelia(&cluster, &client, &["run", "-s", "mine", "--", "sh", "-c", &attack]).await?;
    assert_eq!((done.stdout.as_str(), done.code), ("codelia\n/workspace\n", Some(0)), "{done:?}");
    assert_eq!(fs::read_to_string(Path::new(root).join("treasure"))?, "secret\n");
    cluster.end().await
}

#[tokio::test]
async fn sessions_are_isolated_in_mode_bwrap() -> Result<()> {
    sessions_are_isolated("bwrap").await
}

#[tokio::test]
async fn sessions_are_isolated_in_mode_nsjail() -> Result<()> {
    sessions_are_isolated("nsjail").await
}

#[tokio::test]
async fn sessions_are_isolated_in_mode_native() -> Result<()> {
    sessions_are_isolated("native").await
}

#[tokio::test]
async fn sessions_are_isolated_in_mode_container() -> Result<()> {
    sessions_are_isolated("container").await
}

/// A workspace that its commands opened, with a setuid file in it. The test sets the bit, as a
/// command would without the filter.
async fn setuid_file_is_out_of_reach(mode: &'static str) -> Result<()> {
    if !available("root", (!is_root()).then_some("only root can act as another user")) {
        return Ok(());
    }
    let Some(cluster) = isolating(mode, 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "touch trap; chmod 777 .").await?;
    let trap = cluster.session_directories()?.pop().context("a session directory")?.join("trap");
    let owner = fs::metadata(&trap)?.uid();
    let open = cluster.directory().join("open");
    fs::create_dir(&open)?;
    let run = |path: &Path| -> Result<String> {
        fs::copy("/usr/bin/id", path)?;
        chown(path, Some(owner), Some(owner))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o4755))?;
        let mut other = std::process::Command::new("setpriv");
        // The shell has lost the capabilities that `setpriv` keeps for its own exec.
        other
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", "exec $0 -u"])
            .arg(path);
        Ok(String::from_utf8(other.output()?.stdout)?)
    };
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755))?;
    assert_eq!(
        run(&open.join("trap"))?,
        format!("{owner}\n"),
        "the control: it works in an open directory"
    );
    assert_eq!(run(&trap)?, "");
    assert_eq!(
        client.exec(&session.name, "ls").await?.stdout_text(),
        "trap\n",
        "commands still work"
    );
    cluster.end().await
}

#[tokio::test]
async fn setuid_file_is_out_of_reach_in_mode_bwrap() -> Result<()> {
    setuid_file_is_out_of_reach("bwrap").await
}

#[tokio::test]
async fn setuid_file_is_out_of_reach_in_mode_nsjail() -> Result<()> {
    setuid_file_is_out_of_reach("nsjail").await
}

#[tokio::test]
async fn setuid_file_is_out_of_reach_in_mode_native() -> Result<()> {
    setuid_file_is_out_of_reach("native").await
}

#[tokio::test]
async fn setuid_file_is_out_of_reach_in_mode_container() -> Result<()> {
    setuid_file_is_out_of_reach("container").await
}

#[tokio::test]
async fn container_runs_report_outcomes_and_leave_nothing() -> Result<()> {
    let Some(cluster) = isolating("container", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    session(&cluster, &client, "busy").await?;
    let sleep = "echo here; sleep 1000 & sleep 1000";
    let cases: [(&[&str], &str, &str, Option<i32>); 4] = [
        (&[], "echo out; echo err >&2; exit 3", "exited", Some(3)),
        (&["--timeout", "300ms"], sleep, "timedOut", Some(124)),
        (&["--memory", "32m"], "exec tail /dev/zero", "oom", Some(137)),
        (&[], "unshare --user true; kill -TERM $$", "signaled", Some(143)),
    ];
    for (options, script, outcome, code) in cases {
        let arguments =
            [&["run", "--json", "-s", "busy"], options, &["--", "sh", "-c", script]].concat();
        let done = codelia(&cluster, &client, &arguments).await?;
        let record = record(&done)?;
        assert!(has_outcome(&record, outcome) && done.code == code, "{script}: {record}");
        assert_eq!(record["mode"], "SANDBOX_MODE_CONTAINER");
        assert!(is_zero(&record["receipt"]), "{record}");
        let blocked = record["violations"].as_array().map_or(0, Vec::len);
        assert_eq!(blocked, usize::from(script.contains("unshare")), "{record}");
    }
    let started =
        codelia(&cluster, &client, &["run", "--detach", "-s", "busy", "--", "sleep", "1000"])
            .await?;
    let id = started.stdout.trim();
    assert_eq!(codelia(&cluster, &client, &["kill", id]).await?.code, Some(0));
    let canceled = record(&codelia(&cluster, &client, &["attach", "--json", id]).await?)?;
    assert!(has_outcome(&canceled, "canceled"), "{canceled}");
    assert!(is_zero(&canceled["receipt"]), "{canceled}");
    cluster.end().await
}

#[tokio::test]
async fn blocked_call_is_in_stderr_and_run_record() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let attempt = ["run", "--json", "--", "sh", "-c", "unshare --user true; echo continued"];
    let done = codelia(&cluster, &client, &attempt).await?;
    let record = record(&done)?;
    assert_eq!(record["exitCode"], 0, "{record}");
    assert_eq!(record["violationCount"], "1", "{record}");
    assert_eq!(record["violations"][0]["kind"], "SYSCALL_BLOCKED");
    assert_eq!(record["violations"][0]["syscall"], "unshare");
    let reported = done
        .stderr
        .lines()
        .filter(|line| line.starts_with("codelia: SYSCALL_BLOCKED: unshare(0x"))
        .count();
    assert_eq!(reported, 1, "{}", done.stderr);
    cluster.end().await
}

#[tokio::test]
async fn memory_and_cpu_limits_have_own_outcomes() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let done = codelia(
        &cluster,
        &client,
        &["run", "--json", "--memory", "32m", "--", "tail", "/dev/zero"],
    )
    .await?;
    let oom = record(&done)?;
    assert!(has_outcome(&oom, "oom") && done.code == Some(137), "{oom}");
    assert!(is_zero(&oom["receipt"]), "{oom}");

    let session = client.session().await?;
    let mut spin = codelia_tests::shell(&session.name, "while :; do :; done");
    let second = prost_types::Duration { seconds: 1, nanos: 0 };
    spin.limits = Some(Limits { cpu_time: Some(second), ..Limits::default() });
    let run = client.start(spin).await?;
    let ended = client.watch_to_end(&run.name, 0).await?.finished.context("a finished run")?;
    let outcome = ended.outcome.and_then(|outcome| outcome.kind);
    assert_eq!(outcome, Some(outcome::Kind::Limit(LimitExceeded { resource: "cpu_time".into() })));
    cluster.end().await
}

#[tokio::test]
async fn refusal_event_names_the_field() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut greedy = codelia_tests::shell(&session.name, "true");
    greedy.limits = Some(Limits { memory_bytes: Some(i64::MAX), ..Limits::default() });
    let before = recorded_events(&cluster.store, &"a".parse()?, None).await?.len();
    assert!(client.start(greedy).await.is_err());
    let mut malformed = codelia_tests::shell(&session.name, "true");
    malformed.command = None;
    assert!(client.start(malformed).await.is_err());
    let events = recorded_events(&cluster.store, &"a".parse()?, None).await?;
    assert_eq!(events.len(), before + 1, "a malformed request is not an event: {events:?}");
    let event = events.first().context("an event")?;
    assert_eq!(event.body.kind, EventKind::RunRefused);
    assert_eq!(event.body.field.as_deref(), Some("limits.memory_bytes"));
    assert_eq!(event.subject.session.map(|id| id.to_string()), Some(session.session_id));
    cluster.end().await
}

/// Finds control groups and containers of a worker process that has ended.
fn left_of(pid: u32) -> Result<Vec<String>> {
    let groups = abandoned_cgroups(ProcessId::current()?);
    let groups = groups.into_iter().map(|path| path.display().to_string());
    let groups = groups.filter(|path| path.contains(&format!("/codelia-{pid}-")));
    Ok(groups.chain(worker_containers(&[pid])?).collect())
}

async fn killed_worker_leaves_nothing(mode: &'static str) -> Result<()> {
    let Some(mut cluster) = isolating(mode, 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let run = client.start(command(&client.session().await?.name, &["sleep", "1000"])).await?;
    started(&client, &run.name).await?;
    let worker = &mut cluster.workers[0].process;
    let pid = worker.pid();
    worker.signal(Signal::KILL)?;
    worker.exited().await?;
    ensure!(!left_of(pid)?.is_empty(), "the control: leftovers of a killed worker are seen");
    cluster.restart_worker(0).await?;
    no_mounts(&cluster)?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(seen.outcome(), outcome::Kind::Lost(Lost { reason: "worker_lost".into() }));
    let swept = || async { left_of(pid).ok()?.is_empty().then_some(()) };
    eventually("the next worker process has removed the leftovers", swept).await;
    cluster.end().await
}

#[tokio::test]
async fn killed_worker_leaves_nothing_in_mode_bwrap() -> Result<()> {
    killed_worker_leaves_nothing("bwrap").await
}

#[tokio::test]
async fn killed_worker_leaves_nothing_in_mode_container() -> Result<()> {
    killed_worker_leaves_nothing("container").await
}

/// Checks that no sandbox mount is visible on the host.
fn no_mounts(cluster: &Cluster) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let directory = cluster.directory().display().to_string();
    let left: Vec<&str> = mounts.lines().filter(|line| line.contains(&directory)).collect();
    ensure!(left.is_empty(), "sandbox mounts are visible on the host: {left:?}");
    Ok(())
}
