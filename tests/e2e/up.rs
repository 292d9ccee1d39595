//! `codelia up`: everything on one machine without configuration.

use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
use codelia_tests::{Client, Process, Up, available, is_root};
use rustix::process::Signal;

/// Runs a script with `codelia run` and returns its output.
async fn run(place: &Up, script: &str) -> Result<codelia_tests::ProcessOutput> {
    Process::finish(place.command(&["run", "--", "sh", "-c", script]), b"").await
}

/// A value in `client.toml`.
fn client_file(place: &Up, key: &str) -> Result<String> {
    let path = place.data().join("client.toml");
    assert_eq!(
        path.metadata()?.permissions().mode() & 0o777,
        0o600,
        "other users can read the key"
    );
    let text = std::fs::read_to_string(path)?;
    let line = text
        .lines()
        .find(|line| line.trim_start().starts_with(key))
        .with_context(|| format!("{key}: {text}"))?;
    Ok(line.split('"').nth(1).context("a string")?.to_owned())
}

/// Starts, serves a run, and stops without leftovers.
async fn serves_from_start_to_end(place: &Up) -> Result<()> {
    let mut up = place.start().await?;
    let printed = up.printed();
    assert!(printed.to_lowercase().contains("self-check"), "{printed}");
    assert!(printed.contains("ms") && printed.contains("codelia run"), "{printed}");
    let done = run(place, "echo out; echo err >&2; exit 7").await?;
    assert_eq!(
        (done.stdout.as_str(), done.stderr.as_str(), done.code),
        ("out\n", "err\n", Some(7))
    );
    let key = place.data().join("secrets.key");
    assert_eq!(key.metadata()?.permissions().mode() & 0o777, 0o600, "other users can read the key");
    let mut secret = place.command(&["run", "--secret-env", "TOKEN", "--", "printenv", "TOKEN"]);
    secret.env("TOKEN", "hush");
    assert_eq!(Process::finish(secret, b"").await?.stdout, "hush\n");
    up.signal(Signal::INT)?;
    assert!(up.exited().await?.success(), "{}", up.read_log());
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn up_serves_a_run_and_stops_cleanly() -> Result<()> {
    serves_from_start_to_end(&Up::new()?).await
}

#[tokio::test]
async fn up_works_for_unprivileged_user() -> Result<()> {
    if !available("user", (!is_root()).then_some("only root can start it as another user")) {
        return Ok(());
    }
    serves_from_start_to_end(&Up::for_user(65534)?).await
}

#[tokio::test]
async fn up_restart_keeps_data() -> Result<()> {
    let place = Up::new()?;
    let mut first = place.start().await?;
    let secret = client_file(&place, "api_key")?;
    let created =
        Process::finish(place.command(&["session", "create", "--alias", "kept"]), b"").await?;
    assert_eq!(created.code, Some(0), "{created:?}");
    Process::finish(
        place.command(&["run", "-s", "kept", "--", "sh", "-c", "echo there > file"]),
        b"",
    )
    .await?;
    first.terminate().await?;

    let mut second = place.start().await?;
    assert_eq!(client_file(&place, "api_key")?, secret);
    let done =
        Process::finish(place.command(&["run", "-s", "kept", "--", "cat", "file"]), b"").await?;
    assert_eq!((done.stdout.as_str(), done.code), ("there\n", Some(0)), "{done:?}");
    second.terminate().await?;
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn up_instances_collide_only_on_same_directory() -> Result<()> {
    let (one, two) = (Up::new()?, Up::new()?);
    let (first, second) = tokio::join!(one.start(), two.start());
    let (mut first, mut second) = (first?, second?);
    for place in [&one, &two] {
        let done = Process::finish(place.command(&["run", "--json", "--", "true"]), b"").await?;
        let record: serde_json::Value = serde_json::from_str(&done.stdout)?;
        let root = record["sandboxRoot"].as_str().context("a root")?;
        assert!(root.starts_with(place.data().to_str().context("a path")?), "{root}");
    }

    let third = Process::finish(one.up_command(), b"").await?;
    assert!(third.code.is_some_and(|code| code != 0) && !third.stderr.is_empty(), "{third:?}");
    assert_eq!(run(&one, "echo still here").await?.stdout, "still here\n");

    for (up, place) in [(&mut first, &one), (&mut second, &two)] {
        up.terminate().await?;
        place.leak_guard().expect_no_processes().await;
    }
    Ok(())
}

#[tokio::test]
async fn up_detaches_and_down_stops_it() -> Result<()> {
    let place = Up::new()?;
    let mut detach = place.up_command();
    detach.arg("--detach");
    let started = Process::finish(detach, b"").await?;
    assert_eq!(started.code, Some(0), "{started:?}");
    assert!(started.stdout.lines().any(|line| line.starts_with("ready")), "{started:?}");
    assert_eq!(run(&place, "echo hi").await?.stdout, "hi\n");
    for _ in 0..2 {
        let down = Process::finish(place.command(&["down"]), b"").await?;
        assert_eq!(down.code, Some(0), "{down:?}");
        place.leak_guard().expect_no_processes().await;
    }
    Ok(())
}

#[tokio::test]
async fn up_stops_while_a_command_runs() -> Result<()> {
    let place = Up::new()?;
    let mut up = place.start().await?;
    let client =
        Client::connect(&client_file(&place, "endpoint")?, &client_file(&place, "api_key")?)
            .await?;
    let session = client.session().await?;
    let request =
        codelia_tests::shell(&session.name, "echo up; trap '' TERM; while :; do sleep 1; done");
    let mut exec = codelia_tests::Exec::start(&client, request).await?;
    exec.until_stdout("up").await?;
    up.signal(Signal::INT)?;
    // A second Ctrl-C.
    up.signal(Signal::INT)?;
    up.exited().await?;
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn up_recovers_after_being_killed() -> Result<()> {
    let place = Up::new()?;
    let mut up = place.start().await?;
    up.signal(Signal::KILL)?;
    up.exited().await?;
    let mut again = place.start().await?;
    assert_eq!(run(&place, "echo back").await?.stdout, "back\n");
    again.terminate().await?;
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn permission_for_logical_ends_with_up() -> Result<()> {
    let place = Up::new()?;
    let unisolated =
        || Process::finish(place.command(&["run", "--mode", "logical", "--", "echo", "ran"]), b"");
    let mut logical = place.start_with(&["--mode", "logical"]).await?;
    assert_eq!(unisolated().await?.stdout, "ran\n", "the control: this `up` allows it");
    logical.terminate().await?;

    let mut isolated = place.start().await?;
    let missing =
        isolated.printed().contains("no isolation").then_some("no isolating mode works here");
    if available("bwrap", missing) {
        let refused = unisolated().await?;
        assert_eq!((refused.stdout.as_str(), refused.code), ("", Some(125)), "{refused:?}");
        assert!(refused.stderr.contains("LEVEL_2"), "{refused:?}");
    }
    isolated.terminate().await?;
    Ok(())
}
