//! Approvals end to end: a run waits for a person, who decides with another key.

use std::time::Duration;

use anyhow::{Context, Result};
use codelia_proto::v1::{
    outcome::Kind::{self, Exited},
    *,
};
use codelia_store::Scope;
use codelia_tests::{
    Client, Cluster, ClusterOptions, HeldRun, Process, Terminal, eventually, refusal, within,
};
use futures::future::join_all;
use rustix::process::Signal;
use tonic::{Code, Status, Streaming};
use tonic_types::StatusExt;

const LONG: Duration = Duration::from_secs(600);

/// An installation with a caller and a person who decides.
struct Setup {
    cluster: Cluster,
    caller: Client,
    decider: Client,
    session: Session,
}

impl Setup {
    async fn new() -> Result<Self> {
        Self::with(Cluster::start().await?).await
    }

    async fn with(cluster: Cluster) -> Result<Self> {
        let caller = cluster.tenant("a").await?;
        let decider = caller.with_secret(&cluster.key("a", &[Scope::Approve]).await?)?;
        let session = caller.session().await?;
        Ok(Self { cluster, caller, decider, session })
    }

    async fn hold(&self, script: &str) -> Result<HeldRun> {
        HeldRun::record(&self.cluster, &self.caller, &self.session, script, LONG).await
    }
}

async fn decide(
    client: &Client,
    approval: &str,
    decision: ApprovalDecision,
    scope: ApprovalScope,
) -> Result<Approval, Status> {
    let request = DecideApprovalRequest {
        name: approval.to_owned(),
        decision: decision.into(),
        scope: scope.into(),
        reason: "checked".into(),
        ..DecideApprovalRequest::default()
    };
    let response = within("decide", client.approvals().decide_approval(request)).await?;
    response.into_inner().approval.ok_or_else(|| Status::internal("no approval"))
}

async fn allow(client: &Client, approval: &str) -> Result<Approval, Status> {
    decide(client, approval, ApprovalDecision::Allow, ApprovalScope::Once).await
}

async fn deny(client: &Client, approval: &str) -> Result<Approval, Status> {
    decide(client, approval, ApprovalDecision::Deny, ApprovalScope::Unspecified).await
}

async fn get(client: &Client, approval: &str) -> Result<Approval, Status> {
    let request = GetApprovalRequest { name: approval.to_owned() };
    let response = client.approvals().get_approval(request).await?;
    response.into_inner().approval.ok_or_else(|| Status::internal("no approval"))
}

async fn list(client: &Client, filter: ApprovalFilter) -> Result<Vec<Approval>, Status> {
    let parent = "sessions/-".into();
    let request = ListApprovalsRequest { parent, filter: filter.into(), ..Default::default() };
    Ok(client.approvals().list_approvals(request).await?.into_inner().approvals)
}

async fn watch(client: &Client) -> Result<Streaming<WatchApprovalsResponse>, Status> {
    let request = WatchApprovalsRequest { parent: "sessions/-".into() };
    Ok(client.approvals().watch_approvals(request).await?.into_inner())
}

async fn next(stream: &mut Streaming<WatchApprovalsResponse>) -> Result<Approval> {
    let response =
        within("the next approval", stream.message()).await?.context("the stream ended")?;
    response.approval.context("an approval")
}

