//! Tools: runs are held to what their tool declares, and refused while it is quarantined.

use std::fs;

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{outcome::Kind, *};
use codelia_store::EventKind;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Process, Scratch, command, recorded_events, refusal, shell,
};
use serde_json::Value;
use tonic::{Code, Status};

use crate::isolation::isolating;

const NAME: &str = "tools/shell";

/// A tool whose commands start with `sh`.
fn declaration(level: IsolationLevel) -> ToolDeclaration {
    let policy = Policy { isolation_level: level.into(), ..Default::default() };
    ToolDeclaration {
        owner: "tests".into(),
        executables: vec!["sh".into()],
        policy: Some(policy),
        ..Default::default()
    }
}

async fn register(client: &Client, declaration: ToolDeclaration) -> Result<Tool, Status> {
    let request = RegisterToolRequest {
        name: NAME.into(),
        declaration: Some(declaration),
        expected_version: None,
    };
    Ok(client.tools().register_tool(request).await?.into_inner().tool.unwrap_or_default())
}

async fn approve(operator: &Client, tool: &Tool) -> Result<(), Status> {
    let (name, version, level) = (tool.name.clone(), tool.version, tool.level);
    let request = ApproveToolLevelRequest { name, version, level, reason: "a test".into() };
    operator.tools().approve_tool_level(request).await.map(drop)
}

async fn quarantine(client: &Client) -> Result<(), Status> {
    let request = QuarantineToolRequest { name: NAME.into(), reason: "looks bad".into() };
    client.tools().quarantine_tool(request).await.map(drop)
}

async fn release(client: &Client) -> Result<(), Status> {
    let request = ReleaseToolRequest { name: NAME.into(), reason: "looked at".into() };
    client.tools().release_tool(request).await.map(drop)
}

fn with_tool(request: StartRunRequest) -> StartRunRequest {
    StartRunRequest { tool: NAME.into(), ..request }
}

/// Why a run of the tool is not admitted.
async fn refused(client: &Client, request: StartRunRequest) -> String {
    match client.start(with_tool(request)).await {
        Ok(run) => format!("admitted: {run:?}"),
        Err(status) => refusal(&status).reason,
    }
}

async fn succeeds(client: &Client, session: &str, script: &str) -> Result<Run> {
    let run = client.start(with_tool(shell(session, script))).await?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    ensure!(seen.outcome() == Kind::Exited(0), "{seen:?}");
    Ok(client.get_run(&run.name).await?)
}

async fn events(cluster: &Cluster, kind: EventKind) -> Result<usize> {
    let events = recorded_events(&cluster.store, &"a".parse()?, Some(kind)).await?;
    Ok(events.into_iter().filter(|event| event.subject.key.is_some()).count())
}

#[tokio::test]
async fn unapproved_or_quarantined_tool_is_refused_by_every_api() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { apis: 2, ..ClusterOptions::default() }).await?;
    let operator = cluster.operator().await?;
    let first = cluster.tenant("a").await?;
    let second = Client::connect(&cluster.endpoint(1), &first.secret).await?;
    let session = first.session().await?.name;
    let run = || shell(&session, "true");
    let missing = first.start(with_tool(run())).await.unwrap_err();
    assert_eq!((missing.code(), missing.message()), (Code::NotFound, "tool \"shell\" not found"));

    let tool = register(&first, declaration(IsolationLevel::IsolationLevel0)).await?;
    assert_eq!(tool.name, "tenants/a/tools/shell");
    assert_eq!(refused(&second, run()).await, "TOOL_NOT_APPROVED");
    assert_eq!(
        approve(&first, &tool).await.unwrap_err().code(),
        Code::PermissionDenied,
        "only operators"
    );
    approve(&operator, &tool).await?;
    // Each api has a copy by now, and learns of each change at its next call.
    for client in [&first, &second] {
        let run = succeeds(client, &session, "true").await?;
        assert_eq!((run.tool.as_str(), run.level()), ("shell", IsolationLevel::IsolationLevel0));
        assert_eq!(refused(client, command(&session, &["echo", "x"])).await, "INVALID_FIELD");
    }
    quarantine(&first).await?;
    for client in [&second, &first] {
        let status = client.start(with_tool(run())).await.unwrap_err();
        assert_eq!(refusal(&status).reason, "TOOL_QUARANTINED");
        assert!(
            status.message().contains("looks bad")
                && status.message().contains("codelia tools release")
        );
    }
    assert_eq!(
        client_of_scope(&cluster, &first).await?,
        Code::PermissionDenied,
        "needs an administrator"
    );
    release(&second).await?;
    succeeds(&first, &session, "true").await?;
    // A changed declaration needs a new approval.
    let mut changed = declaration(IsolationLevel::IsolationLevel0);
    changed.executables.push("bash".into());
    assert_eq!(register(&first, changed).await?.version, 2);
    assert_eq!(refused(&second, run()).await, "TOOL_NOT_APPROVED");
    for (kind, count) in [
        (EventKind::ToolRegistered, 2),
        (EventKind::ToolLevelApproved, 1),
        (EventKind::ToolQuarantined, 1),
        (EventKind::ToolReleased, 1),
    ] {
        assert_eq!(events(&cluster, kind).await?, count, "{kind:?}");
    }
    cluster.end().await
}

