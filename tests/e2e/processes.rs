//! What other processes of the service's user, and later sessions, can reach of it.

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use codelia_tests::{Client, Cluster, ClusterOptions, Process, Up, available, eventually, is_root};

use crate::isolation::isolating_with;

/// A user of the host without privileges.
const USER: u32 = 65534;

/// Whether a process of the user can read the environment and the memory of another one.
fn is_readable(pid: u32) -> Result<bool> {
    let id = USER.to_string();
    let script =
        format!("cat /proc/{pid}/environ && cat /proc/{pid}/maps && head -c 0 /proc/{pid}/mem");
    let mut read = Command::new("setpriv");
    read.args(["--reuid", &id, "--regid", &id, "--clear-groups", "sh", "-c", &script]);
    Ok(read.output()?.status.success())
}

#[tokio::test]
async fn service_is_not_readable_by_its_user() -> Result<()> {
    if !available("user", (!is_root()).then_some("only root can start it as another user")) {
        return Ok(());
    }
    let place = Up::for_user(USER)?;
    let mut up = place.start().await?;
    let start = async |name: &str, settings: &[(&str, String)]| -> Result<Process> {
        let mut command = place.service(name);
        command.envs(settings.iter().map(|(name, value)| (name, value)));
        let mut process = Process::start(name, command, place.directory())?;
        process.ready().await?;
        Ok(process)
    };
    let in_data = |name: &str| place.data().join(name).display().to_string();
    let mut api = start("api", &[("CODELIA_API_LISTEN", "127.0.0.1:0".to_owned())]).await?;
    let mut worker = start(
        "worker",
        &[("CODELIA_WORKER_ID", "second".to_owned()), ("CODELIA_SANDBOX_ROOT", in_data("second"))],
    )
    .await?;
    for process in [&up, &api, &worker] {
        assert!(!is_readable(process.pid())?, "{}", process.pid());
    }
    let mut plain = Command::new("setpriv");
    plain.args(["--reuid", &USER.to_string(), "--regid", &USER.to_string(), "--clear-groups"]);
    let mut plain = plain.args(["sleep", "1000"]).spawn()?;
    eventually("the control: another process of the user is readable", || async {
        is_readable(plain.id()).ok()?.then_some(())
    })
    .await;
    plain.kill()?;
    plain.wait()?;
    let run = Process::finish(place.command(&["run", "--", "echo", "works"]), b"").await?;
    assert_eq!(run.stdout, "works\n", "{run:?}");
    for process in [&mut worker, &mut api, &mut up] {
        process.terminate().await?;
    }
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

/// Runs a script in a new session, closes it, and returns the user that the session had.
async fn user_of_session(
    cluster: &Cluster,
    client: &Client,
    flags: &[&str],
    script: &str,
) -> Result<u32> {
    let codelia = async |arguments: &[&str]| -> Result<()> {
        let done = Process::finish(cluster.cli(client, arguments), b"").await?;
        ensure!(done.code == Some(0), "{arguments:?}: {done:?}");
        Ok(())
    };
    codelia(&[&["session", "create", "--alias", "one"], flags].concat()).await?;
    codelia(&["run", "-s", "one", "--", "sh", "-c", script]).await?;
    let directory = cluster.session_directories()?.pop().context("a session directory")?;
    let user = fs::metadata(directory)?.uid();
    codelia(&["session", "close", "one"]).await?;
    let root = &cluster.workers[0].root;
    eventually("the session is removed and its user free, except one that is not", || async {
        let count = |name: &str| fs::read_dir(root.join(name)).map(Iterator::count).ok();
        (count("sessions")? == 0 && count("trash")? == 0 && count("ids")? <= 1).then_some(())
    })
    .await;
    Ok(user)
}

#[tokio::test]
async fn user_with_files_elsewhere_is_not_reused() -> Result<()> {
    if !available("root", (!is_root()).then_some("only root can give sessions their own users")) {
        return Ok(());
    }
    // A policy cannot open a path below /tmp.
    let shared = tempfile::Builder::new().prefix("codelia-test-").tempdir_in("/srv")?;
    fs::set_permissions(shared.path(), Permissions::from_mode(0o777))?;
    let path = shared.path().to_str().context("a path in UTF-8")?;
    let policy = shared.path().join("policy.yaml");
    fs::write(&policy, format!("filesystem: {{read_write_paths: [{path}]}}"))?;
    let settings = vec![
        ("CODELIA_SANDBOX_POLICY", policy.display().to_string()),
        ("CODELIA_SANDBOX_UID_COUNT", "2".to_owned()),
    ];
    let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let leave = format!("echo left > {path}/left; chmod 600 {path}/left");
    let former = user_of_session(&cluster, &client, &["--rw", path], &leave).await?;
    assert_eq!(
        fs::metadata(shared.path().join("left"))?.uid(),
        former,
        "the control: it left a file"
    );
    let mut later = BTreeSet::new();
    for _ in 0..4 {
        later.insert(user_of_session(&cluster, &client, &["--static"], "true").await?);
    }
    assert!(!later.contains(&former), "{former} got the file of another session");
    assert_eq!(later.len(), 1, "the control: users without files elsewhere are used again");
    cluster.end().await
}

#[tokio::test]
async fn workers_refuse_overlapping_user_ids() -> Result<()> {
    if !available("root", (!is_root()).then_some("only root can give sessions their own users")) {
        return Ok(());
    }
    let none = ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(none).await?;
    let range = |base: &'static str, count| {
        [("CODELIA_SANDBOX_UID_BASE", base), ("CODELIA_SANDBOX_UID_COUNT", count)]
    };
    cluster.add_worker_with(&range("1500000000", "1000")).await?;
    for (settings, named) in [
        (range("1", "70000"), "/etc/passwd"),
        (range("1500000999", "10"), "reserved for the session root"),
    ] {
        let mut command = cluster.command("worker", "refused")?;
        command
            .envs(settings)
            .env("CODELIA_SANDBOX_ROOT", cluster.directory().join("refused/root"));
        let done = Process::finish(command, b"").await?;
        assert!(done.code.is_some_and(|code| code != 0), "{done:?}");
        assert!(
            done.stderr.contains("sandbox.uid_base") && done.stderr.contains(named),
            "{done:?}"
        );
    }
    cluster.add_worker_with(&range("1500001000", "10")).await?;
    cluster.end().await
}
