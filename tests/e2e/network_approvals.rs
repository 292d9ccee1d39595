//! Network modes that need an approval, from `codelia run --network` to the decision.

use std::fs;

use anyhow::{Context, Result};
use codelia_proto::v1::{outcome::Kind::Exited, *};
use codelia_store::Scope;
use codelia_tests::{Client, Cluster, Process, command, eventually, refusal};

use crate::isolation::{isolating, isolating_with};

async fn start(client: &Client, session: &str, network: NetworkMode) -> Result<Run, tonic::Status> {
    let request = StartRunRequest { network: network.into(), ..command(session, &["echo", "ran"]) };
    client.start(request).await
}

async fn allow(client: &Client, run: &Run, scope: ApprovalScope) -> Result<Approval> {
    let request = DecideApprovalRequest {
        name: run.waiting_for_approval.clone(),
        decision: ApprovalDecision::Allow.into(),
        scope: scope.into(),
        reason: String::new(),
        ..DecideApprovalRequest::default()
    };
    client.approvals().decide_approval(request).await?.into_inner().approval.context("an approval")
}

async fn decider(cluster: &Cluster, caller: &Client) -> Result<Client> {
    caller.with_secret(&cluster.key("a", &[Scope::Approve]).await?)
}

#[tokio::test]
async fn proxy_waits_until_session_is_allowed() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let caller = cluster.tenant("a").await?;
    let decider = decider(&cluster, &caller).await?;
    let session = caller.session().await?;
    let none = start(&caller, &session.name, NetworkMode::None).await?;
    assert_eq!(none.waiting_for_approval, "", "no network needs no approval");
    let run = start(&caller, &session.name, NetworkMode::Proxy).await?;
    assert_ne!(run.waiting_for_approval, "");
    let approval = allow(&decider, &run, ApprovalScope::Session).await?;
    assert_eq!(approval.kind(), ApprovalKind::NetworkProxy);
    assert_eq!(caller.watch_to_end(&run.name, 0).await?.outcome(), Exited(0));
    let later = start(&caller, &session.name, NetworkMode::Proxy).await?;
    assert_eq!(later.waiting_for_approval, "", "granted to the session");
    let other = caller.session().await?;
    let elsewhere = start(&caller, &other.name, NetworkMode::Proxy).await?;
    assert_ne!(elsewhere.waiting_for_approval, "", "not granted to another session");

    let revoke = RevokeApprovalRequest { name: approval.name, reason: "done".into() };
    decider.approvals().revoke_approval(revoke).await?;
    let after = start(&caller, &session.name, NetworkMode::Proxy).await?;
    assert_ne!(after.waiting_for_approval, "", "revoked");
    cluster.end().await
}

#[tokio::test]
async fn operators_policy_replaces_approval_for_proxy() -> Result<()> {
    let directory = codelia_tests::Scratch::new()?;
    let policy = directory.join("policy.yaml");
    fs::write(&policy, "network: {mode: proxy}")?;
    let settings = vec![("CODELIA_SANDBOX_POLICY", policy.display().to_string())];
    let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(()) };
    let caller = cluster.tenant("a").await?;
    let session = caller.session().await?;
    let run = start(&caller, &session.name, NetworkMode::Proxy).await?;
    assert_eq!(run.waiting_for_approval, "");
    let status =
        start(&caller, &session.name, NetworkMode::Host).await.expect_err("wider than the policy");
    assert_eq!(refusal(&status).fields, ["network"]);
    cluster.end().await
}

#[tokio::test]
async fn command_line_says_what_it_waits_for() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let caller = cluster.tenant("a").await?;
    let decider = decider(&cluster, &caller).await?;
    let command = cluster.cli(&caller, &["run", "--network", "proxy", "--", "echo", "ran"]);
    let mut process = Process::start("run", command, cluster.directory())?;
    let approval = eventually("the run waits", || async {
        let log = process.read_log();
        let (_, rest) = log.split_once("codelia approvals allow ")?;
        Some(rest.split([')', ' ', '\n']).next()?.to_owned())
    })
    .await;
    let allowed =
        Process::finish(cluster.cli(&decider, &["approvals", "allow", &approval]), b"").await?;
    assert_eq!(allowed.code, Some(0), "{allowed:?}");
    assert!(process.exited().await?.success());
    assert_eq!(process.printed().trim(), "ran");
    cluster.end().await
}