fn refused(kind: Option<Kind>) -> Refused {
    match kind {
        Some(Kind::Refused(refused)) => refused,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn run_waits_visibly_and_starts_when_allowed() -> Result<()> {
    let setup = Setup::new().await?;
    let Setup { caller, decider, session, .. } = &setup;
    // The worker holds the session: it would take a queued run at once.
    caller.exec(&session.name, "true").await?;
    let held = setup.hold("echo allowed").await?;
    let run = caller.get_run(&held.run).await?;
    assert_eq!((run.state(), &run.waiting_for_approval), (RunState::Queued, &held.approval_id));
    let listed = ListRunsRequest { parent: session.name.clone(), ..Default::default() };
    let listed = caller.runs().list_runs(listed).await?.into_inner().runs;
    assert_eq!(listed[0].waiting_for_approval, held.approval_id);
    let mut stream = caller.watch(&held.run, 0).await?;
    let needed = loop {
        let event =
            within("an event", stream.message()).await?.context("open")?.event.context("event")?;
        if let Some(run_event::Kind::ApprovalNeeded(needed)) = event.kind {
            break needed.approval.context("an approval")?;
        }
    };
    assert_eq!((needed.approval_id, needed.run_id), (held.approval_id.clone(), run.run_id.clone()));
    // Other runs of the session and their slots are not affected.
    assert_eq!(caller.exec(&session.name, "echo other").await?.stdout_text(), "other\n");

    let approval = allow(decider, &held.approval).await?;
    assert_eq!((approval.state(), approval.scope()), (ApprovalState::Allowed, ApprovalScope::Once));
    assert_eq!(approval.reason, "checked");
    let transcript = caller.watch_to_end(&held.run, 0).await?;
    assert_eq!((transcript.stdout_text().as_str(), transcript.outcome()), ("allowed\n", Exited(0)));
    assert_eq!(transcript.run().waiting_for_approval, "");
    setup.cluster.end().await
}

#[tokio::test]
async fn allowed_run_takes_session_without_holder() -> Result<()> {
    let setup = Setup::new().await?;
    let held = setup.hold("echo allowed").await?;
    let waiting = setup.caller.get_session(&setup.session.name).await?;
    allow(&setup.decider, &held.approval).await?;
    let transcript = setup.caller.watch_to_end(&held.run, 0).await?;
    assert_eq!(transcript.stdout_text(), "allowed\n", "{waiting:?}");
    setup.cluster.end().await
}

#[tokio::test]
async fn denied_run_names_approval_and_reason() -> Result<()> {
    let setup = Setup::new().await?;
    let held = setup.hold("echo never").await?;
    deny(&setup.decider, &held.approval).await?;
    let transcript = setup.caller.watch_to_end(&held.run, 0).await?;
    assert_eq!(transcript.stdout_text(), "");
    let refused = refused(transcript.run().outcome.clone().and_then(|outcome| outcome.kind));
    assert_eq!(refused.reason, "APPROVAL_DENIED");
    assert!(
        refused.message.contains(&held.approval_id) && refused.message.contains("checked"),
        "{refused:?}"
    );
    setup.cluster.end().await
}

#[tokio::test]
async fn nobody_deciding_refuses_the_run() -> Result<()> {
    let setup = Setup::new().await?;
    let timeout = Duration::from_millis(1500);
    let held =
        HeldRun::record(&setup.cluster, &setup.caller, &setup.session, "echo never", timeout)
            .await?;
    let transcript = setup.caller.watch_to_end(&held.run, 0).await?;
    let refused = refused(transcript.run().outcome.clone().and_then(|outcome| outcome.kind));
    assert_eq!(refused.reason, "APPROVAL_EXPIRED");
    let status = allow(&setup.decider, &held.approval).await.expect_err("it has expired");
    assert_eq!(refusal(&status).reason, "APPROVAL_DECIDED");
    assert_eq!(get(&setup.decider, &held.approval).await?.state(), ApprovalState::Expired);
    setup.cluster.end().await
}

#[tokio::test]
async fn two_deciders_at_once_get_one_decision() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { apis: 2, ..ClusterOptions::default() }).await?;
    let setup = Setup::with(cluster).await?;
    for _ in 0..5 {
        let held = setup.hold("echo ran").await?;
        let mut deciders = Vec::new();
        for number in 0..6 {
            let secret = setup.cluster.key("a", &[Scope::Approve]).await?;
            deciders.push(Client::connect(&setup.cluster.endpoint(number % 2), &secret).await?);
        }
        let approval = held.approval.as_str();
        let results = join_all(deciders.iter().enumerate().map(|(number, client)| async move {
            if number % 2 == 0 {
                allow(client, approval).await
            } else {
                deny(client, approval).await
            }
        }));
        let (winners, losers): (Vec<_>, Vec<_>) =
            results.await.into_iter().partition(Result::is_ok);
        let [Ok(winner)] = winners.as_slice() else { panic!("{winners:?}") };
        for loser in losers {
            let status = loser.expect_err("lost");
            assert_eq!(refusal(&status).reason, "APPROVAL_DECIDED");
            let info = status.get_details_error_info().context("details")?;
            assert_eq!(info.metadata["decided_by"], winner.decided_by);
            assert!(status.message().contains(&winner.decided_by), "{status:?}");
        }
        let outcome = setup.caller.watch_to_end(&held.run, 0).await?.outcome();
        match winner.state() {
            ApprovalState::Allowed => assert_eq!(outcome, Exited(0)),
            _ => assert_eq!(refused(Some(outcome)).reason, "APPROVAL_DENIED"),
        }
    }
    setup.cluster.end().await
}

