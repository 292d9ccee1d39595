//! Attempts to leave a sandbox: detected, ended, reported, and the tool quarantined until it is released.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    sync::mpsc::{Receiver, channel},
    thread,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{outcome::Kind, *};
use codelia_store::EventKind;
use codelia_tests::{Scratch, eventually, refusal, shell};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::isolation::isolating_with;

const SECRET: &str = "a secret of the webhook";

/// A request that the webhook got.
struct Request {
    headers: HashMap<String, String>,
    body: String,
}

/// A webhook on the loopback, with its address and the requests that it gets.
fn webhook() -> Result<(String, Receiver<Request>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}/hook", listener.local_addr()?);
    let (requests, receiver) = channel();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(&stream);
            let (mut line, mut headers) = (String::new(), HashMap::new());
            while reader.read_line(&mut line).is_ok_and(|length| length > 2) {
                if let Some((name, value)) = line.split_once(':') {
                    headers.insert(name.to_lowercase(), value.trim().to_owned());
                }
                line.clear();
            }
            let length = headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
            let mut body = vec![0; length];
            if reader.read_exact(&mut body).is_err() {
                continue;
            }
            let _ = (&stream).write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n");
            let body = String::from_utf8_lossy(&body).into_owned();
            if requests.send(Request { headers, body }).is_err() {
                return;
            }
        }
    });
    Ok((url, receiver))
}

/// HMAC-SHA256, written out, in hexadecimal digits.
fn hmac(key: &[u8], message: &[u8]) -> String {
    let pad = |byte: u8| -> Vec<u8> { (0..64).map(|at| key.get(at).copied().unwrap_or(0) ^ byte).collect() };
    let inner = Sha256::digest([pad(0x36), message.to_vec()].concat());
    let outer = Sha256::digest([pad(0x5c), inner.to_vec()].concat());
    outer.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn escape_attempt_is_ended_reported_and_quarantined() -> Result<()> {
    let place = Scratch::new()?;
    let (secret, (url, requests)) = (place.join("secret"), webhook()?);
    fs::write(&secret, SECRET)?;
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600))?;
    let settings = vec![
        ("CODELIA_ESCAPE_CRITICAL", "terminate,quarantine_tool,alert".to_owned()),
        ("CODELIA_ESCAPE_WEBHOOK_URL", url),
        ("CODELIA_ESCAPE_WEBHOOK_SECRET_FILE", secret.display().to_string()),
    ];
    let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let declaration =
        ToolDeclaration { owner: "tests".into(), executables: vec!["sh".into()], ..Default::default() };
    let name = "tools/shell".to_owned();
    let request = RegisterToolRequest { name, declaration: Some(declaration), expected_version: None };
    client.tools().register_tool(request).await?;
    let session = client.session().await?.name;
    let run = async |script: &str| {
        let mut request = StartRunRequest { tool: "tools/shell".into(), ..shell(&session, script) };
        request.command.as_mut().context("command")?.env.insert("MARK".into(), "value".into());
        anyhow::Ok(client.start(request).await?)
    };
    // The control: an ordinary command of the tool.
    let ordinary = run("echo fine").await?;
    assert_eq!(client.watch_to_end(&ordinary.name, 0).await?.outcome(), Kind::Exited(0));

    // mount: blocked, and the run ends although the command would continue.
    let escape = run("echo before; perl -e 'syscall(165,0,0,0,0,0)'; sleep 1000").await?;
    let seen = client.watch_to_end(&escape.name, 0).await?;
    ensure!(matches!(seen.outcome(), Kind::Violation(_)), "{seen:?}");

    let sent = tokio::task::spawn_blocking(move || {
        requests.recv_timeout(std::time::Duration::from_secs(30)).map(|first| (first, requests))
    });
    let (sent, requests) = sent.await??;
    let (time, signature) = (&sent.headers["codelia-timestamp"], &sent.headers["codelia-signature"]);
    let expected = hmac(SECRET.as_bytes(), format!("{time}.{}", sent.body).as_bytes());
    assert_eq!(*signature, format!("sha256={expected}"));
    let alert: Value = serde_json::from_str(&sent.body)?;
    assert_eq!((&alert["kind"], &alert["run_id"]), (&"ESCAPE_ATTEMPT".into(), &escape.run_id.clone().into()));
    let detail = &alert["detail"];
    assert_eq!((&detail["severity"], &detail["tool"]), (&"critical".into(), &"shell".into()));
    assert!(detail["indicators"][0]["description"].as_str().is_some_and(|text| text.contains("mount(")));
    assert_eq!(detail["trace"]["environment_names"], serde_json::json!(["MARK"]), "names without values");
    assert!(!sent.body.contains("value"), "{}", sent.body);
    eventually("the alert is removed", || async {
        (cluster.database.number("SELECT count(*) FROM alerts").await.ok()? == 0).then_some(())
    })
    .await;
    assert!(requests.try_recv().is_err(), "one alert, and none for the ordinary run");

    // The tool is quarantined because of the run, until an administrator releases it.
    let get = GetToolRequest { name: "tools/shell".into() };
    let tool = client.tools().get_tool(get).await?.into_inner().tool.unwrap_or_default();
    let quarantine = tool.quarantine.context("quarantined")?;
    assert_eq!((quarantine.run_id, quarantine.key_id.as_str()), (escape.run_id.clone(), ""));
    let request = StartRunRequest { tool: "tools/shell".into(), ..shell(&session, "true") };
    let refused = client.start(request.clone()).await.unwrap_err();
    assert_eq!(refusal(&refused).reason, "TOOL_QUARANTINED");
    assert!(refused.message().contains("codelia tools release shell"), "{}", refused.message());
    let release = ReleaseToolRequest { name: "tools/shell".into(), reason: "looked at".into() };
    client.tools().release_tool(release).await?;
    let again = client.start(request).await?;
    assert_eq!(client.watch_to_end(&again.name, 0).await?.outcome(), Kind::Exited(0));

    let tenant = "a".parse()?;
    for (kind, by_key) in [
        (EventKind::EscapeAttempt, false),
        (EventKind::ToolQuarantined, false),
        (EventKind::ToolReleased, true),
    ] {
        let events = cluster.store.event_list(&tenant, Some(kind), None, 10).await?;
        assert_eq!(events.len(), 1, "{kind:?}");
        assert_eq!(events[0].subject.key.is_some(), by_key, "{kind:?}");
    }
    let audited =
        "SELECT count(*) FROM audit WHERE kind IN ('ESCAPE_ATTEMPT', 'TOOL_QUARANTINED', 'TOOL_RELEASED')";
    assert_eq!(cluster.database.number(audited).await?, 3);
    cluster.end().await
}

/// Without a configured response, a blocked call is only an event, and the run continues.
#[tokio::test]
async fn escape_attempt_is_only_recorded_by_default() -> Result<()> {
    let Some(cluster) = isolating_with("bwrap", 1, Vec::new()).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let seen = client.exec(&session, "perl -e 'syscall(165,0,0,0,0,0)'; echo after").await?;
    assert_eq!((seen.outcome(), seen.stdout_text().as_str()), (Kind::Exited(0), "after\n"));
    let events = cluster.store.event_list(&"a".parse()?, Some(EventKind::EscapeAttempt), None, 10).await?;
    assert_eq!(events.len(), 1);
    assert_eq!(cluster.database.number("SELECT count(*) FROM alerts").await?, 0, "no webhook");
    cluster.end().await
}
