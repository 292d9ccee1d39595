//! `codelia supervisor`: local programs decide about approvals through a Unix socket.

use std::{os::unix::fs::PermissionsExt, path::Path, process::Command, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::v1::{outcome::Kind::Exited, *};
use codelia_store::Scope;
use codelia_tests::{
    Client, Cluster, ClusterOptions, HeldRun, Process, available, eventually, within,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

const LONG: Duration = Duration::from_secs(600);
const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/supervisor.py");

/// A program that is connected to the socket.
struct Program(BufReader<UnixStream>);

impl Program {
    async fn connect(socket: &Path) -> Result<Self> {
        Ok(Self(BufReader::new(UnixStream::connect(socket).await?)))
    }

    async fn event(&mut self) -> Result<Value> {
        let mut line = String::new();
        within("an event", self.0.read_line(&mut line)).await?;
        serde_json::from_str(&line).with_context(|| format!("{line:?}"))
    }

    async fn send(&mut self, message: Value) -> Result<()> {
        Ok(self.0.get_mut().write_all(format!("{message}\n").as_bytes()).await?)
    }
}

async fn decider(cluster: &Cluster, caller: &Client) -> Result<Client> {
    caller.with_secret(&cluster.key("a", &[Scope::Approve]).await?)
}

/// Starts a supervisor and waits until it listens.
async fn supervisor(cluster: &Cluster, decider: &Client, socket: &Path) -> Result<Process> {
    let path = socket.to_str().context("the path is text")?;
    let command = cluster.cli(decider, &["supervisor", "--socket", path]);
    let process = Process::start("supervisor", command, cluster.directory())?;
    eventually("it listens", || async { UnixStream::connect(socket).await.ok() }).await;
    Ok(process)
}

/// The example knows nothing but the protocol.
#[tokio::test]
async fn example_decides_about_approvals() -> Result<()> {
    let missing =
        (!Path::new("/usr/bin/python3").exists()).then_some("/usr/bin/python3 is missing");
    if !available("python", missing) {
        return Ok(());
    }
    let cluster = Cluster::start().await?;
    let caller = cluster.tenant("a").await?;
    let decider = decider(&cluster, &caller).await?;
    let session = caller.session().await?;
    let socket = cluster.directory().join("supervisor.sock");
    let mut process = supervisor(&cluster, &decider, &socket).await?;
    for (approved, decision) in [("network_proxy", "approve"), ("another", "deny")] {
        let held = HeldRun::record(&cluster, &caller, &session, "echo ran", LONG).await?;
        let mut example = Command::new("/usr/bin/python3");
        example.arg(EXAMPLE).arg(&socket).args(["--approve", approved, "--count", "1"]);
        let example = Process::finish(example, b"").await?;
        assert_eq!(example.code, Some(0), "{example:?}");
        let last: Value = serde_json::from_str(example.stdout.lines().last().context("no event")?)?;
        assert_eq!((&last["id"], &last["decision"]), (&json!(held.approval_id), &json!(decision)));
        let outcome = caller.watch_to_end(&held.run, 0).await?.outcome();
        assert_eq!(outcome == Exited(0), decision == "approve", "{outcome:?}");
    }
    assert!(process.terminate().await?.success());
    assert!(!socket.exists(), "it removes its socket");
    cluster.end().await
}

#[tokio::test]
async fn programs_stay_connected_while_an_api_restarts() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, ..ClusterOptions::default() }).await?;
    // A restarted one listens on the same port.
    cluster.add_api_with(&[]).await?;
    let caller = cluster.tenant("a").await?;
    let decider = decider(&cluster, &caller).await?;
    let session = caller.session().await?;
    let socket = cluster.directory().join("supervisor.sock");
    let mut process = supervisor(&cluster, &decider, &socket).await?;
    let mut program = Program::connect(&socket).await?;
    let held = HeldRun::record(&cluster, &caller, &session, "echo ran", LONG).await?;
    assert_eq!(program.event().await?["id"], json!(held.approval_id));
    cluster.apis[0].process.signal(rustix::process::Signal::KILL)?;
    cluster.apis[0].process.exited().await?;
    cluster.restart_api(0).await?;
    let approve =
        json!({ "type": "cmd.approve", "id": held.approval_id, "scope": "file", "persist": true });
    // Refused while the supervisor is not connected again.
    let decided = async {
        loop {
            program.send(approve.clone()).await?;
            if program.event().await?["type"] == "event.audit" {
                return anyhow::Ok(());
            }
        }
    };
    within("the request is decided", decided).await?;
    assert!(process.terminate().await?.success());
    cluster.end().await
}

