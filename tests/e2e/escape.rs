//! Attempts to leave a sandbox: detected, ended, reported, and tool and session quarantined until
//! they are released.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener},
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{outcome::Kind, *};
use codelia_store::EventKind;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Process, RecordedEvent, Scratch, eventually, is_root,
    recorded_events, refusal, shell,
};
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
fn webhook() -> Result<(SocketAddr, Receiver<Request>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    Ok((listener.local_addr()?, serve(listener, Vec::new())))
}

/// Answers with these status lines, then with success.
fn serve(listener: TcpListener, answers: Vec<&'static str>) -> Receiver<Request> {
    let (requests, receiver) = channel();
    thread::spawn(move || {
        let mut answers = answers.into_iter();
        for stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(&stream);
            let (mut line, mut headers) = (String::new(), HashMap::new());
            while reader.read_line(&mut line).is_ok_and(|length| length > 2) {
                if let Some((name, value)) = line.split_once(':') {
                    headers.insert(name.to_lowercase(), value.trim().to_owned());
                }
                line.clear();
            }
            let length =
                headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
            let mut body = vec![0; length];
            if reader.read_exact(&mut body).is_err() {
                continue;
            }
            let status = answers.next().unwrap_or("204 No Content");
            let answer =
                format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let _ = (&stream).write_all(answer.as_bytes());
            let body = String::from_utf8_lossy(&body).into_owned();
            if requests.send(Request { headers, body }).is_err() {
                return;
            }
        }
    });
    receiver
}

/// HMAC-SHA256, written out, in hexadecimal digits.
fn hmac(key: &[u8], message: &[u8]) -> String {
    let pad = |byte: u8| -> Vec<u8> {
        (0..64).map(|at| key.get(at).copied().unwrap_or(0) ^ byte).collect()
    };
    let inner = Sha256::digest([pad(0x36), message.to_vec()].concat());
    let outer = Sha256::digest([pad(0x5c), inner.to_vec()].concat());
    outer.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The settings for a webhook, whose secret is in `place`.
fn webhook_settings(place: &Scratch, address: SocketAddr) -> Result<Vec<(&'static str, String)>> {
    let secret = place.join("secret");
    fs::write(&secret, SECRET)?;
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600))?;
    Ok(vec![
        ("CODELIA_ESCAPE_WEBHOOK_URL", format!("http://{address}/hook")),
        ("CODELIA_ESCAPE_WEBHOOK_SECRET_FILE", secret.display().to_string()),
    ])
}

/// The next alert, with a valid signature.
async fn next_alert(requests: Receiver<Request>) -> Result<(Value, Receiver<Request>)> {
    let sent = tokio::task::spawn_blocking(move || {
        requests.recv_timeout(Duration::from_secs(30)).map(|first| (first, requests))
    });
    let (sent, requests) = sent.await?.context("no alert")?;
    let (time, signature) =
        (&sent.headers["codelia-timestamp"], &sent.headers["codelia-signature"]);
    let expected = hmac(SECRET.as_bytes(), format!("{time}.{}", sent.body).as_bytes());
    assert_eq!(*signature, format!("sha256={expected}"));
    ensure!(!sent.body.contains("value"), "names without values: {}", sent.body);
    Ok((serde_json::from_str(&sent.body)?, requests))
}

/// One way to try.
#[derive(Debug, Clone, Copy)]
struct Attack {
    script: &'static str,
    /// The only programs that the run may execute.
    programs: &'static [&'static str],
    /// The type of the indicator, and a part of its description.
    indicator: (&'static str, &'static str),
    /// A blocked call in the trace.
    call: &'static str,
    /// Whether the run ends because of it, and not after it.
    is_ended: bool,
}

const ATTACK: Attack =
    Attack { script: "", programs: &[], indicator: ("SYSCALL", ""), call: "", is_ended: true };

const ATTACKS: [Attack; 6] = [
    Attack {
        script: "perl -e 'syscall(165,0,0,0,0,0)'",
        indicator: ("SYSCALL", "mount("),
        call: "mount(",
        ..ATTACK
    },
    Attack {
        script: "unshare --user true",
        indicator: ("SYSCALL", "unshare("),
        call: "unshare(",
        ..ATTACK
    },
    Attack {
        script: "id",
        programs: &["/usr/bin/sh", "/usr/bin/sleep"],
        indicator: ("PROCESS", "of /usr/bin/id"),
        call: "execve(",
        ..ATTACK
    },
    Attack {
        script: "cat /root/.aws/credentials > /dev/null",
        indicator: ("CANARY", "/root/.aws/credentials"),
        ..ATTACK
    },
    Attack { script: "echo moved", indicator: ("ISOLATION_DRIFT", "control group"), ..ATTACK },
    Attack {
        script: "python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); \
                 s.sendto(b\"x\", (\"192.0.2.1\", 9))'; exit 0",
        indicator: ("NETWORK", "past the proxy"),
        is_ended: false,
        ..ATTACK
    },
];

