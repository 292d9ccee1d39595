//! Mode flags: operators move sessions to another mode at run time, and back.

use std::{collections::HashMap, fs, os::unix::fs::PermissionsExt, path::PathBuf};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CreateSessionRequest, Flag, FlagAction, FlagGuard, FlagRule, GetFlagRequest, IsolationLevel,
    ListFlagHistoryRequest, RollbackFlagRequest, SandboxMode, Session, SetFlagRequest,
    outcome::Kind,
};
use codelia_tests::{Client, Cluster, ClusterOptions, Process, eventually, refusal, shell};
use futures::{StreamExt, TryStreamExt, stream};
use tonic::Code;

use crate::{
    isolation::is_usable,
    service::{free_address, http_get},
};

/// A counter or gauge on a metrics page, 0 if it is not there.
async fn metric(address: &str, name: &str, labels: &[&str]) -> Result<u64> {
    let page = http_get(address, "/metrics").await?.1;
    let line = page.lines().find(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'))
            && labels.iter().all(|label| line.contains(label))
    });
    Ok(line.and_then(|line| line.rsplit(' ').next()).unwrap_or("0").parse()?)
}

/// Waits until an api follows: its share of the flag is this.
async fn followed(metrics: &str, percent: u64) {
    eventually(("the api follows", percent), || async {
        (metric(metrics, "codelia_flag_percent", &[r#"flag="canary""#]).await.ok()? == percent)
            .then_some(())
    })
    .await;
}

fn rule(mode: SandboxMode) -> FlagRule {
    FlagRule { mode: mode.into(), ..FlagRule::default() }
}

async fn set(operator: &Client, rule: FlagRule, force: bool) -> Result<Flag, tonic::Status> {
    let request = SetFlagRequest {
        name: "flags/canary".into(),
        rule: Some(rule),
        reason: "a test".into(),
        force,
    };
    Ok(operator.flags().set_flag(request).await?.into_inner().flag.unwrap_or_default())
}

async fn get(operator: &Client) -> Result<Flag, tonic::Status> {
    let request = GetFlagRequest { name: "flags/canary".into() };
    Ok(operator.flags().get_flag(request).await?.into_inner().flag.unwrap_or_default())
}

async fn history(operator: &Client) -> Result<Vec<Flag>> {
    let request = ListFlagHistoryRequest { name: "flags/canary".into(), ..Default::default() };
    Ok(operator.flags().list_flag_history(request).await?.into_inner().flags)
}

const SET: &str = "SELECT count(*) FROM audit WHERE kind = 'FLAG_SET' AND key_id IS NOT NULL";
const ROLLED_BACK: &str =
    "SELECT count(*) FROM audit WHERE kind = 'FLAG_ROLLED_BACK' AND key_id IS NOT NULL";
const TRIPPED: &str = "SELECT count(*) FROM audit WHERE kind = 'FLAG_GUARD_TRIPPED'";

/// Creates sessions through all clients at once, runs a command in each, and returns them.
async fn load(clients: &[Client], count: usize) -> Result<Vec<Session>> {
    let work = |number: usize| async move {
        let client = &clients[number % clients.len()];
        let session = client.session().await?;
        let seen = client.exec(&session.name, "exit 0").await?;
        ensure!(seen.outcome() == Kind::Exited(0), "{seen:?}");
        ensure!(seen.run().mode == session.mode, "{seen:?}");
        client.close(&session.name).await?;
        Ok(session)
    };
    stream::iter((0..count).map(work)).buffer_unordered(8).try_collect().await
}

fn in_bwrap(sessions: &[Session]) -> usize {
    sessions.iter().filter(|session| session.mode() == SandboxMode::Bwrap).count()
}

#[tokio::test]
async fn ten_percent_flip_under_load_fails_no_run() -> Result<()> {
    let shape = ClusterOptions { workers: 1, apis: 0, slots: 8, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    if !is_usable(&cluster, "bwrap").await? {
        return cluster.end().await;
    }
    let metrics = [free_address().await?, free_address().await?];
    for address in &metrics {
        cluster.add_api_with(&[("CODELIA_METRICS_LISTEN", address)]).await?;
    }
    let operator = cluster.operator().await?;
    let tenant = cluster.tenant("a").await?;
    let clients = [tenant.clone(), Client::connect(&cluster.endpoint(1), &tenant.secret).await?];
    let kept = tenant.session().await?;

    // Sessions are created without a pause while the flag is set and rolled back.
    let tenant_rule =
        FlagRule { tenant: "tenants/a".into(), percent: Some(10), ..rule(SandboxMode::Bwrap) };
    let flag = async {
        set(&operator, tenant_rule, false).await?;
        followed(&metrics[1], 10).await;
        anyhow::Ok(())
    };
    let (before, flag) = tokio::join!(load(&clients, 30), flag);
    before?;
    flag?;
    let flipped = load(&clients, 200).await?;
    let share = in_bwrap(&flipped);
    assert!((5..=42).contains(&share), "{share} of 200 sessions, expected about 20");
    assert_eq!(operator.session().await?.mode(), SandboxMode::Logical, "another tenant");

    let rollback = ["flags", "rollback", "canary", "--reason", "enough seen"];
    let roll_back = async {
        let done = Process::finish(cluster.cli(&operator, &rollback), b"").await?;
        ensure!(done.code == Some(0), "{done:?}");
        followed(&metrics[1], 0).await;
        anyhow::Ok(())
    };
    let (during, rolled_back) = tokio::join!(load(&clients, 30), roll_back);
    during?;
    rolled_back?;
    assert_eq!(in_bwrap(&load(&clients, 40).await?), 0);
    assert_eq!(
        tenant.exec(&kept.name, "true").await?.run().mode(),
        SandboxMode::Logical,
        "it keeps its mode"
    );

    let found = history(&operator).await?;
    let actions: Vec<_> =
        found.iter().map(|flag| (flag.revision, flag.action(), flag.rule.is_some())).collect();
    assert_eq!(actions, [(2, FlagAction::Rollback, false), (1, FlagAction::Set, true)]);
    assert!(
        found.iter().all(|flag| !flag.key_id.is_empty() && !flag.reason.is_empty()),
        "{found:?}"
    );
    let counted = eventually("all runs are counted", || async {
        let numbers = history(&operator).await.ok()?.pop()?.numbers?;
        (numbers.sessions == numbers.runs && numbers.sessions >= i64::try_from(share).ok()?)
            .then_some(numbers)
    })
    .await;
    assert_eq!((counted.refused_sessions, counted.refused_runs, counted.failed_runs), (0, 0, 0));
    assert!(counted.setup_p95.is_some());
    let labels = [r#"flag="canary""#, r#"mode="bwrap""#];
    let mut seen = 0;
    for address in &metrics {
        seen += metric(address, "codelia_flag_sessions_total", &labels).await?;
    }
    assert_eq!(i64::try_from(seen)?, counted.sessions, "metrics and history agree");
    let rollbacks =
        metric(&metrics[0], "codelia_flag_rollbacks_total", &[r#"by="operator""#]).await?;
    assert_eq!(rollbacks, 1);
    for events in [SET, ROLLED_BACK] {
        assert_eq!(cluster.database.number(events).await?, 1, "{events}");
    }
    cluster.end().await
}

/// Puts a program in the place of another while no one has it half written.
fn replace(program: &PathBuf, content: &[u8]) -> Result<()> {
    let new = program.with_extension("new");
    fs::write(&new, content)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    Ok(fs::rename(&new, program)?)
}

#[tokio::test]
async fn broken_mode_trips_guard_and_rolls_back() -> Result<()> {
    let shape = ClusterOptions { workers: 0, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    if !is_usable(&cluster, "bwrap").await? {
        return cluster.end().await;
    }
    // The tool of the mode works when the worker looks for it, and breaks later.
    let tool = cluster.directory().join("bwrap");
    let path = std::env::var("PATH")?;
    let found = std::env::split_paths(&path)
        .map(|directory| directory.join("bwrap"))
        .find(|it| it.exists());
    replace(&tool, &fs::read(found.context("bwrap")?)?)?;
    cluster.add_worker_with(&[("CODELIA_BWRAP", &tool.display().to_string())]).await?;
    let operator = cluster.operator().await?;
    let client = cluster.tenant("a").await?;
    let bwrap = CreateSessionRequest { mode: SandboxMode::Bwrap.into(), ..Default::default() };
    let session = client.create(bwrap).await?;
    assert_eq!(
        client.exec(&session.name, "exit 2").await?.outcome(),
        Kind::Exited(2),
        "the control"
    );
    replace(&tool, b"#!/bin/sh\necho broken >&2\nexit 1\n")?;

    let guard = FlagGuard { max_failed_percent: Some(20), min_count: 5, ..Default::default() };
    set(&operator, FlagRule { guard: Some(guard), ..rule(SandboxMode::Bwrap) }, false).await?;
    let mut failed = 0;
    let tripped = loop {
        let flag = get(&operator).await?;
        if flag.rule.is_none() {
            break flag;
        }
        ensure!(failed < 1000, "{flag:?}");
        let session = client.session().await?;
        let run = client.start(shell(&session.name, "exit 0")).await?;
        let seen = client.watch_to_end(&run.name, 0).await?;
        failed += usize::from(
            matches!(seen.outcome(), Kind::Refused(refused) if refused.reason == "SANDBOX_FAILED"),
        );
    };
    assert!(failed >= 5, "{failed}");
    assert_eq!((tripped.action(), tripped.key_id.as_str()), (FlagAction::Guard, ""));
    assert!(tripped.reason.contains("runs without a sandbox"), "{tripped:?}");
    let before = history(&operator).await?.pop().context("the first revision")?;
    let numbers = before.numbers.unwrap_or_default();
    assert!(numbers.failed_runs >= 5 && numbers.failed_runs == numbers.runs, "{numbers:?}");
    assert_eq!(cluster.database.number(TRIPPED).await?, 1);
    let healthy = eventually("new sessions are in the default mode", || async {
        client.session().await.ok().filter(|session| session.mode() == SandboxMode::Logical)
    })
    .await;
    assert_eq!(client.exec(&healthy.name, "exit 0").await?.outcome(), Kind::Exited(0));
    cluster.end().await
}

#[tokio::test]
async fn mode_nobody_serves_is_refused_unless_forced() -> Result<()> {
    let settings = vec![
        ("CODELIA_BWRAP", "/no/bwrap".to_owned()),
        ("CODELIA_NSJAIL", "/no/nsjail".to_owned()),
        ("CODELIA_SANDBOX_CONTAINER_SOCKET", "/no/engine".to_owned()),
    ];
    let cluster =
        Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let operator = cluster.operator().await?;
    let client = cluster.tenant("a").await?;
    let refused =
        set(&operator, rule(SandboxMode::Nsjail), false).await.expect_err("no worker has it");
    let refused = refusal(&refused);
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::FailedPrecondition, "MODE_UNAVAILABLE")
    );

    let guard = FlagGuard { max_refused_percent: Some(50), min_count: 3, ..Default::default() };
    set(&operator, FlagRule { guard: Some(guard), ..rule(SandboxMode::Nsjail) }, true).await?;
    let logical = CreateSessionRequest { mode: SandboxMode::Logical.into(), ..Default::default() };
    let explicit = client.create(logical).await?;
    assert_eq!(explicit.mode(), SandboxMode::Logical, "a mode that the caller requests holds");
    let session = eventually("the guard rolls the flag back", || async {
        match client.session().await {
            Ok(session) => Some(session),
            Err(status) => {
                assert_eq!(refusal(&status).reason, "MODE_UNAVAILABLE");
                None
            }
        }
    })
    .await;
    assert_eq!(session.mode(), SandboxMode::Logical);
    let flag = get(&operator).await?;
    assert!(flag.action() == FlagAction::Guard && flag.reason.contains("refused"), "{flag:?}");
    cluster.end().await
}

#[tokio::test]
async fn floor_of_flag_holds_for_sessions_and_their_runs() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let client = cluster.tenant("a").await?;
    let labels = HashMap::from([("kind".to_owned(), "build".to_owned())]);
    let labeled = CreateSessionRequest { labels: labels.clone(), ..Default::default() };
    let older = client.create(labeled.clone()).await?;
    let floor =
        FlagRule { floor: IsolationLevel::IsolationLevel2.into(), labels, ..FlagRule::default() };
    set(&operator, floor, false).await?;
    let refused = client.create(labeled).await.expect_err("logical is below the floor");
    assert_eq!(refusal(&refused).reason, "ISOLATION_FLOOR");
    assert_eq!(client.session().await?.mode(), SandboxMode::Logical, "other sessions");
    assert_eq!(
        client.exec(&older.name, "exit 0").await?.outcome(),
        Kind::Exited(0),
        "it keeps its floor"
    );
    cluster.end().await
}

#[tokio::test]
async fn operator_sets_and_rolls_back_flags_by_command_line() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let codelia = async |arguments: &[&str]| {
        let done = Process::finish(cluster.cli(&operator, arguments), b"").await?;
        ensure!(done.code == Some(0), "{arguments:?}: {done:?}");
        anyhow::Ok(done.stdout)
    };
    for percent in ["10", "50"] {
        let set = [
            "flags",
            "set",
            "canary",
            "--mode",
            "logical",
            "--percent",
            percent,
            "--reason",
            "a step",
        ];
        codelia(&set).await?;
    }
    let list = codelia(&["flags", "list"]).await?;
    assert!(list.contains("canary") && list.contains("50 %") && list.contains("logical"), "{list}");
    codelia(&["flags", "rollback", "canary", "--reason", "too fast"]).await?;
    let shown: serde_json::Value =
        serde_json::from_str(&codelia(&["flags", "show", "canary", "--json"]).await?)?;
    assert_eq!(
        (&shown["rule"]["percent"], &shown["originRevision"]),
        (&10.into(), &"1".into()),
        "{shown}"
    );
    codelia(&["flags", "rollback", "canary", "--reason", "stop"]).await?;
    let past = codelia(&["flags", "history", "canary"]).await?;
    assert!(
        past.lines().count() == 5 && past.contains("off") && past.contains("too fast"),
        "{past}"
    );
    codelia(&["flags", "rollback", "canary", "--to", "2", "--reason", "again"]).await?;
    assert_eq!(get(&operator).await?.rule.and_then(|rule| rule.percent), Some(50));

    let request =
        RollbackFlagRequest { name: "flags/canary".into(), reason: "x".into(), revision: Some(0) };
    operator.flags().rollback_flag(request.clone()).await?;
    let again = RollbackFlagRequest { revision: None, ..request.clone() };
    let refused = operator.flags().rollback_flag(again).await.expect_err("it is off");
    assert_eq!(refusal(&refused).reason, "FLAG_OFF");
    let unknown = RollbackFlagRequest { revision: Some(99), ..request };
    let refused = operator.flags().rollback_flag(unknown).await.expect_err("no such revision");
    assert_eq!(refusal(&refused).fields, ["revision"]);
    let member = cluster.tenant("a").await?;
    let refused = get(&member).await.expect_err("needs the scope operator");
    assert_eq!(refused.code(), Code::PermissionDenied);
    cluster.end().await
}