#[tokio::test]
async fn first_decision_of_any_program_counts() -> Result<()> {
    let cluster = Cluster::start().await?;
    let caller = cluster.tenant("a").await?;
    let decider = decider(&cluster, &caller).await?;
    let session = caller.session().await?;
    let socket = cluster.directory().join("supervisor.sock");
    let mut process = supervisor(&cluster, &decider, &socket).await?;
    assert_eq!(std::fs::metadata(&socket)?.permissions().mode() & 0o777, 0o600);
    let hold = async |script| HeldRun::record(&cluster, &caller, &session, script, LONG).await;

    let mut early = Program::connect(&socket).await?;
    let held = hold("echo ran").await?;
    let request = early.event().await?;
    assert_eq!(
        (&request["type"], &request["id"]),
        (&json!("event.fs_request"), &json!(held.approval_id))
    );
    assert_eq!(request["op"], "network_proxy");
    // A program that connects later is sent what is pending.
    let mut late = Program::connect(&socket).await?;
    assert_eq!(late.event().await?, request);

    for wrong in [
        json!({ "type": "cmd.approve", "id": held.approval_id, "scope": "dir", "persist": false }),
        json!({ "type": "cmd.approve", "id": "019b2d4c-0000-7000-8000-000000000000", "scope": "file", "persist": false }),
        json!({ "type": "cmd.policy.save", "scope": "everyone" }),
        json!({ "type": "cmd.unknown" }),
        json!("text"),
    ] {
        late.send(wrong.clone()).await?;
        assert_eq!(late.event().await?["type"], "event.error", "{wrong}");
    }
    let approve =
        json!({ "type": "cmd.approve", "id": held.approval_id, "scope": "file", "persist": false });
    early.send(approve.clone()).await?;
    for program in [&mut early, &mut late] {
        let event = program.event().await?;
        assert_eq!(
            (&event["type"], &event["decision"]),
            (&json!("event.audit"), &json!("approve"))
        );
        assert_eq!((&event["id"], &event["scope"]), (&json!(held.approval_id), &json!("file")));
        assert!(event["ts"].is_string());
    }
    late.send(json!({ "type": "cmd.deny", "id": held.approval_id })).await?;
    assert_eq!(late.event().await?["type"], "event.error", "decided before");
    assert_eq!(caller.watch_to_end(&held.run, 0).await?.outcome(), Exited(0));

    // Someone decides through the API.
    let held = hold("echo never").await?;
    assert_eq!(early.event().await?["id"], json!(held.approval_id));
    let request = DecideApprovalRequest {
        name: held.approval.clone(),
        decision: ApprovalDecision::Deny.into(),
        ..Default::default()
    };
    decider.approvals().decide_approval(request).await?;
    assert_eq!(early.event().await?["decision"], "deny");
    assert!(process.terminate().await?.success());
    cluster.end().await
}

#[tokio::test]
async fn programs_and_their_lines_are_bounded() -> Result<()> {
    let cluster = Cluster::start().await?;
    let caller = cluster.tenant("a").await?;
    let decider = decider(&cluster, &caller).await?;
    let socket = cluster.directory().join("supervisor.sock");
    let mut process = supervisor(&cluster, &decider, &socket).await?;

    let mut long = UnixStream::connect(&socket).await?;
    // It may be closed before all of it is sent.
    let _ = long.write_all(&vec![b'x'; 100_000]).await;
    let mut answer = Vec::new();
    let _ = within("the end", long.read_to_end(&mut answer)).await;
    assert!(answer.len() < 1000, "a long line is not kept");

    let mut programs = Vec::new();
    for _ in 0..16 {
        programs.push(Program::connect(&socket).await?);
    }
    // The place of the first one is free once its end was seen.
    let last = programs.last_mut().context("a program")?;
    last.send(json!({})).await?;
    assert_eq!(last.event().await?["type"], "event.error", "control: it is served");
    let mut refused = Program::connect(&socket).await?;
    let message = refused.event().await?;
    assert!(
        message["message"].as_str().is_some_and(|text| text.contains("16 programs")),
        "{message}"
    );

    let second =
        cluster.cli(&decider, &["supervisor", "--socket", socket.to_str().context("text")?]);
    let second = Process::finish(second, b"").await?;
    assert_eq!(second.code, Some(1), "{second:?}");
    assert!(second.stderr.contains("another supervisor"), "{second:?}");
    // A socket that was left behind is replaced.
    process.signal(rustix::process::Signal::KILL)?;
    process.exited().await?;
    assert!(socket.exists());
    let mut process = supervisor(&cluster, &decider, &socket).await?;
    assert!(process.terminate().await?.success());
    cluster.end().await
}
