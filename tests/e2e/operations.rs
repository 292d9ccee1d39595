//! Signals and file operations of a run, logged on request.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    sync::mpsc::channel,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use codelia_store::{EventKind, Scope};
use codelia_tests::{Process, Scratch};
use serde_json::Value;

use crate::isolation::isolating_with;

/// Listens once, and returns what was sent.
fn webhook() -> Result<(String, std::sync::mpsc::Receiver<String>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}/hook", listener.local_addr()?);
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let (mut text, mut bytes) = (String::new(), [0; 4096]);
        while !text.contains("many_deletions") {
            match stream.read(&mut bytes) {
                Ok(count @ 1..) => text.push_str(&String::from_utf8_lossy(&bytes[..count])),
                _ => break,
            }
        }
        let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n");
        let _ = sender.send(text);
    });
    Ok((url, receiver))
}

#[tokio::test]
async fn operations_are_logged_on_request() -> Result<()> {
    let place = Scratch::new()?;
    let (secret, (url, requests)) = (place.join("secret"), webhook()?);
    fs::write(&secret, "a secret of the webhook")?;
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600))?;
    let settings = vec![
        ("CODELIA_ESCAPE_WEBHOOK_URL", url),
        ("CODELIA_ESCAPE_WEBHOOK_SECRET_FILE", secret.display().to_string()),
    ];
    let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let auditor = client.with_secret(&cluster.key("a", &[Scope::Audit]).await?)?;
    let run = async |words: &[&str]| {
        let words: Vec<_> = ["run"].iter().chain(words).copied().collect();
        Process::finish(cluster.cli(&client, &words), b"").await
    };
    let script = "echo a > a; mv a b; sleep 100 & kill -9 $!; wait";
    // The control: nothing is logged unless someone asks for it.
    run(&["--", "sh", "-c", script]).await?;
    let done = run(&["--log", "signals,files", "--", "sh", "-c", script]).await?;
    ensure!(done.code == Some(0), "{done:?}");
    let events = async |kind: EventKind| -> Result<Vec<Value>> {
        let words = ["audit", "--kind", kind.as_str(), "--json"];
        let listed = Process::finish(cluster.cli(&auditor, &words), b"").await?;
        ensure!(listed.code == Some(0), "{listed:?}");
        let list: Value = serde_json::from_str(&listed.stdout)?;
        Ok(list.as_array().context("a list")?.clone())
    };
    let logged = events(EventKind::OperationsLogged).await?;
    ensure!(logged.len() == 1, "{logged:?}");
    let text = logged[0].to_string();
    for part in ["/workspace/a", "/workspace/b", "rename", "kill", "totals", "dropped"] {
        ensure!(text.contains(part), "{part}: {text}");
    }
    ensure!(events(EventKind::SuspiciousOperations).await?.is_empty());

    // A flood: counted, and bounded in the database. Its deletions raise an alert.
    let flood = "i=0; while [ $i -lt 1500 ]; do : > f$i; i=$((i+1)); done; rm f*";
    let done = run(&["--log", "files", "--", "sh", "-c", flood]).await?;
    ensure!(done.code == Some(0), "{done:?}");
    let alert = tokio::task::spawn_blocking(move || requests.recv_timeout(Duration::from_secs(30)))
        .await??;
    ensure!(alert.contains("SUSPICIOUS_OPERATIONS"), "{alert}");
    ensure!(events(EventKind::SuspiciousOperations).await?.len() == 1);
    let size =
        "SELECT sum(octet_length(detail))::bigint FROM audit WHERE kind = 'OPERATIONS_LOGGED'";
    let size = cluster.database.number(size).await?;
    ensure!((1000..300_000).contains(&size), "{size} bytes");
    let counted =
        events(EventKind::OperationsLogged).await?.iter().map(Value::to_string).collect::<String>();
    ensure!(counted.contains("unlink"), "{counted}");

    let refused = run(&["--mode", "logical", "--log", "files", "--", "true"]).await?;
    ensure!(
        refused.code != Some(0) && refused.stderr.contains("logging.file_operations"),
        "{refused:?}"
    );
    cluster.end().await
}

#[tokio::test]
async fn run_of_a_project_obeys_its_policy() -> Result<()> {
    let cluster = codelia_tests::Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let file = cluster.directory().join("web.yaml");
    fs::write(&file, "command: {blocked_patterns: [forbidden]}")?;
    let cli = async |words: &[&str]| Process::finish(cluster.cli(&client, words), b"").await;
    let path = file.to_str().context("text")?;
    for name in ["web", "shop"] {
        let set =
            cli(&["policy", "import", path, "--scope", "project", "--name", name, "--reason", "r"])
                .await?;
        ensure!(set.code == Some(0), "{set:?}");
    }
    let listed = cli(&["projects", "--json"]).await?;
    let listed: Value = serde_json::from_str(&listed.stdout)?;
    let names: Vec<_> =
        listed.as_array().context("a list")?.iter().map(|it| it["name"].clone()).collect();
    ensure!(names == ["shop", "web"], "{names:?}");
    let deleted =
        cli(&["policy", "delete", "--scope", "project", "--name", "shop", "--reason", "r"]).await?;
    ensure!(deleted.code == Some(0), "{deleted:?}");
    let listed = cli(&["projects"]).await?;
    ensure!(listed.stdout.contains("web") && !listed.stdout.contains("shop"), "{listed:?}");

    let refused = cli(&["run", "--project", "web", "--", "echo", "forbidden"]).await?;
    ensure!(refused.code != Some(0) && refused.stdout.is_empty(), "{refused:?}");
    let control = cli(&["run", "--", "echo", "forbidden"]).await?;
    ensure!(control.stdout == "forbidden\n", "{control:?}");
    let missing = cli(&["run", "--project", "none", "--", "true"]).await?;
    ensure!(missing.code != Some(0) && missing.stderr.contains("project"), "{missing:?}");
    let both = cli(&["run", "--project", "web", "--session", "s", "--", "true"]).await?;
    ensure!(both.code == Some(125), "{both:?}");
    cluster.end().await
}
