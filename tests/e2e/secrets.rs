//! The environment of runs: values are not returned unasked, secret ones are stored encrypted and
//! only until the run ends.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use codelia_proto::v1::{
    GetRunRequest, ListRunsRequest, Refused, Run, RunState, StartRunRequest, outcome::Kind,
};
use codelia_store::{Scope, SecretKey};
use codelia_tests::{
    Client, Cluster, ClusterOptions, Process, Scratch, eventually, refusal, shell,
};
use prost::Message;
use rustix::process::Signal;
use tonic::Code;

const SECRET: &str = "open-sesame-4711";
const PLAIN: &str = "plain-value-0815";

/// Creates a key for secrets.
pub(crate) fn key_file(scratch: &Scratch, name: &str) -> Result<PathBuf> {
    let path = scratch.join(name);
    fs::write(&path, SecretKey::generate()?)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(path)
}

pub(crate) fn with_key(path: &Path) -> Vec<(&'static str, String)> {
    vec![("CODELIA_SECRETS_KEY_FILE", path.display().to_string())]
}

fn variables(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// A script with an ordinary and a secret variable.
fn request(session: &str, script: &str, secret: &str) -> StartRunRequest {
    let mut request = shell(session, script);
    if let Some(command) = &mut request.command {
        command.env = variables(&[("COLOUR", PLAIN)]);
        command.secret_env = variables(&[("TOKEN", secret)]);
    }
    request
}

/// Whether a dump or log contains a value, as text or in hexadecimal.
fn contains(text: &str, value: &str) -> bool {
    let hex: String = value.bytes().map(|byte| format!("{byte:02x}")).collect();
    text.contains(value) || text.contains(&hex)
}

fn has_bytes(message: &impl Message, value: &str) -> bool {
    message.encode_to_vec().windows(value.len()).any(|bytes| bytes == value.as_bytes())
}

async fn get(client: &Client, name: &str, include_env: bool) -> Result<Run, tonic::Status> {
    let request = GetRunRequest { name: name.to_owned(), include_env, ..Default::default() };
    Ok(client.runs().get_run(request).await?.into_inner().run.unwrap_or_default())
}

/// Waits until a command wrote a file in its session's directory, and returns its text.
async fn written(cluster: &Cluster, name: &str) -> String {
    eventually(("the command writes", name.to_owned()), || async {
        let directories = cluster.session_directories().ok()?;
        directories.iter().find_map(|directory| fs::read_to_string(directory.join(name)).ok())
    })
    .await
}

#[tokio::test]
async fn secret_is_never_stored_in_plain_text() -> Result<()> {
    let scratch = Scratch::new()?;
    let mut settings = with_key(&key_file(&scratch, "key")?);
    settings.push(("CODELIA_LOG_FILTER", "trace".to_owned()));
    let cluster = Cluster::start_with(ClusterOptions { settings, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "echo marker-in-output; printf %s \"$TOKEN\" > part; mv part seen; \
                  until [ -e go ]; do sleep 0.05; done";
    let run = client.start(request(&session.name, script, SECRET)).await?;
    assert_eq!(written(&cluster, "seen").await, SECRET, "the command gets the secret");
    eventually("the output is stored", || async {
        (cluster.database.number("SELECT count(*) FROM run_output").await.ok()? > 0).then_some(())
    })
    .await;

    let sealed = "SELECT count(*) FROM runs WHERE secret_env IS NOT NULL";
    let during = cluster.database.dump().await?;
    assert!(contains(&during, PLAIN), "control: an ordinary value is found");
    assert!(contains(&during, "marker-in-output"), "control: a value in binary data is found");
    assert!(!contains(&during, SECRET), "the secret is in the database");
    assert_eq!(cluster.database.number(sealed).await?, 1, "control: the ciphertext is there");

    let directories = cluster.session_directories()?;
    fs::write(directories.first().context("a directory")?.join("go"), "")?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(seen.outcome(), Kind::Exited(0));
    assert!(!contains(&cluster.database.dump().await?, SECRET));
    assert_eq!(cluster.database.number(sealed).await?, 0, "the ciphertext is erased");

    for process in [&cluster.apis[0].process, &cluster.workers[0].process] {
        let log = process.read_log();
        assert!(log.contains(&run.run_id), "control: the log is about the run");
        assert!(!contains(&log, SECRET) && !contains(&log, PLAIN), "a value is in a log");
    }
    cluster.end().await
}

#[tokio::test]
async fn responses_have_names_but_no_values() -> Result<()> {
    let scratch = Scratch::new()?;
    let settings = with_key(&key_file(&scratch, "key")?);
    let cluster = Cluster::start_with(ClusterOptions { settings, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let started = client.start(request(&session.name, "true", SECRET)).await?;
    let name = started.name.clone();
    let seen = client.watch_to_end(&name, 0).await?;
    let list = ListRunsRequest { parent: "sessions/-".into(), ..Default::default() };
    let listed = client.runs().list_runs(list).await?.into_inner();
    assert_eq!(listed.runs.len(), 1);
    let read = get(&client, &name, false).await?;
    for run in
        [&started, &read, &seen.queued.context("queued")?, &seen.finished.context("finished")?]
    {
        let command = run.command.as_ref().context("a command")?;
        assert_eq!(
            (command.env_names.as_slice(), command.env.len()),
            (&["COLOUR".to_owned()][..], 0)
        );
        assert_eq!(command.secret_env_names, ["TOKEN"]);
        assert!(!has_bytes(run, SECRET) && !has_bytes(run, PLAIN));
    }
    assert!(!has_bytes(&listed, SECRET) && !has_bytes(&listed, PLAIN));

    let whole = get(&client, &name, true).await?;
    assert_eq!(whole.command.as_ref().context("a command")?.env, variables(&[("COLOUR", PLAIN)]));
    assert!(has_bytes(&whole, PLAIN), "control: a value that is asked for is found");
    assert!(!has_bytes(&whole, SECRET));
    let run_only = client.with_secret(&cluster.key("a", &[Scope::Run]).await?)?;
    assert!(get(&run_only, &name, false).await.is_ok());
    let refused = refusal(&get(&run_only, &name, true).await.expect_err("needs scope admin"));
    assert_eq!((refused.code, refused.reason.as_str()), (Code::PermissionDenied, "SCOPE_MISSING"));

    let mut again = request(&session.name, "true", SECRET);
    again.command = read.command;
    let refused = refusal(&client.start(again).await.expect_err("a command without its values"));
    assert_eq!(refused.fields, ["command.env_names"]);
    cluster.end().await
}

#[tokio::test]
async fn retried_run_gets_its_secret_again() -> Result<()> {
    let scratch = Scratch::new()?;
    let settings = with_key(&key_file(&scratch, "key")?);
    let options = ClusterOptions { workers: 2, shared_root: true, settings, ..Default::default() };
    let mut cluster = Cluster::start_with(options).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script =
        "if [ -e first ]; then printf %s \"$TOKEN\" > second; else touch first; exec sleep 100; fi";
    let run = client
        .start(StartRunRequest { retries: 1, ..request(&session.name, script, SECRET) })
        .await?;
    written(&cluster, "first").await;
    let holder = client.get_run(&run.name).await?.worker_id;
    cluster.worker(&holder).process.signal(Signal::KILL)?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!((seen.outcome(), seen.run().attempt), (Kind::Exited(0), 2));
    assert_eq!(written(&cluster, "second").await, SECRET);
    assert_eq!(
        cluster.database.number("SELECT count(*) FROM runs WHERE secret_env IS NOT NULL").await?,
        0
    );
    cluster.worker(&holder).process.exited().await?;
    cluster.end().await
}

#[tokio::test]
async fn queued_run_keeps_its_secret_until_it_starts() -> Result<()> {
    let scratch = Scratch::new()?;
    let settings = with_key(&key_file(&scratch, "key")?);
    let cluster =
        Cluster::start_with(ClusterOptions { slots: 1, settings, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.start(shell(&session.name, "touch busy; until [ -e go ]; do sleep 0.05; done")).await?;
    written(&cluster, "busy").await;
    let queued =
        client.start(request(&session.name, "printf %s \"$TOKEN\" > seen", SECRET)).await?;
    eventually("the run waits for the slot", || async {
        (client.get_run(&queued.name).await.ok()?.state() == RunState::Queued).then_some(())
    })
    .await;
    let directories = cluster.session_directories()?;
    fs::write(directories.first().context("a directory")?.join("go"), "")?;
    assert_eq!(client.watch_to_end(&queued.name, 0).await?.outcome(), Kind::Exited(0));
    assert_eq!(written(&cluster, "seen").await, SECRET);
    cluster.end().await
}

#[tokio::test]
async fn secret_without_key_is_refused() -> Result<()> {
    let scratch = Scratch::new()?;
    let keys = [key_file(&scratch, "one")?, key_file(&scratch, "two")?]
        .map(|key| key.display().to_string());
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..Default::default() }).await?;
    cluster.add_worker_with(&[("CODELIA_SECRETS_KEY_FILE", &keys[0])]).await?;
    cluster.add_api().await?;
    let listen = ("CODELIA_API_LISTEN", "127.0.0.1:0");
    for key in &keys {
        cluster.add_api_with(&[listen, ("CODELIA_SECRETS_KEY_FILE", key)]).await?;
    }
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;

    let status = client.start(request(&session.name, "true", SECRET)).await.expect_err("no key");
    let refused = refusal(&status);
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::FailedPrecondition, "SECRETS_UNAVAILABLE")
    );
    assert!(status.message().contains("secrets.key_file"), "{status:?}");
    assert_eq!(cluster.database.number("SELECT count(*) FROM runs").await?, 0);

    let same = Client::connect(&cluster.endpoint(1), &client.secret).await?;
    let run = same.start(request(&session.name, "true", SECRET)).await?;
    assert_eq!(
        same.watch_to_end(&run.name, 0).await?.outcome(),
        Kind::Exited(0),
        "control: the same key"
    );
    let other = Client::connect(&cluster.endpoint(2), &client.secret).await?;
    let run = other.start(request(&session.name, "true", SECRET)).await?;
    let outcome = other.watch_to_end(&run.name, 0).await?.outcome();
    assert!(
        matches!(&outcome, Kind::Refused(Refused { reason, .. }) if reason == "SECRETS_UNAVAILABLE"),
        "{outcome:?}"
    );
    cluster.end().await
}

#[tokio::test]
async fn idempotency_key_covers_secret_values() -> Result<()> {
    let scratch = Scratch::new()?;
    let settings = with_key(&key_file(&scratch, "key")?);
    let cluster = Cluster::start_with(ClusterOptions { settings, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let once = |secret: &str| StartRunRequest {
        idempotency_key: "k".into(),
        ..request(&session.name, "echo x >> log", secret)
    };
    let first = client.start(once(SECRET)).await?;
    client.watch_to_end(&first.name, 0).await?;
    assert_eq!(client.start(once(SECRET)).await?.run_id, first.run_id);
    let refused = refusal(&client.start(once("another")).await.expect_err("another secret"));
    assert_eq!(refused.reason, "IDEMPOTENCY_KEY_REUSED");
    cluster.end().await
}

#[tokio::test]
async fn command_line_takes_variables_from_environment_and_files() -> Result<()> {
    let scratch = Scratch::new()?;
    let settings = with_key(&key_file(&scratch, "key")?);
    let cluster = Cluster::start_with(ClusterOptions { settings, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let (plain, secret) = (scratch.join("plain"), scratch.join("secret"));
    fs::write(&plain, "# ordinary\n\nA=1\nB=2\n")?;
    fs::write(&secret, format!("C={SECRET}\n"))?;
    let (plain, secret) = (plain.display().to_string(), secret.display().to_string());
    let variables = [
        "--env-file",
        &plain,
        "-e",
        "B=3",
        "-e",
        "COLOUR",
        "--secret-env",
        "TOKEN",
        "--secret-env-file",
        &secret,
    ];
    let script = ["--", "sh", "-c", "echo $A $B $COLOUR; [ \"$TOKEN$C\" = \"hush$0\" ]", SECRET];
    let mut command = cluster.cli(&client, &[&["run"], &variables[..], &script].concat());
    command.env("COLOUR", "blue").env("TOKEN", "hush");
    let done = Process::finish(command, b"").await?;
    assert_eq!((done.stdout.as_str(), done.code), ("1 3 blue\n", Some(0)), "{done:?}");

    let sessions = cluster.database.number("SELECT count(*) FROM sessions").await?;
    fs::write(&plain, "A=1\nnonsense\n")?;
    for (arguments, message) in [
        (vec!["run", "-e", "COLOUR", "--", "true"], "COLOUR is not set"),
        (vec!["run", "--env-file", plain.as_str(), "--", "true"], "line 2"),
        (vec!["run", "--secret-env", "TOKEN=hush", "--", "true"], "other users can read"),
    ] {
        let done = Process::finish(cluster.cli(&client, &arguments), b"").await?;
        assert_eq!(done.code, Some(125), "{done:?}");
        assert!(done.stderr.contains(message) && !done.stderr.contains("hush"), "{done:?}");
    }
    assert_eq!(
        cluster.database.number("SELECT count(*) FROM sessions").await?,
        sessions,
        "nothing was created"
    );
    cluster.end().await
}
