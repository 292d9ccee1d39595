//! `codelia` for an ordinary user: with a delegated cgroup limits are enforced, without one they
//! are watched, and every command says the same about a mode. Also a worker on a new data
//! directory.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use codelia_tests::{Process, Terminal, Up, available, is_root};
use serde_json::{Value, json};

/// Has an entry in the host's list of users, which Postgres needs.
const USER: u32 = 65534;
const STRICT: (&str, &str) = ("CODELIA_SANDBOX_LIMIT_ENFORCEMENT", "strict");
const REMEDY: &str =
    "start codelia in a delegated cgroup (systemd-run --user --scope -p Delegate=yes)";

/// An environment for the user; `None` if the test does not run as root.
fn for_user() -> Result<Option<Up>> {
    let missing = (!is_root()).then_some("only root can start it as another user");
    if available("user", missing) { Up::for_user(USER).map(Some) } else { Ok(None) }
}

/// Runs `codelia` on a terminal until it shows a text and exits. Returns all that it shows.
async fn shown(place: &Up, arguments: &[&str], text: &str) -> Result<String> {
    let mut terminal = Terminal::start(&place.command(arguments), 250, 50)?;
    let shown = terminal.shows(text).await?;
    terminal.exited().await?;
    Ok(shown)
}

/// The record of a run and its output on stderr.
async fn record(place: &Up, flags: &[&str], script: &str) -> Result<Value> {
    let arguments = [&["run", "--json"], flags, &["--", "sh", "-c", script]].concat();
    let done = Process::finish(place.command(&arguments), b"").await?;
    let line = done.stdout.lines().last().with_context(|| format!("{done:?}"))?;
    serde_json::from_str(line).with_context(|| format!("{done:?}"))
}