/// The answer to a release by a key that may only run.
async fn client_of_scope(cluster: &Cluster, client: &Client) -> Result<Code> {
    let secret = cluster.key("a", &[codelia_store::Scope::Run]).await?;
    let runner = client.with_secret(&secret)?;
    runner.tools().get_tool(GetToolRequest { name: NAME.into() }).await?;
    Ok(release(&runner).await.err().context("released")?.code())
}

#[tokio::test]
async fn waiting_run_is_refused_after_quarantine() -> Result<()> {
    let options = ClusterOptions { workers: 0, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(options).await?;
    let operator = cluster.operator().await?;
    let client = cluster.tenant("a").await?;
    let tool = register(&client, declaration(IsolationLevel::IsolationLevel0)).await?;
    approve(&operator, &tool).await?;
    let session = client.session().await?.name;
    let waiting = client.start(with_tool(shell(&session, "echo ran"))).await?;
    let other = client.start(shell(&session, "echo ran")).await?;
    quarantine(&client).await?;
    cluster.add_worker().await?;
    let seen = client.watch_to_end(&waiting.name, 0).await?;
    let Kind::Refused(refused) = seen.outcome() else { panic!("{seen:?}") };
    assert_eq!((refused.reason.as_str(), seen.stdout_text().as_str()), ("TOOL_QUARANTINED", ""));
    assert!(refused.message.contains("looks bad"), "{}", refused.message);
    // The control: a run that names no tool is not affected.
    assert_eq!(client.watch_to_end(&other.name, 0).await?.stdout_text(), "ran\n");
    cluster.end().await
}

/// The level of a tool applies to its runs only: other runs keep `LEVEL_2`.
#[tokio::test]
async fn approved_tool_runs_at_its_level_in_bwrap() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let operator = cluster.operator().await?;
    let client = cluster.tenant("a").await?;
    let floor = SetIsolationFloorRequest {
        name: "tenants/a".into(),
        level: IsolationLevel::IsolationLevel2.into(),
        reason: "a test".into(),
        ask_level: 0,
    };
    operator.admin().set_isolation_floor(floor).await?;
    let session = client.session().await?.name;
    // `set_mempolicy`, which the list of LEVEL_2 does not have.
    let unusual = "perl -e 'exit(syscall(238,0,0,0)==0 ? 0 : 7)'";
    register(&client, declaration(IsolationLevel::Unspecified)).await?;
    let run = client.start(with_tool(shell(&session, unusual))).await?;
    assert_eq!(
        client.watch_to_end(&run.name, 0).await?.outcome(),
        Kind::Exited(7),
        "nothing declared"
    );
    let run = client.get_run(&run.name).await?;
    assert_eq!((run.level(), run.violation_count), (IsolationLevel::IsolationLevel2, 1));

    let tool = register(&client, declaration(IsolationLevel::IsolationLevel1)).await?;
    approve(&operator, &tool).await?;
    let run = succeeds(&client, &session, unusual).await?;
    assert_eq!((run.level(), run.mode()), (IsolationLevel::IsolationLevel1, SandboxMode::Bwrap));
    let undeclared = client.exec(&session, unusual).await?;
    assert_eq!(undeclared.outcome(), Kind::Exited(7), "a run without a tool has LEVEL_2");

    let tool = register(&client, declaration(IsolationLevel::IsolationLevel0)).await?;
    approve(&operator, &tool).await?;
    let run = succeeds(&client, &session, "true").await?;
    assert_eq!((run.level(), run.mode()), (IsolationLevel::IsolationLevel0, SandboxMode::Logical));
    let logical = StartRunRequest { mode: SandboxMode::Logical.into(), ..shell(&session, "true") };
    assert_eq!(refusal(&client.start(logical).await.unwrap_err()).reason, "ISOLATION_FLOOR");
    cluster.end().await
}

