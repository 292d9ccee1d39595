//! Logs: JSON lines with typed values, and one access log line for each call.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use codelia_proto::v1::GetSessionRequest;
use codelia_tests::{Client, Cluster, ClusterOptions, eventually};
use serde_json::Value;
use tonic::{Code, Request};

async fn cluster(settings: &[(&'static str, &str)]) -> Result<Cluster> {
    let mut all = vec![("CODELIA_LOG_FORMAT", "json".to_owned())];
    all.extend(settings.iter().map(|&(key, value)| (key, value.to_owned())));
    Cluster::start_with(ClusterOptions { settings: all, ..ClusterOptions::default() }).await
}

fn lines(log: &str) -> Result<Vec<Value>> {
    log.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

/// The access log lines of the first api.
fn calls(cluster: &Cluster) -> Result<Vec<Value>> {
    let all = lines(&cluster.apis[0].process.read_log())?;
    Ok(all.into_iter().filter(|line| line["target"] == "codelia::access").collect())
}

async fn get_unknown_session(client: &Client, request_id: &str) -> Result<Code> {
    let mut request = Request::new(GetSessionRequest { name: "sessions/none".into() });
    request.metadata_mut().insert("x-request-id", request_id.parse()?);
    let status = client.sessions().get_session(request).await.expect_err("unknown session");
    Ok(status.code())
}

#[tokio::test]
async fn each_call_has_one_access_log_line() -> Result<()> {
    let cluster = cluster(&[]).await?;
    let client = cluster.tenant("a").await?;
    assert_eq!(get_unknown_session(&client, "first").await?, Code::NotFound);
    let stranger = client.with_secret(&format!("cdl_{}", "x".repeat(43)))?;
    assert_eq!(get_unknown_session(&stranger, "second").await?, Code::Unauthenticated);
    let session = client.session().await?;
    client.exec(&session.name, "echo hello").await?;

    let logged = eventually("four lines", || async {
        calls(&cluster).ok().filter(|calls| calls.len() >= 4)
    })
    .await;
    let summary: Vec<_> = logged
        .iter()
        .map(|call| (call["method"].as_str(), call["tenant"].as_str(), call["status"].as_str()))
        .collect();
    let expected = [
        ("codelia.v1.SessionService/GetSession", Some("a"), "NOT_FOUND"),
        ("codelia.v1.SessionService/GetSession", None, "UNAUTHENTICATED"),
        ("codelia.v1.SessionService/CreateSession", Some("a"), "OK"),
        ("codelia.v1.RunService/Exec", Some("a"), "OK"),
    ];
    let expected: Vec<_> = expected
        .iter()
        .map(|&(method, tenant, status)| (Some(method), tenant, Some(status)))
        .collect();
    assert_eq!(summary, expected, "{logged:#?}");
    assert_eq!(
        (&logged[0]["request_id"], &logged[1]["request_id"]),
        (&"first".into(), &"second".into())
    );
    for call in &logged {
        assert_eq!(call["level"], "INFO");
        assert!(call["seconds"].is_f64() && call["request_id"].is_string(), "{call}");
    }
    cluster.end().await
}

#[tokio::test]
async fn access_log_can_be_switched_off() -> Result<()> {
    let mut cluster = cluster(&[("CODELIA_LOG_ACCESS", "false")]).await?;
    let client = cluster.tenant("a").await?;
    assert_eq!(get_unknown_session(&client, "quiet").await?, Code::NotFound);
    cluster.stop_processes().await?;
    assert_eq!(calls(&cluster)?, Vec::<Value>::new());
    cluster.end().await
}

#[tokio::test]
async fn worker_log_lines_hold_values() -> Result<()> {
    let cluster = cluster(&[]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "true").await?;
    let ended = eventually("the end of the run is logged", || async {
        let all = lines(&cluster.workers[0].process.read_log()).ok()?;
        all.into_iter().find(|line| line["message"] == "run ended")
    })
    .await;
    assert!(ended["seconds"].is_f64() && ended["outcome"] == "exited", "{ended}");
    let ready = lines(&cluster.workers[0].process.read_log())?;
    let ready =
        ready.iter().find(|line| line["message"] == "worker ready").context("worker ready")?;
    let modes = ready["modes"].as_str().context("modes")?;
    assert!(modes.split(',').any(|mode| mode == "logical"), "{ready}");
    cluster.end().await
}

/// `?value` in a log macro writes Rust's `Debug` text, which no reader of logs can rely on.
#[test]
fn log_macros_write_no_debug_text() -> Result<()> {
    let mut found = Vec::new();
    for package in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates"))? {
        check_directory(&package?.path().join("src"), &mut found)?;
    }
    assert!(found.is_empty(), "{found:#?}");
    Ok(())
}

fn check_directory(directory: &Path, found: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            check_directory(&path, found)?;
            continue;
        }
        let text = fs::read_to_string(&path)?;
        for (start, _) in text.match_indices("tracing::") {
            // Fields come before the message, which is the first string.
            let call = text[start..].split(['"', ';']).next().unwrap_or_default();
            let call = call.split_whitespace().collect::<Vec<_>>().join(" ");
            if call.contains('!')
                && ["(?", "( ?", ", ?", "= ?"].iter().any(|debug| call.contains(debug))
            {
                found.push(format!("{}: {call}", path.display()));
            }
        }
    }
    Ok(())
}