#[tokio::test]
async fn decider_needs_scope_and_another_key() -> Result<()> {
    let setup = Setup::new().await?;
    let held = setup.hold("true").await?;
    // The caller's key has the scope, and started the run.
    let status = allow(&setup.caller, &held.approval).await.expect_err("its own request");
    assert_eq!(
        (refusal(&status).code, refusal(&status).reason.as_str()),
        (Code::PermissionDenied, "APPROVAL_OWN_REQUEST")
    );
    let unscoped =
        setup.caller.with_secret(&setup.cluster.key("a", &[Scope::Run, Scope::Admin]).await?)?;
    for status in [
        allow(&unscoped, &held.approval).await.expect_err("no scope"),
        deny(&unscoped, &held.approval).await.expect_err("no scope"),
    ] {
        assert_eq!(refusal(&status).reason, "SCOPE_MISSING");
        assert!(status.message().contains("approve"), "{status:?}");
    }
    assert_eq!(
        get(&unscoped, &held.approval).await?.state(),
        ApprovalState::Pending,
        "it may look"
    );
    let other = setup.cluster.tenant("b").await?;
    let status = allow(&other, &held.approval).await.expect_err("another tenant's");
    assert_eq!(status.code(), Code::NotFound);
    assert!(list(&other, ApprovalFilter::All).await?.is_empty());
    allow(&setup.decider, &held.approval).await?;
    setup.cluster.end().await
}

#[tokio::test]
async fn waiting_run_can_be_canceled_or_closed() -> Result<()> {
    let setup = Setup::new().await?;
    let [canceled, closed] = [setup.hold("true").await?, setup.hold("true").await?];
    let request = CancelRunRequest { name: canceled.run.clone(), ..Default::default() };
    let run = setup.caller.runs().cancel_run(request).await?.into_inner().run.context("run")?;
    assert_eq!(
        run.outcome.and_then(|outcome| outcome.kind),
        Some(Kind::Canceled(Canceled::default()))
    );
    setup.caller.close(&setup.session.name).await?;
    let run = setup.caller.get_run(&closed.run).await?;
    assert_eq!(
        run.outcome.and_then(|outcome| outcome.kind),
        Some(Kind::Canceled(Canceled::default()))
    );
    for held in [canceled, closed] {
        let status = allow(&setup.decider, &held.approval).await.expect_err("its run ended");
        assert_eq!(refusal(&status).reason, "APPROVAL_DECIDED");
    }
    setup.cluster.end().await
}

#[tokio::test]
async fn run_and_watcher_survive_api_restart() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, ..ClusterOptions::default() }).await?;
    // A restarted one listens on the same port.
    cluster.add_api_with(&[]).await?;
    let mut setup = Setup::with(cluster).await?;
    let held = setup.hold("echo after restart").await?;
    let mut stream = watch(&setup.decider).await?;
    assert_eq!(next(&mut stream).await?.approval_id, held.approval_id, "pending ones come first");
    let command = setup.cluster.cli(&setup.decider, &["approvals", "watch", "--json"]);
    let mut cli = Process::start("watch", command, setup.cluster.directory())?;
    eventually("the watcher shows it", || async {
        cli.printed().contains(&held.approval_id).then_some(())
    })
    .await;

    let api = &mut setup.cluster.apis[0].process;
    api.signal(Signal::KILL)?;
    api.exited().await?;
    assert!(within("the stream ends", stream.message()).await.is_err());
    setup.cluster.restart_api(0).await?;
    let reconnected = eventually("the api answers", || async { watch(&setup.decider).await.ok() });
    let mut stream = reconnected.await;
    assert_eq!(next(&mut stream).await?.approval_id, held.approval_id);
    assert_eq!(setup.caller.get_run(&held.run).await?.waiting_for_approval, held.approval_id);

    let second = setup.hold("true").await?;
    let shown = next(&mut stream).await?;
    assert_eq!(
        (shown.approval_id.as_str(), shown.state()),
        (second.approval_id.as_str(), ApprovalState::Pending)
    );
    let reconnected = || async { cli.printed().contains(&second.approval_id).then_some(()) };
    eventually("the watcher reconnected", reconnected).await;
    allow(&setup.decider, &held.approval).await?;
    let shown = next(&mut stream).await?;
    assert_eq!(
        (shown.approval_id.as_str(), shown.state()),
        (held.approval_id.as_str(), ApprovalState::Allowed)
    );
    let transcript = setup.caller.watch_to_end(&held.run, 0).await?;
    assert_eq!(transcript.stdout_text(), "after restart\n");
    eventually("the watcher shows the decision", || async {
        cli.printed().contains("APPROVAL_STATE_ALLOWED").then_some(())
    })
    .await;
    let pending = format!("\"approvalId\":\"{}\"", held.approval_id);
    assert_eq!(
        cli.printed().matches(&pending).count(),
        2,
        "pending and allowed, each once: {}",
        cli.printed()
    );
    cli.signal(Signal::TERM)?;
    cli.exited().await?;
    setup.cluster.end().await
}