#[tokio::test]
async fn tools_are_managed_on_the_command_line() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let client = cluster.tenant("a").await?;
    let place = Scratch::new()?;
    let file = place.join("echo.yaml");
    fs::write(
        &file,
        "name: echo\nowner: tests\ncommand_pattern: echo h*o **\npolicy: {isolation_level: LEVEL_0}\n",
    )?;
    let file = file.display().to_string();
    let cli = async |client: &Client, arguments: &[&str]| {
        Process::finish(cluster.cli(client, arguments), b"").await
    };
    let shown: Value = serde_json::from_str(
        &cli(&client, &["tools", "register", &file, "--expect", "0", "--json"]).await?.stdout,
    )?;
    assert_eq!((&shown["version"], &shown["level"]), (&"1".into(), &"ISOLATION_LEVEL_0".into()));
    let again = cli(&client, &["tools", "register", &file, "--expect", "0"]).await?;
    assert!(again.stderr.contains("has version 1"), "{again:?}");
    assert!(cli(&client, &["tools", "list"]).await?.stdout.contains("not approved"));
    let run = ["run", "--tool", "echo", "--", "echo", "hello", "you"];
    let refused = cli(&client, &run).await?;
    assert!(refused.stderr.contains("codelia tools approve"), "{refused:?}");
    let approve =
        ["tools", "approve", "echo", "--tenant", "a", "--level", "LEVEL_0", "--version", "1"];
    let approved = cli(&operator, &[&approve[..], &["--reason", "fine"]].concat()).await?;
    assert!(approved.stdout.contains("fine"), "{approved:?}");
    assert_eq!(cli(&client, &run).await?.stdout, "hello you\n");
    let other = cli(&client, &["run", "--tool", "echo", "--", "echo", "bye"]).await?;
    assert!(other.stderr.contains("tool: the command does not belong to echo"), "{other:?}");
    cli(&client, &["tools", "quarantine", "echo", "--reason", "odd"]).await?;
    assert!(cli(&client, &["tools", "show", "echo"]).await?.stdout.contains("odd"));
    assert!(cli(&client, &run).await?.stderr.contains("echo is quarantined: odd"));
    cli(&client, &["tools", "release", "echo", "--reason", "fine"]).await?;
    assert_eq!(cli(&client, &run).await?.stdout, "hello you\n");
    assert!(cli(&client, &["tools", "rm", "echo"]).await?.stderr.is_empty());
    assert!(cli(&client, &["tools", "show", "echo"]).await?.stderr.contains("not found"));
    cluster.end().await
}

#[tokio::test]
async fn transactional_tool_drops_changes_of_escape_attempt() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let level = IsolationLevel::IsolationLevel0;
    let impossible = ToolDeclaration { transactional: true, ..declaration(level) };
    let status = register(&client, impossible).await.err().context("refused")?;
    ensure!(refusal(&status).fields == ["declaration.transactional"], "{status:?}");
    let level = IsolationLevel::IsolationLevel2;
    register(&client, ToolDeclaration { transactional: true, ..declaration(level) }).await?;

    let tree = "find . -exec stat -c '%n %a %u %Y %s' {} + | sort; cat * | sha256sum";
    succeeds(&client, &session, "mkdir dir; echo 1 > dir/file; echo 1 > file").await?;
    let before = client.exec(&session, tree).await?.stdout_text();
    // The request does not say that the run is transactional.
    let attempt = "echo 2 > file; rm -r dir; unshare --user true; exit 0";
    let run = client.start(with_tool(shell(&session, attempt))).await?;
    client.watch_to_end(&run.name, 0).await?;
    let ended = client.get_run(&run.name).await?;
    ensure!(
        ended.transaction() == TransactionMode::Apply && ended.violation_count > 0,
        "{ended:?}"
    );
    ensure!(ended.changes.is_some_and(|it| it.state() == ChangesState::Dropped));
    ensure!(client.exec(&session, tree).await?.stdout_text() == before);
    // The control: without the tool, the changes are seen.
    client.exec(&session, attempt).await?;
    ensure!(client.exec(&session, tree).await?.stdout_text() != before);

    let container =
        StartRunRequest { mode: SandboxMode::Container.into(), ..shell(&session, "true") };
    let status = client.start(with_tool(container)).await.err().context("refused")?;
    ensure!(refusal(&status).fields == ["tool.transaction"], "{status:?}");
    cluster.end().await
}