#[tokio::test]
async fn up_without_cgroups_isolates_and_watches_limits() -> Result<()> {
    let Some(place) = for_user()? else { return Ok(()) };
    let mut up = Terminal::start(&place.up_command(), 250, 50)?;
    let banner = up.shows("\nready ").await?;
    assert!(banner.contains("mode        native (default)\r\n"), "{banner}");
    assert!(
        banner.contains("limits      watched, not enforced") && banner.contains(REMEDY),
        "{banner}"
    );

    shown(&place, &["doctor"], "limits watched").await?;
    let doctor = Process::finish(place.command(&["doctor", "--json"]), b"").await?.stdout;
    assert!(
        doctor.contains(r#""usable":true,"watchesLimits":true"#) && doctor.contains(REMEDY),
        "{doctor}"
    );
    shown(&place, &["workers", "list"], "native~").await?;
    let key = place.data().join("client.toml").display().to_string();
    let script = format!("hostname; cat {key}");
    let run =
        shown(&place, &["run", "--mode", "native", "--", "sh", "-c", &script], "No such file")
            .await?;
    assert!(run.contains("codelia\r\n") && !run.contains("api_key"), "{run}");

    let run = record(&place, &[], "true").await?;
    assert_eq!(run["mode"], "SANDBOX_MODE_NATIVE");
    assert_eq!(run["watched"], json!(["limits.memory_bytes", "limits.pids", "limits.cpu_time"]));
    assert_eq!(run["unenforced"], json!(["limits.cpu_millicores"]));
    let listed = Process::finish(place.command(&["ps", "--all", "--json"]), b"").await?;
    assert!(listed.stdout.contains(r#""watched":["limits.memory_bytes""#), "{listed:?}");

    let hold =
        |mib: u32| format!("perl -e '$x = \"x\" x ({mib} << 20); sleep($x ? {mib} / 20 : 0)'");
    assert_eq!(
        record(&place, &["--memory", "64m"], &hold(2000)).await?["outcome"],
        json!({ "oom": {} })
    );
    assert_eq!(
        record(&place, &["--memory", "64m"], &hold(10)).await?["outcome"],
        json!({ "exited": 0 })
    );
    let sleepers = |count: u32, seconds: u32| {
        format!("for i in $(seq {count}); do sleep 1000 & done; sleep {seconds}")
    };
    let run = record(&place, &["--pids", "10"], &sleepers(15, 1000)).await?;
    assert_eq!(run["outcome"], json!({ "limit": { "resource": "pids" } }));
    assert_eq!(
        record(&place, &["--pids", "10"], &sleepers(5, 0)).await?["outcome"],
        json!({ "exited": 0 })
    );
    let refused =
        Process::finish(place.command(&["run", "--cpus", "0.5", "--", "true"]), b"").await?;
    assert!(
        refused.stderr.contains("limits.cpu_millicores") && refused.stderr.contains(REMEDY),
        "{refused:?}"
    );

    up.type_text("\x03")?;
    assert!(up.exited().await?.success(), "{}", up.shown());
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn volume_of_an_ordinary_user_outlives_sessions() -> Result<()> {
    let Some(place) = for_user()? else { return Ok(()) };
    let mut up = place.start().await?;
    let codelia = async |arguments: &[&str]| Process::finish(place.command(arguments), b"").await;
    let created = codelia(&["volume", "create", "cache"]).await?;
    assert_eq!(created.code, Some(0), "{created:?}");
    let run = async |mount: &str, script: &str| {
        codelia(&["run", "--volume", mount, "--", "sh", "-c", script]).await
    };
    let written =
        run("cache:/cache:rw", "mkdir /cache/d && echo 1 > /cache/d/f && chmod 500 /cache/d")
            .await?;
    assert_eq!(written.code, Some(0), "{written:?}");
    let copied =
        run("cache:/cache", "chmod 700 /cache/d && echo 2 > /cache/d/f && cat /cache/d/f").await?;
    assert_eq!(copied.stdout, "2\n", "{copied:?}");
    let read =
        run("cache:/cache:ro", "cat /cache/d/f; stat -c %u /cache/d; ! touch /cache/new").await?;
    assert_eq!((read.code, read.stdout.as_str()), (Some(0), "1\n1000\n"), "{read:?}");
    up.terminate().await?;
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

/// Directories that keep their own user out, and a file in them.
const HIDE: &str = "mkdir -p d/e; exec 3> d/e/file; chmod 0 d/e d";
const UNLINK: &str = "exec 3> file; rm file";

#[tokio::test]
async fn disk_limit_bites_for_an_ordinary_user() -> Result<()> {
    let Some(place) = for_user()? else { return Ok(()) };
    let mut up = place.start().await?;
    for open in ["exec 3> file", HIDE, UNLINK] {
        let write = |mib: u32, seconds: u32| {
            format!("{open}; dd if=/dev/zero bs=1M count={mib} >&3 2>/dev/null; sleep {seconds}")
        };
        let run = record(&place, &["--disk", "16m"], &write(200, 60)).await?;
        assert_eq!(run["outcome"], json!({ "limit": { "resource": "disk_bytes" } }), "{open}");
        // The control: below the limit it is not stopped.
        let run = record(&place, &["--disk", "16m"], &write(8, 1)).await?;
        assert_eq!(run["outcome"], json!({ "exited": 0 }), "{open}");
    }
    up.terminate().await?;
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn strict_limits_without_cgroups_are_refused_everywhere() -> Result<()> {
    let Some(place) = for_user()? else { return Ok(()) };
    let mut refusals = Vec::new();
    for flags in [&[][..], &["--mode", "native"]] {
        let mut command = place.up_command();
        command.args(flags).env(STRICT.0, STRICT.1);
        let mut up = Terminal::start(&command, 250, 50)?;
        refusals.push(up.shows("best_effort to have limits watched").await?);
        assert!(!up.exited().await?.success(), "{}", up.shown());
    }
    let mut up = place.start().await?;
    let mut worker = place.service("worker");
    worker.env("CODELIA_SANDBOX_MODE", "bwrap").env("CODELIA_WORKER_ID", "second");
    let stopped = Process::finish(worker, b"").await?;
    assert!(stopped.code.is_some_and(|code| code != 0), "{stopped:?}");
    refusals.push(stopped.stderr);
    let mut doctor = place.command(&["doctor", "--json"]);
    doctor.env(STRICT.0, STRICT.1);
    refusals.push(Process::finish(doctor, b"").await?.stdout);
    for refusal in refusals {
        assert!(refusal.contains("limits.memory_bytes") && refusal.contains(REMEDY), "{refusal}");
        assert!(refusal.contains("or set sandbox.limit_enforcement=best_effort"), "{refusal}");
        assert!(!refusal.contains("Some("), "a Debug text: {refusal}");
    }
    up.terminate().await?;
    Ok(())
}

#[tokio::test]
async fn best_effort_is_refused_in_profile_prod() -> Result<()> {
    let place = Up::new()?;
    let mut command = place.up_command();
    command.env("CODELIA_PROFILE", "prod").env("CODELIA_SANDBOX_LIMIT_ENFORCEMENT", "best_effort");
    let refused = Process::finish(command, b"").await?;
    assert!(refused.code.is_some_and(|code| code != 0), "{refused:?}");
    assert!(
        refused.stderr.contains("sandbox.limit_enforcement") && refused.stderr.contains(REMEDY),
        "{refused:?}"
    );
    Ok(())
}

#[tokio::test]
async fn up_never_chooses_logical_by_itself() -> Result<()> {
    let Some(place) = for_user()? else { return Ok(()) };
    let mut command = place.up_command();
    // Mode native needs no tool, but cgroups then.
    command.env(STRICT.0, STRICT.1);
    for name in ["CODELIA_BWRAP", "CODELIA_NSJAIL", "CODELIA_SANDBOX_CONTAINER_SOCKET"] {
        command.env(name, "/absent");
    }
    let refused = Process::finish(command, b"").await?;
    assert!(refused.code.is_some_and(|code| code != 0), "{refused:?}");
    assert!(
        refused.stderr.contains("install bubblewrap") && refused.stderr.contains("--mode logical"),
        "{refused:?}"
    );
    Ok(())
}

/// A cgroup in each v1 hierarchy that belongs to the user, and a `systemd-run` that creates scopes
/// in it.
struct UserManager {
    groups: Vec<PathBuf>,
    programs: PathBuf,
}

impl UserManager {
    fn new(place: &Up) -> Result<Self> {
        let name = format!("codelia-manager-{}", std::process::id());
        let hierarchies =
            ["memory", "pids", "cpu", "cpuacct"].map(|name| Path::new("/sys/fs/cgroup").join(name));
        let groups: Vec<_> = hierarchies.iter().map(|hierarchy| hierarchy.join(&name)).collect();
        let programs = place.directory().join("programs");
        let manager = Self { groups, programs };
        for group in &manager.groups {
            fs::create_dir(group)?;
            chown(group, Some(USER), Some(USER))?;
        }
        fs::create_dir(&manager.programs)?;
        let dirs = manager
            .groups
            .iter()
            .map(|dir| dir.display().to_string())
            .collect::<Vec<_>>()
            .join(" ");
        let script = format!(
            "#!/bin/sh\n[ \"$1 $2 $5 $6 $7\" = '--user --scope --property Delegate=yes --unit' ] || exit 1\n\
             for dir in {dirs}; do mkdir $dir/$8.scope && echo $$ >$dir/$8.scope/cgroup.procs || exit 1; done\n\
             shift 9; exec \"$@\"\n"
        );
        let program = manager.programs.join("systemd-run");
        fs::write(&program, script)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        Ok(manager)
    }

    /// Lets a command find this `systemd-run`.
    fn offer(&self, command: &mut Command) -> Result<()> {
        let path = std::env::var("PATH")?;
        command.env("PATH", format!("{}:{path}", self.programs.display()));
        Ok(())
    }
}

impl Drop for UserManager {
    fn drop(&mut self) {
        for group in &self.groups {
            let scopes =
                fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
            for dir in scopes.filter(|path| path.is_dir()).chain([group.clone()]) {
                if let Err(error) = fs::remove_dir(&dir) {
                    println!("cannot remove {}: {error}", dir.display());
                }
            }
        }
    }
}

/// The user's systemd is a stand-in: it creates the cgroups that a real one would.
#[tokio::test]
async fn up_enters_scope_of_systemd_and_enforces_limits() -> Result<()> {
    let Some(place) = for_user()? else { return Ok(()) };
    let missing = (!Path::new("/sys/fs/cgroup/memory").exists())
        .then_some("this host does not use cgroup v1");
    if !available("cgroup1", missing) {
        return Ok(());
    }
    let manager = UserManager::new(&place)?;
    let mut command = place.up_command();
    manager.offer(&mut command)?;
    let mut up = Terminal::start(&command, 250, 50)?;
    let banner = up.shows("\nready ").await?;
    assert!(
        banner.contains("mode        native (default)\r\n") && !banner.contains("watched"),
        "{banner}"
    );
    let mut doctor = place.command(&["doctor", "--json"]);
    manager.offer(&mut doctor)?;
    let doctor = Process::finish(doctor, b"").await?.stdout;
    assert!(!doctor.contains(r#""watchesLimits":true"#) && !doctor.contains(REMEDY), "{doctor}");
    let run = record(&place, &["--memory", "64m", "--cpus", "0.5"], "tail /dev/zero").await?;
    assert_eq!(
        (&run["outcome"], &run["watched"], &run["unenforced"]),
        (&json!({ "oom": {} }), &Value::Null, &Value::Null)
    );
    let peak =
        run["usage"]["peakMemoryBytes"].as_str().context("peakMemoryBytes")?.parse::<u64>()?;
    assert!(peak < 65 << 20, "{run}");
    up.type_text("\x03")?;
    assert!(up.exited().await?.success(), "{}", up.shown());
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

/// A worker of `place` with this data directory. It must be usable with bwrap.
fn worker(place: &Up, data: &Path) -> Command {
    let mut worker = place.service("worker");
    worker
        .env("CODELIA_DATA_DIR", data)
        .env("CODELIA_WORKER_ID", "second")
        .env("CODELIA_SANDBOX_MODE", "bwrap");
    worker
}

#[tokio::test]
async fn worker_on_new_directory_serves_its_mode() -> Result<()> {
    if !available("root", (!is_root()).then_some("only root gives sessions their own users")) {
        return Ok(());
    }
    let place = Up::new()?;
    let mut up = place.start_with(&["--mode", "logical"]).await?;
    let data = place.directory().join("new/data");
    let mut started = worker(&place, &data);
    started.env("CODELIA_SANDBOX_ROOT", place.directory().join("other/new/root"));
    let mut second = Process::start("second", started, place.directory())?;
    second.ready().await?;
    assert_eq!(fs::metadata(&data)?.permissions().mode() & 0o777, 0o711);
    let done =
        Process::finish(place.command(&["run", "--mode", "bwrap", "--", "hostname"]), b"").await?;
    assert_eq!(done.stdout, "codelia\n", "{done:?}");
    second.terminate().await?;

    let closed = place.directory().join("closed");
    fs::create_dir(&closed)?;
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700))?;
    let stopped = Process::finish(worker(&place, &closed.join("data")), b"").await?;
    assert!(stopped.code.is_some_and(|code| code != 0), "{stopped:?}");
    assert!(stopped.stderr.contains("sandbox.mode: bwrap is not usable"), "{stopped:?}");
    assert!(
        stopped.stderr.contains("chmod o+x") && stopped.stderr.contains("closed"),
        "{stopped:?}"
    );
    up.terminate().await?;
    Ok(())
}
