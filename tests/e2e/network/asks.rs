//! Hosts that a person decides about while a connection waits, and a network that needs a decision.

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    Approval, ApprovalDecision, ApprovalFilter, ApprovalScope, CreateSessionRequest,
    DecideApprovalRequest, ListApprovalsRequest, NetworkMode, Policy, TextList,
};
use codelia_store::Scope;
use codelia_tests::{Client, Exec, eventually};

use super::{ALLOWED, OTHER, POLICY, Place, exit_code, network_policy, with_authority};

/// Prints the HTTP status of a request to the host that is left to a person.
fn get_other() -> String {
    format!("curl -s -o /dev/null --max-time 25 -w '%{{http_code}}' http://{OTHER}/hello")
}

/// A session that may reach one host, and another one if a person allows it.
async fn asking_session(place: &Place) -> Result<String> {
    let mut policy = network_policy(&[ALLOWED], &[]);
    let network = policy.network.get_or_insert_default();
    network.ask_hosts = Some(TextList { values: vec![OTHER.to_owned()] });
    let request = CreateSessionRequest {
        network: NetworkMode::Proxy.into(),
        policy: Some(Policy { ..policy }),
        ..CreateSessionRequest::default()
    };
    Ok(place.client.create(request).await?.name)
}

async fn decider(place: &Place) -> Result<Client> {
    place.client.with_secret(&place.cluster.key("a", &[Scope::Approve]).await?)
}

async fn pending(decider: &Client) -> Approval {
    eventually("an approval is requested", || async {
        let request = ListApprovalsRequest {
            parent: "sessions/-".into(),
            filter: ApprovalFilter::Pending.into(),
            ..ListApprovalsRequest::default()
        };
        let listed = decider.approvals().list_approvals(request).await.ok()?.into_inner();
        listed.approvals.into_iter().next()
    })
    .await
}

async fn decide(
    client: &Client,
    approval: &Approval,
    decision: ApprovalDecision,
    scope: ApprovalScope,
) -> Result<()> {
    let request = DecideApprovalRequest {
        name: approval.name.clone(),
        decision: decision.into(),
        scope: scope.into(),
        reason: "checked".into(),
        ..DecideApprovalRequest::default()
    };
    client.approvals().decide_approval(request).await?;
    Ok(())
}

#[tokio::test]
async fn connection_waits_until_a_person_allows_it() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let (session, decider) = (asking_session(&place).await?, decider(&place).await?);
    let run = Exec::start(&place.client, with_authority(&session, &get_other())).await?;
    let approval = pending(&decider).await;
    ensure!((approval.host.as_str(), approval.port) == (OTHER, 80), "{approval:?}");
    ensure!(place.network.requests().is_empty(), "the connection did not wait");
    // Another host of the same session does not wait.
    place.output(&session, &format!("curl -fsS --max-time 20 http://{ALLOWED}/hello")).await?;
    decide(&decider, &approval, ApprovalDecision::Allow, ApprovalScope::Session).await?;
    let done = run.finish().await?;
    ensure!(done.stdout_text() == "200" && exit_code(&done) == Some(0), "{done:?}");
    // The next run of the session need not ask.
    ensure!(
        place.output(&session, &get_other()).await? == "200",
        "the grant holds for the session"
    );
    place.end().await
}

#[tokio::test]
async fn denied_connection_is_refused() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let (session, decider) = (asking_session(&place).await?, decider(&place).await?);
    let run = Exec::start(&place.client, with_authority(&session, &get_other())).await?;
    let approval = pending(&decider).await;
    decide(&decider, &approval, ApprovalDecision::Deny, ApprovalScope::Unspecified).await?;
    let done = run.finish().await?;
    ensure!(done.stdout_text() == "403" && place.network.requests().is_empty(), "{done:?}");
    place.end().await
}

#[tokio::test]
async fn connection_that_nobody_decides_about_is_refused() -> Result<()> {
    let settings = vec![("CODELIA_EGRESS_ASK_TIMEOUT", "1s".to_owned())];
    let Some(place) = Place::start_under("bwrap", POLICY, settings).await? else {
        return Ok(());
    };
    let session = asking_session(&place).await?;
    let done = place.run(&session, &get_other()).await?;
    ensure!(done.stdout_text() == "403" && place.network.requests().is_empty(), "{done:?}");
    place.end().await
}

/// `INV-S7`: without an operator's decision, a run in mode `proxy` waits for a person.
#[tokio::test]
async fn inv_s7_proxy_needs_an_approval() -> Result<()> {
    let Some(place) = Place::start_under("bwrap", "{}", Vec::new()).await? else { return Ok(()) };
    let decider = decider(&place).await?;
    let session = place.client.session().await?.name;
    let mut request = with_authority(
        &session,
        &format!("curl -s -o /dev/null -w '%{{http_code}}' http://{ALLOWED}/hello"),
    );
    request.network = NetworkMode::Proxy.into();
    request.policy = Some(network_policy(&[ALLOWED], &[]));
    let run = place.client.start(request).await?;
    let approval = pending(&decider).await;
    let waiting = place.client.get_run(&run.name).await?;
    ensure!(waiting.waiting_for_approval == approval.approval_id, "{waiting:?}");
    ensure!(place.network.requests().is_empty() && waiting.start_time.is_none(), "{waiting:?}");
    let own = decide(&place.client, &approval, ApprovalDecision::Allow, ApprovalScope::Once).await;
    ensure!(own.is_err(), "the key that asks may not decide");
    decide(&decider, &approval, ApprovalDecision::Allow, ApprovalScope::Once)
        .await
        .context("another key")?;
    let done = place.client.watch_to_end(&run.name, 0).await?;
    ensure!(done.stdout_text() == "200", "{done:?}");
    place.end().await
}
