//! The policy of a tenant: between that of the installation and those of sessions, and only
//! tighter.

use std::fs;

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{CreateSessionRequest, NetworkMode};
use codelia_store::EventKind;
use codelia_tests::{Client, Exec, Process, ProcessOutput, refusal, shell};
use serde_json::Value;

use super::{ALLOWED, OTHER, Place, lists::poll, network_policy, with_authority};

/// Executes `codelia policy …` for tenant `a`.
async fn policy(place: &Place, operator: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    let arguments = [&["policy"], arguments, &["--scope", "organisation", "--name", "a"]].concat();
    Process::finish(place.cluster.cli(operator, &arguments), b"").await
}

/// Sets the policy of tenant `a` from a text.
async fn set(place: &Place, operator: &Client, text: &str) -> Result<ProcessOutput> {
    let file = place.network.www().join("../tenant.yaml");
    fs::write(&file, text)?;
    let file = file.display().to_string();
    policy(place, operator, &["import", &file, "--reason", "only what they need", "--json"]).await
}

fn get(host: &str) -> String {
    format!("curl -s -o /dev/null --max-time 20 -w '%{{http_code}}' http://{host}/hello")
}

#[tokio::test]
async fn tenant_policy_restricts_its_sessions_and_runs() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let operator = place.cluster.operator().await?;
    let session = place.session(&[ALLOWED, OTHER], &[]).await?;
    let mut run =
        Exec::start(&place.client, with_authority(&session, &poll(&[ALLOWED, OTHER]))).await?;
    run.until_stdout(&format!("{ALLOWED}=200")).await?;
    ensure!(!run.transcript.stdout_text().contains("=403"), "{:?}", run.transcript);

    // What gives more than the installation's policy is refused by field.
    for (text, field) in [
        (
            "network: {allowed_hosts: [allowed.example.com, evil.test]}",
            "policy.network.allowed_hosts[1]",
        ),
        ("network: {mode: host}", "policy.network.mode"),
        ("process: {debug: true}", "policy.process.debug"),
    ] {
        let refused = set(&place, &operator, text).await?;
        ensure!(refused.code == Some(1) && refused.stderr.contains(field), "{text}: {refused:?}");
    }
    let text = format!(
        "network: {{allowed_hosts: [{OTHER}]}}\ncommand: {{blocked_patterns: [forbidden]}}"
    );
    let done = set(&place, &operator, &text).await?;
    ensure!(done.code == Some(0), "{done:?}");

    // A run that is being executed follows, new runs and sessions obey at once.
    run.until_stdout(&format!("{ALLOWED}=403")).await?;
    run.until_stdout(&format!("{OTHER}=200")).await?;
    drop(run);
    ensure!(place.output(&session, &get(ALLOWED)).await? == "403", "dropped by the tenant");
    ensure!(place.output(&session, &get(OTHER)).await? == "200", "the control");
    let status = place.client.start(shell(&session, "echo forbidden")).await.expect_err("blocked");
    ensure!(refusal(&status).reason == "COMMAND_NOT_ALLOWED", "{status:?}");
    let wider = CreateSessionRequest {
        network: NetworkMode::Proxy.into(),
        policy: Some(network_policy(&[ALLOWED], &[])),
        ..CreateSessionRequest::default()
    };
    let status =
        place.client.create(wider.clone()).await.expect_err("wider than the tenant's policy");
    ensure!(refusal(&status).fields == ["policy.network.allowed_hosts[0]"], "{status:?}");
    let other = place.cluster.tenant("b").await?;
    other.create(wider).await.context("another tenant is not restricted")?;

    // The command line explains where values come from.
    let id = session.trim_start_matches("sessions/");
    for arguments in
        [&["policy", "explain", "--json"][..], &["policy", "explain", "-s", id, "--json"]]
    {
        let explained = Process::finish(place.cluster.cli(&place.client, arguments), b"").await?;
        let explained: Value = serde_json::from_str(&explained.stdout).context(explained.stderr)?;
        let fields = explained["fields"].as_array().context("fields")?;
        let source =
            |name: &str| fields.iter().find(|field| field["field"] == name).map(|f| &f["source"]);
        ensure!(
            source("network.allowed_hosts") == Some(&"POLICY_SOURCE_TENANT".into()),
            "{explained}"
        );
        ensure!(
            source("command.blocked_patterns") == Some(&"POLICY_SOURCE_TENANT".into()),
            "{explained}"
        );
        ensure!(
            source("network.allowed_ports") == Some(&"POLICY_SOURCE_SESSION".into()),
            "{explained}"
        );
    }

    // Who, when and why is kept for each version.
    let cleared = policy(&place, &operator, &["delete", "--reason", "no longer"]).await?;
    ensure!(cleared.code == Some(0), "{cleared:?}");
    ensure!(place.output(&session, &get(ALLOWED)).await? == "200", "no policy any more");
    let versions = policy(&place, &operator, &["history", "--json"]).await?;
    let versions: Value = serde_json::from_str(&versions.stdout)?;
    let last = &versions[0];
    ensure!(
        last["version"] == "2" && last["deleted"] == true && last["reason"] == "no longer",
        "{versions}"
    );
    let first = policy(&place, &operator, &["export", "--version", "1", "--json"]).await?;
    let first: Value = serde_json::from_str(&first.stdout)?;
    ensure!(first["policy"]["network"]["allowedHosts"]["values"][0] == OTHER, "{first}");
    ensure!(first["reason"] == "only what they need" && first["keyId"].is_string(), "{first}");
    let events = place.events(EventKind::TenantPolicySet).await?;
    ensure!(
        events.len() == 2 && events.iter().all(|event| event.subject.key.is_some()),
        "{events:?}"
    );
    let denied = policy(&place, &place.client, &["delete", "--reason", "mine"]).await?;
    ensure!(denied.code == Some(1) && denied.stderr.contains("operator"), "{denied:?}");
    place.end().await
}

#[tokio::test]
async fn tenant_policy_without_network_cuts_running_runs() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let operator = place.cluster.operator().await?;
    let session = place.session(&[ALLOWED], &[]).await?;
    let mut run = Exec::start(&place.client, with_authority(&session, &poll(&[ALLOWED]))).await?;
    run.until_stdout(&format!("{ALLOWED}=200")).await?;
    ensure!(set(&place, &operator, "network: {mode: none}").await?.code == Some(0));
    run.until_stdout(&format!("{ALLOWED}=403")).await?;
    drop(run);
    let later = place.client.start(shell(&session, "true")).await?;
    ensure!(place.client.get_run(&later.name).await?.network() == NetworkMode::None, "{later:?}");
    place.end().await
}