#[tokio::test]
async fn grant_is_listed_and_revoked() -> Result<()> {
    let setup = Setup::new().await?;
    let held = setup.hold("true").await?;
    decide(&setup.decider, &held.approval, ApprovalDecision::Allow, ApprovalScope::Tenant).await?;
    let granted = list(&setup.decider, ApprovalFilter::Granted).await?;
    assert_eq!(granted.len(), 1);
    assert_eq!(granted[0].scope(), ApprovalScope::Tenant);
    let mut stream = watch(&setup.decider).await?;
    let revoke = async || {
        let request =
            RevokeApprovalRequest { name: held.approval.clone(), reason: "too wide".into() };
        let response = setup.decider.approvals().revoke_approval(request).await?;
        response.into_inner().approval.ok_or_else(|| Status::internal("no approval"))
    };
    let revoked = revoke().await?;
    assert!(revoked.revoke_time.is_some() && revoked.revoke_reason == "too wide", "{revoked:?}");
    assert_eq!(next(&mut stream).await?.revoked_by, revoked.revoked_by, "watchers see it");
    assert!(list(&setup.decider, ApprovalFilter::Granted).await?.is_empty());
    let status = revoke().await.expect_err("revoked already");
    assert_eq!(refusal(&status).reason, "APPROVAL_NOT_GRANTED");
    setup.cluster.end().await
}

#[tokio::test]
async fn command_line_lists_and_decides() -> Result<()> {
    let setup = Setup::new().await?;
    let codelia = async |arguments: &[&str]| {
        Process::finish(setup.cluster.cli(&setup.decider, arguments), b"").await
    };
    let [first, second] = [setup.hold("true").await?, setup.hold("true").await?];
    let listed = codelia(&["approvals"]).await?;
    assert!(listed.stdout.contains("requests the network"), "{}", listed.stdout);
    let ps = Process::finish(setup.cluster.cli(&setup.caller, &["ps"]), b"").await?;
    assert!(ps.stdout.contains("needs approval"), "{}", ps.stdout);
    let json = codelia(&["--json", "approvals", "list"]).await?;
    let json: serde_json::Value = serde_json::from_str(&json.stdout)?;
    assert_eq!(
        (json[0]["state"].as_str(), json[0]["kind"].as_str()),
        (Some("APPROVAL_STATE_PENDING"), Some("APPROVAL_KIND_NETWORK_PROXY"))
    );

    let allowed =
        codelia(&["approvals", "allow", &first.approval_id, "--for", "session", "--reason", "ok"])
            .await?;
    assert!(allowed.stdout.contains("allowed for session by key"), "{}", allowed.stdout);
    let denied = codelia(&["approvals", "deny", &second.approval_id, "--reason", "no"]).await?;
    assert!(denied.stdout.trim().ends_with(": no"), "{}", denied.stdout);
    let again = codelia(&["approvals", "allow", &second.approval_id]).await?;
    assert!(
        again.code == Some(1) && again.stderr.contains("was denied by key"),
        "{}",
        again.stderr
    );
    assert!(!codelia(&["approvals"]).await?.stdout.contains(&first.approval_id[..18]));
    let granted = codelia(&["approvals", "list", "--granted"]).await?;
    assert!(granted.stdout.contains(&first.approval_id[..18]), "{}", granted.stdout);
    let revoked = codelia(&["approvals", "revoke", &first.approval_id]).await?;
    assert!(revoked.stdout.contains("revoked by key"), "{}", revoked.stdout);
    setup.cluster.end().await
}

#[tokio::test]
async fn watch_on_terminal_asks_for_decision() -> Result<()> {
    let setup = Setup::new().await?;
    let held = setup.hold("echo ran").await?;
    let command = setup.cluster.cli(&setup.decider, &["approvals", "watch"]);
    let mut terminal = Terminal::start(&command, 200, 30)?;
    terminal.shows("[d]eny").await?;
    terminal.type_text("x\n")?;
    terminal.type_text("s\n")?;
    terminal.shows("allowed for session").await?;
    assert_eq!(setup.caller.watch_to_end(&held.run, 0).await?.stdout_text(), "ran\n");
    let second = setup.hold("echo never").await?;
    terminal.shows(&second.approval_id).await?;
    // Someone else is faster.
    deny(&setup.decider, &second.approval).await?;
    terminal.shows("denied by key").await?;
    terminal.hang_up().await?;
    setup.cluster.end().await
}