/// The names and contents of all files below a directory.
fn tree_hash(directory: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut entries: Vec<_> = fs::read_dir(directory)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        hash.update(entry.file_name().as_encoded_bytes());
        if entry.file_type()?.is_dir() {
            hash.update(tree_hash(&entry.path())?);
        } else {
            hash.update(fs::read(entry.path())?);
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Moves the process that sleeps this long to the top of its hierarchy of control groups.
async fn move_to_other_group(seconds: &str) -> Result<()> {
    let pid = eventually("the command sleeps", || async {
        let is_it = |path: &Path| {
            let words = fs::read(path.join("cmdline")).unwrap_or_default();
            words == format!("sleep\0{seconds}\0").as_bytes()
        };
        let found = fs::read_dir("/proc").ok()?.flatten().find(|entry| is_it(&entry.path()))?;
        found.file_name().into_string().ok()
    })
    .await;
    // Not before the first look of the worker.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let top = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"]
        .into_iter()
        .map(|top| Path::new(top).join("cgroup.procs"));
    let top = top.into_iter().find(|file| file.exists()).context("control groups")?;
    Ok(fs::write(top, &pid)?)
}

async fn each_indicator_is_answered(mode: &'static str) -> Result<()> {
    let (place, (address, mut requests)) = (Scratch::new()?, webhook()?);
    let policy = place.join("policy.yaml");
    fs::write(&policy, "network: {mode: proxy, allowed_hosts: [example.org]}")?;
    let response = "terminate,quarantine_tool,quarantine_session,alert";
    let mut settings = webhook_settings(&place, address)?;
    settings.extend([
        ("CODELIA_ESCAPE_CRITICAL", response.to_owned()),
        ("CODELIA_ESCAPE_HIGH", response.to_owned()),
        ("CODELIA_ESCAPE_CANARY_FILES", "true".to_owned()),
        ("CODELIA_SANDBOX_POLICY", policy.display().to_string()),
    ]);
    let Some(cluster) = isolating_with(mode, 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    // The control: an ordinary command, also one that looks at where the decoys are.
    let session = client.session().await?.name;
    let ordinary = client
        .exec(&session, "ls -l /root/.aws /root/.ssh; test -r /root/.aws/credentials")
        .await?;
    assert_eq!(ordinary.outcome(), Kind::Exited(0), "{ordinary:?}");
    assert_eq!(events(&cluster, EventKind::EscapeAttempt).await?.len(), 0);
    for (number, attack) in ATTACKS.into_iter().enumerate() {
        if attack.indicator.0 == "ISOLATION_DRIFT" && !is_root() {
            continue;
        }
        let tried =
            Tried { cluster: &cluster, client: &client, attack, tool: format!("tool-{number}") };
        requests = tried.is_answered(requests).await.with_context(|| format!("{attack:?}"))?;
    }
    cluster.end().await
}

async fn events(cluster: &Cluster, kind: EventKind) -> Result<Vec<RecordedEvent>> {
    recorded_events(&cluster.store, &"a".parse()?, Some(kind)).await
}

/// An attack of a tool of its own, in a session of its own.
struct Tried<'a> {
    cluster: &'a Cluster,
    client: &'a Client,
    attack: Attack,
    tool: String,
}

impl Tried<'_> {
    async fn is_answered(&self, requests: Receiver<Request>) -> Result<Receiver<Request>> {
        let client = self.client;
        let declaration = ToolDeclaration {
            owner: "tests".into(),
            executables: vec!["sh".into()],
            ..Default::default()
        };
        let name = format!("tools/{}", self.tool);
        let request =
            RegisterToolRequest { name, declaration: Some(declaration), expected_version: None };
        client.tools().register_tool(request).await?;
        let network = if self.attack.is_ended { NetworkMode::None } else { NetworkMode::Proxy };
        let request = CreateSessionRequest { network: network.into(), ..Default::default() };
        let session = client.create(request).await?;
        client.put(&session.name, "file", "before").await?;
        let workspace = self.cluster.workers[0]
            .root
            .join("sessions")
            .join(&session.session_id)
            .join("workspace");
        let before = tree_hash(&workspace)?;

        let escape = self.run(&session.name).await?;
        let seen = client.watch_to_end(&escape.name, 0).await?;
        ensure!(matches!(seen.outcome(), Kind::Violation(_)), "{seen:?}");
        assert_eq!(tree_hash(&workspace)?, before, "a transactional run leaves nothing");

        let (alert, requests) = next_alert(requests).await?;
        assert_eq!(alert["run_id"], *escape.run_id, "{alert}");
        self.is_traced(&alert, &escape).await?;
        eventually("the alert is removed", || async {
            (self.cluster.database.number("SELECT count(*) FROM alerts").await.ok()? == 0)
                .then_some(())
        })
        .await;
        ensure!(requests.try_recv().is_err(), "one alert");
        self.is_quarantined_until_released(&session, &escape).await?;
        self.is_recorded(&session, &escape).await?;
        Ok(requests)
    }

    /// A transactional run that tries it. It would sleep if nothing ended it.
    async fn run(&self, session: &str) -> Result<Run> {
        // Unique on this machine.
        let digits: String = session.chars().rev().filter(char::is_ascii_digit).take(8).collect();
        let seconds = format!("1{digits}");
        let script =
            format!("echo changed > file; echo seen; {}; sleep {seconds}", self.attack.script);
        let mut request = StartRunRequest {
            tool: format!("tools/{}", self.tool),
            transaction: TransactionMode::Apply.into(),
            ..shell(session, &script)
        };
        if !self.attack.programs.is_empty() {
            let values = self.attack.programs.iter().map(|&path| path.to_owned()).collect();
            let process = ProcessPolicy {
                allowed_executables: Some(TextList { values }),
                ..Default::default()
            };
            request.policy = Some(Policy { process: Some(process), ..Default::default() });
        }
        request.command.as_mut().context("command")?.env.insert("MARK".into(), "value".into());
        let run = self.client.start(request).await?;
        if self.attack.indicator.0 == "ISOLATION_DRIFT" {
            move_to_other_group(&seconds).await?;
        }
        Ok(run)
    }

    /// The trace is complete, in the alert and for `codelia trace`.
    async fn is_traced(&self, alert: &Value, run: &Run) -> Result<()> {
        let (detail, (kind, description)) = (&alert["detail"], self.attack.indicator);
        let is_it = |indicator: &Value| {
            indicator["type"] == kind
                && indicator["timestamp"].is_i64()
                && indicator["description"].as_str().is_some_and(|text| text.contains(description))
        };
        ensure!(
            detail["indicators"].as_array().is_some_and(|all| all.iter().any(is_it)),
            "{detail}"
        );
        assert_eq!(detail["tool"], *self.tool);
        let trace = &detail["trace"];
        assert_eq!(
            (&trace["program"], &trace["environment_names"]),
            (&"sh".into(), &serde_json::json!(["MARK"]))
        );
        ensure!(trace["last_output"].as_str().is_some_and(|text| text.contains("seen")), "{trace}");
        let calls = trace["calls"].to_string();
        ensure!(calls.contains(self.attack.call), "{calls}");
        if self.attack.is_ended {
            let has_shell = |process: &Value| process["program"] == "sh" && process["pid"].is_u64();
            let processes = trace["processes"].as_array().context("processes")?;
            ensure!(processes.iter().any(has_shell), "{trace}");
        } else {
            ensure!(trace["connections"].to_string().contains("no_route"), "{trace}");
        }
        let printed =
            Process::finish(self.cluster.cli(self.client, &["trace", &run.run_id]), b"").await?;
        ensure!(
            printed.stdout.contains(description) && printed.stdout.contains("  seen"),
            "{printed:?}"
        );
        let printed =
            Process::finish(self.cluster.cli(self.client, &["trace", "--json", &run.run_id]), b"")
                .await?;
        let printed: Value = serde_json::from_str(&printed.stdout)?;
        let detail: Value = serde_json::from_str(printed["detail"].as_str().context("detail")?)?;
        assert_eq!(detail["trace"], *trace, "as it was sent");
        Ok(())
    }

    async fn is_quarantined_until_released(&self, session: &Session, run: &Run) -> Result<()> {
        let client = self.client;
        let name = format!("tools/{}", self.tool);
        let tool =
            client.tools().get_tool(GetToolRequest { name: name.clone() }).await?.into_inner().tool;
        let quarantine = tool.unwrap_or_default().quarantine.context("the tool is quarantined")?;
        assert_eq!((quarantine.run_id, quarantine.key_id.as_str()), (run.run_id.clone(), ""));
        let quarantine =
            client.get_session(&session.name).await?.quarantine.context("the session, too")?;
        assert_eq!(quarantine.run_id, run.run_id);

        let refused = client.start(shell(&session.name, "true")).await.err().context("refused")?;
        assert_eq!(refusal(&refused).reason, "SESSION_QUARANTINED");
        ensure!(refused.message().contains("codelia session release"), "{}", refused.message());
        let refused = client.put(&session.name, "file", "after").await.err().context("refused")?;
        assert_eq!(refusal(&refused).reason, "SESSION_QUARANTINED");
        assert_eq!(client.get(&session.name, "file").await?, "before", "files can be looked at");
        let release =
            ReleaseSessionRequest { name: session.name.clone(), reason: "looked at".into() };
        let plain =
            client.with_secret(&self.cluster.key("a", &[codelia_store::Scope::Run]).await?)?;
        let refused =
            plain.sessions().release_session(release.clone()).await.err().context("refused")?;
        assert_eq!(refusal(&refused).reason, "SCOPE_MISSING");
        client.sessions().release_session(release).await?;

        let request = StartRunRequest { tool: name.clone(), ..shell(&session.name, "cat file") };
        let refused = client.start(request.clone()).await.err().context("refused")?;
        assert_eq!(refusal(&refused).reason, "TOOL_QUARANTINED");
        let release = ReleaseToolRequest { name, reason: "looked at".into() };
        client.tools().release_tool(release).await?;
        let again = client.start(request).await?;
        let again = client.watch_to_end(&again.name, 0).await?;
        assert_eq!((again.outcome(), again.stdout_text().as_str()), (Kind::Exited(0), "before"));
        Ok(())
    }

    /// In the audit, with who did it.
    async fn is_recorded(&self, session: &Session, run: &Run) -> Result<()> {
        let mut kinds = Vec::new();
        let request = ListEventsRequest {
            parent: session.name.clone(),
            page_size: 1000,
            ..Default::default()
        };
        for event in self.client.audit().list_events(request).await?.into_inner().events {
            let of_run = event.run_id == run.run_id && event.key_id.is_empty();
            match event.kind.as_str() {
                "ESCAPE_ATTEMPT" | "TOOL_QUARANTINED" | "SESSION_QUARANTINED" if of_run => {
                    kinds.push(event.kind)
                }
                "SESSION_RELEASED" if !event.key_id.is_empty() => kinds.push(event.kind),
                _ => {}
            }
        }
        kinds.sort();
        assert_eq!(
            kinds,
            ["ESCAPE_ATTEMPT", "SESSION_QUARANTINED", "SESSION_RELEASED", "TOOL_QUARANTINED"]
        );
        let released = events(self.cluster, EventKind::ToolReleased).await?;
        ensure!(
            released
                .iter()
                .any(|event| event.body.detail["tool"] == *self.tool && event.subject.key.is_some())
        );
        Ok(())
    }
}

#[tokio::test]
async fn each_indicator_is_answered_in_bwrap() -> Result<()> {
    each_indicator_is_answered("bwrap").await
}

#[tokio::test]
async fn each_indicator_is_answered_in_nsjail() -> Result<()> {
    each_indicator_is_answered("nsjail").await
}

/// By default a call that some programs make is only recorded, and one that none makes ends the
/// run.
#[tokio::test]
async fn only_hostile_calls_end_a_run_by_default() -> Result<()> {
    let Some(cluster) = isolating_with("bwrap", 1, Vec::new()).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let seen = client.exec(&session, "unshare --user true; echo after").await?;
    assert_eq!((seen.outcome(), seen.stdout_text().as_str()), (Kind::Exited(0), "after\n"));
    let seen = client.exec(&session, "perl -e 'syscall(165,0,0,0,0,0)'; sleep 1000").await?;
    ensure!(matches!(seen.outcome(), Kind::Violation(_)), "{seen:?}");
    assert_eq!(events(&cluster, EventKind::EscapeAttempt).await?.len(), 2);
    assert_eq!(cluster.database.number("SELECT count(*) FROM alerts").await?, 0, "no webhook");
    ensure!(client.get_session(&session).await?.quarantine.is_none());
    cluster.end().await
}

/// Other runs of a quarantined session end, and those that wait are refused.
#[tokio::test]
async fn quarantine_ends_the_runs_of_a_session() -> Result<()> {
    let settings = vec![("CODELIA_ESCAPE_HIGH", "quarantine_session".to_owned())];
    let cluster =
        Cluster::start_with(ClusterOptions { settings, slots: 1, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let running = client.start(shell(&session, "sleep 1000")).await?;
    let waiting = client.start(shell(&session, "true")).await?;
    client.get(&session, "../outside").await.unwrap_err();
    ensure!(client.get_session(&session).await?.quarantine.is_some_and(|it| it.run_id.is_empty()));
    let ended = client.watch_to_end(&running.name, 0).await?;
    ensure!(matches!(ended.outcome(), Kind::Canceled(_)), "{ended:?}");
    let ended = client.watch_to_end(&waiting.name, 0).await?;
    ensure!(matches!(ended.outcome(), Kind::Refused(_) | Kind::Canceled(_)), "{ended:?}");
    cluster.end().await
}

/// Paths that leave the workspace are signs, at most one a minute; others that fail are none.
#[tokio::test]
async fn traversal_in_file_calls_is_recorded_once() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    client.exec(&session, "ln -s /etc out; ln -s missing dangling").await?;
    // The controls.
    for path in ["missing", "missing/file", "a/../b", "dangling", "/workspace/missing"] {
        client.get(&session, path).await.unwrap_err();
    }
    client.get("sessions/01890000-0000-7000-8000-000000000000", "../x").await.unwrap_err();
    assert_eq!(events(&cluster, EventKind::EscapeAttempt).await?.len(), 0);
    let mut sessions = Vec::new();
    for path in ["../outside", "/etc/passwd", "out/passwd"] {
        let session = client.session().await?;
        client.exec(&session.name, "ln -s /etc out").await?;
        for _ in 0..3 {
            client.get(&session.name, path).await.unwrap_err();
            client.put(&session.name, path, "text").await.unwrap_err();
        }
        sessions.push(session.session_id);
        let recorded = events(&cluster, EventKind::EscapeAttempt).await?;
        assert_eq!(recorded.len(), sessions.len(), "{path}");
        let (subject, detail) = (&recorded[0].subject, &recorded[0].body.detail);
        assert_eq!(subject.session.map(|id| id.to_string()).as_ref(), sessions.last());
        ensure!(subject.key.is_some() && subject.run.is_none(), "{subject:?}");
        let indicator = &detail["indicators"][0];
        assert_eq!(
            (&indicator["type"], &indicator["severity"]),
            (&"FILESYSTEM".into(), &"high".into())
        );
        assert_eq!(detail["trace"]["path"], path);
    }
    cluster.end().await
}

/// A webhook that cannot be reached, then fails, gets the alert in the end, and once.
#[tokio::test]
async fn alert_is_retried_until_delivered_once() -> Result<()> {
    let place = Scratch::new()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    drop(listener);
    let settings = webhook_settings(&place, address)?;
    let cluster = Cluster::start_with(ClusterOptions { settings, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    client.get(&session, "../outside").await.unwrap_err();
    let attempts = async |count: i64| {
        eventually("the next attempt fails", || async {
            // Without the time between two attempts.
            cluster.database.execute("UPDATE alerts SET next_at = now()").await.ok()?;
            let found = cluster
                .database
                .number("SELECT coalesce(max(attempts), 0)::bigint FROM alerts")
                .await
                .ok()?;
            (found >= count).then_some(())
        })
        .await;
    };
    attempts(1).await;
    let requests = serve(TcpListener::bind(address)?, vec!["500 Internal Server Error"]);
    let (failed, requests) = next_alert(requests).await?;
    cluster.database.execute("UPDATE alerts SET next_at = now()").await?;
    let (sent, requests) = next_alert(requests).await?;
    assert_eq!(sent, failed, "the same alert");
    eventually("the alert is removed", || async {
        (cluster.database.number("SELECT count(*) FROM alerts").await.ok()? == 0).then_some(())
    })
    .await;
    ensure!(requests.try_recv().is_err(), "delivered once");
    cluster.end().await
}

/// Where decoys cannot be watched, the option is refused by its name.
#[tokio::test]
async fn canary_files_are_refused_where_they_cannot_work() -> Result<()> {
    let settings = vec![("CODELIA_ESCAPE_CANARY_FILES", "true".to_owned())];
    let cluster = Cluster::start_with(ClusterOptions { settings, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let run = client.start(shell(&session, "true")).await?;
    let ended = client.watch_to_end(&run.name, 0).await?;
    let Kind::Refused(refused) = ended.outcome() else { anyhow::bail!("{ended:?}") };
    assert_eq!(refused.reason, "UNENFORCEABLE");
    ensure!(refused.message.starts_with("escape.canary_files: "), "{}", refused.message);
    cluster.end().await
}
